"""`layers_per_stage: balanced`: no stage longer than whole layers make it, and the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.emit import emit
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.models.balance import cost_of_last, deal, with_balanced_stages
from sim.simulation import simulate

FILE = "scenarios/uneven_pp8.yaml"
BALANCED = "parallelism.layers_per_stage=balanced"


@given(st.integers(1, 40), st.integers(1, 12), st.floats(0, 9))
def test_no_way_to_deal_the_layers_has_a_shorter_longest_stage(layers: int, stages: int, last: float) -> None:
    """A limit below the longest stage leaves too little room: floor(limit) layers on each, less on the last."""
    counts = deal(layers, stages, last)
    assert sum(counts) == layers
    assert len(counts) == stages
    longest = max([*counts[:-1], counts[-1] + last])
    below = longest - 1e-6
    if last < below:
        assert (stages - 1) * int(below) + int(below - last) < layers


def test_the_output_layer_counts_as_its_multiplications() -> None:
    """A weight is 2 FLOPs a token forward and 4 backward; causal attention 2·h·seq forward, 2.5 times that backward."""
    s = load_scenario(FILE)
    h, ffn, kv, vocab, seq = 4096, 14336, 1024, 128256, 8192
    weights = 2 * h * h + 2 * h * kv + 3 * h * ffn
    layer = 6 * weights + 7 * h * seq
    assert cost_of_last(s) == pytest.approx(6 * h * vocab / layer, rel=1e-3)


@pytest.mark.parametrize(("pp", "counts"), [(1, (32,)), (4, (8, 9, 9, 6)), (8, (4, 5, 5, 4, 4, 4, 4, 2))])
def test_it_follows_the_number_of_stages(pp: int, counts: tuple[int, ...]) -> None:
    s = with_balanced_stages(load_scenario(FILE, [BALANCED, f"parallelism.pp={pp}"]))
    assert s.parallelism.stage_layers == counts


def test_a_result_says_the_numbers_and_they_give_the_same_step() -> None:
    found = simulate(load_scenario(FILE, [BALANCED])).result
    counts = found["scenario"]["parallelism"]["layers_per_stage"]
    assert counts == [4, 5, 5, 4, 4, 4, 4, 2]
    assert simulate(parse_scenario(found["scenario"])).step_time_s == found["step_time_s"]
    even = simulate(load_scenario(FILE))
    assert found["step_time_s"] < 0.85 * even.step_time_s


def test_flags_name_the_stages() -> None:
    assert "tttt|ttttt|ttttt|tttt|tttt|tttt|tttt|tt" in emit(load_scenario(FILE, [BALANCED]), "megatron").replace(
        "E", ""
    )


def test_serving_lists_its_layers() -> None:
    with pytest.raises(InputError, match="serving takes a list"):
        load_scenario("scenarios/serve_llama405b_pp2.yaml", ["parallelism.layers_per_stage=balanced"])
