"""Local attention: pairs against a count one by one, times, cache and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.attention_pairs import attended_pairs
from sim.core.errors import InputError
from sim.core.operator_kinds import shape_flops
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.inputs.windows import Window
from sim.models.dims import Shard, dims
from sim.models.flops import model_flops_per_token
from sim.models.layer import layer_parts
from sim.models.layers import layer_specs
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import scenario_with

MODEL = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "vocab": 1000}


def training(seq_len: int = 4096, parallelism: dict[str, Any] | None = None, **model: Any) -> Scenario:
    return scenario_with({"seq_len": seq_len, "global_batch_size": 1}, parallelism, model={**MODEL, **model})


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
@pytest.mark.parametrize(("q", "kv"), [(1, 1), (1, 17), (5, 17), (17, 17), (16, 24)])
def test_pairs_are_those_counted_one_by_one(chunked: bool, tokens: int, q: int, kv: int) -> None:
    window = Window(tokens, chunked)

    def sees(query: int, key: int) -> bool:
        near = query // tokens == key // tokens if chunked else query - key < tokens
        return key <= query and near

    rows = [[key for key in range(kv) if sees(query, key)] for query in range(kv - q, kv)]
    assert window.pairs(q, kv) == sum(len(row) for row in rows)
    assert window.reach(q, kv) == len({key for row in rows for key in row})


@pytest.mark.parametrize("window", [Window(128), Window(100), Window(128, True), Window(4095)])
def test_blocks_have_the_pairs_of_the_window(window: Window) -> None:
    for q, kv in ((4096, 4096), (512, 4096), (4096, 8192)):
        number, queries, keys = window.blocks(q, kv)
        assert number * attended_pairs(queries, keys, True) == pytest.approx(window.pairs(q, kv), rel=0.02)


def test_flops_of_a_windowed_layer_are_its_pairs() -> None:
    scenario = training(window=128, attention_pattern=["sliding", "full"])
    d = dims(scenario)
    for layer, pairs in ((0, Window(128).pairs(4096, 4096)), (1, 4096**2 / 2)):
        core = next(p for p in layer_parts(scenario, d, layer, Shard()) if p.core)
        (kernel,) = core.forward
        assert kernel.flops == 4 * 8 * 64 * pairs
        assert shape_flops(kernel.kind, kernel.shape) == pytest.approx(kernel.flops, rel=0.02)


def test_a_window_of_the_whole_sequence_changes_nothing() -> None:
    plain, wide = training(), training(window=4096)
    assert simulate(wide).step_time_s == simulate(plain).step_time_s
    assert model_flops_per_token(wide.model, 4096) == model_flops_per_token(plain.model, 4096)
    assert len(set(layer_specs(wide.model))) == 1


@pytest.mark.parametrize(("window", "masked"), [(4095, True), (4096, True), (4097, False)])
def test_transformers_masks_sequences_that_fill_the_window(window: int, masked: bool) -> None:
    """masking_utils.py, `_ignore_causal_mask_sdpa`: no mask where `kv_length < local_attention_size`."""
    sizes = {"seq_len": 4096, "global_batch_size": 1, "framework": "transformers"}
    scenario = scenario_with(sizes, model={**MODEL, "window": window})
    core = next(p for p in layer_parts(scenario, dims(scenario), 0, Shard()) if p.core)
    assert [i.masked for i in core.forward if i.kind == "attention_forward"] == [masked]
    assert any("as a mask" in note for note in scenario.warnings) == masked


def test_narrower_windows_are_faster_and_count_fewer_flops() -> None:
    models = [training(16384, window=w, heads=64).model for w in (256, 2048, 8192)] + [training(heads=64).model]
    times = [
        simulate(training(16384, window=w, heads=64) if w else training(16384, heads=64)).step_time_s
        for w in (256, 2048, 8192, None)
    ]
    assert times == sorted(times)
    counts = [model_flops_per_token(m, 16384) for m in models]
    assert counts == sorted(counts)


def serving(**model: Any) -> Any:
    requests = {"count": 8, "prompt_len": 4000, "output_len": 96}
    return simulate_serving(scenario_with(model={**MODEL, **model}, inference={"requests": requests}))


def test_the_cache_of_a_window_keeps_its_tokens() -> None:
    full, half = serving(), serving(window=128, attention_pattern=["sliding", "full"])
    whole = full.capacity.token_bytes[0]
    assert whole == 4 * 2 * 2 * 64 * 2  # layers, key and value, KV heads, head size, bytes
    assert half.capacity.token_bytes[0] == pytest.approx(whole * (0.5 + 0.5 * 128 / 4096))
    assert half.end_s < full.end_s


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_context_parallelism_cuts_no_window(method: str) -> None:
    layout = {"cp": 4, "cp_method": method, "cp_split": "striped"}
    with pytest.raises(InputError, match=r"parallelism\.cp_method: found .* with model\.window 128 only all_to_all"):
        training(parallelism=layout, window=128)
    training(parallelism=layout, window=4096)  # hides nothing
    training(parallelism={"cp": 4, "cp_method": "all_to_all"}, window=128)


def test_pieces_of_a_gathered_sequence_see_their_windows() -> None:
    """Of equal pieces of the sequence the four ranks' pairs are those of the whole."""
    scenario = training(parallelism={"cp": 4, "cp_method": "all_gather", "cp_split": "zigzag"}, window=128)
    d = dims(scenario)
    flops = 0.0
    for rank in range(4):
        core = next(p for p in layer_parts(scenario, d, 0, Shard(rank)) if p.core)
        flops += sum(item.flops for item in core.forward if item.kind == "attention_forward")
    assert flops == 4 * 8 * 64 * Window(128).pairs(4096, 4096)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"attention_pattern": ["sliding"]}, "model.attention_pattern: found .* needs model.window"),
        ({"window": 8, "attention_pattern": ["full"]}, "some layer must be sliding or chunked"),
        ({"window": 8, "attention_pattern": ["local"]}, "attention_pattern"),
        ({"window": 0}, "model.window"),
    ],
)
def test_patterns_that_say_nothing_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training(**model)


def test_a_pattern_of_equal_layers_is_none() -> None:
    plain, written = training(), training(attention_pattern=["full", "full"])
    assert written.model == plain.model
    assert emit(written, "megatron") == emit(plain, "megatron")


def test_torchtitan_has_no_window() -> None:
    scenario = training(window=128)
    assert scenario.model.variations == {"window": 128, "attention_pattern": ("sliding",)}
    with pytest.raises(InputError, match=r"model\.window: found 128"):
        emit(scenario, "torchtitan")
