"""Trees of drafted tokens, as SGLang drafts them: several tokens in each step, of which one at most is kept."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.inputs.workloads import Speculative
from sim.serve.prices.load import Load
from sim.serve.scheduling.speculation import Acceptance, drafting, joins_states
from tests.sim.serve.serving_cases import SMALL, costs_of, every_way, serving

DRAFT = {**SMALL, "layers": 1}
TREE = {"draft": DRAFT, "tokens": 5, "branches": 4, "tree_tokens": 7, "hidden_states": 1}


def given(engine: str = "sglang-0.5", **changes: Any) -> dict[str, Any]:
    requests = {"prompt_len": 64, "output_len": 37, "count": 3}
    return {"engine": engine, "requests": requests, "speculative": {**TREE, **changes}}


def test_each_step_drafts_a_token_of_every_branch_and_the_model_checks_the_tree() -> None:
    """Three sequences: eight tokens of each are checked, and four more passes draft four tokens of each."""
    load = Load(24, 3, 3 * 108, (), 24, 8)
    checked, *steps = drafting(load, Speculative.model_validate(TREE))
    assert (checked.tokens, checked.queries, checked.samples) == (24, 8, 3)
    assert [(x.tokens, x.decodes, x.queries, x.samples) for x in steps] == [(12, 3, 4, 12)] * 4
    assert [x.decode_kv for x in steps] == [3 * (100 + i) for i in range(2, 6)]
    assert joins_states(checked)
    assert not any(joins_states(x) for x in steps)


def test_at_most_one_token_a_step_is_kept() -> None:
    assert Acceptance(1.0, 0, 5).accepted(0, 0, 7) == 5
    assert Acceptance(0.0, 0, 5).accepted(0, 0, 7) == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_all_engines_of_time_agree_and_with_all_accepted_a_check_gives_a_token_a_step(acceptance: float) -> None:
    """36 tokens behind the first: six checks of six tokens each if all are right."""
    sim = every_way(serving(given(acceptance=acceptance)))[0]
    use = sim.result["speculation"]
    assert use["drafted_tokens"] == 7 * use["verifications"]
    assert use["verifications"] == {0.0: 3 * 36, 1.0: 3 * 6}.get(acceptance, use["verifications"])
    assert use["tokens_per_verification"] <= 6
    assert use["expected_tokens_per_verification"] == sum(acceptance**i for i in range(6))


def test_a_tree_takes_longer_to_draft_and_to_check_than_as_many_steps_in_a_row() -> None:
    seconds = []
    for changes, checked in (({}, 8), ({"branches": 1, "tree_tokens": None}, 6)):
        speculative = {**TREE, "draft": {"preset": "llama3-8b", "layers": 1}, **changes}
        section = {"engine": "sglang-0.5", "requests": {"prompt_len": 64, "output_len": 37}, "speculative": speculative}
        costs = costs_of(parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": section}))
        load = Load(64 * checked, 64, 64 * 500, (), 64 * checked, checked)
        seconds.append((costs.draft_seconds(load)[0], costs.device_seconds(load)[0]))
    assert seconds[0][0] > seconds[1][0]
    assert seconds[0][1] > seconds[1][1]


@pytest.mark.parametrize(
    ("engine", "overlaps"), [("sglang-0.5.10", False), ("sglang-0.5.11", False), ("sglang-0.5.14", True)]
)
def test_sglangs_host_works_beside_the_gpu_with_trees_since_0_5_14(engine: str, overlaps: bool) -> None:
    assert costs_of(serving(given(engine))).host.overlaps is overlaps


def test_graphs_are_of_sequences_with_all_of_a_trees_tokens() -> None:
    host = costs_of(serving(given())).host
    assert all(n % 8 == 0 for n in host.graph_sizes)
    assert host.draft is not None
    assert host.draft.later_sizes == tuple(n // 8 for n in host.graph_sizes)


@pytest.mark.parametrize(
    ("changes", "engine", "told"),
    [
        ({"branches": 1}, "sglang-0.5", "tree_tokens: found 7; a chain (branches 1) has as many tokens as steps"),
        ({"tokens": 2, "branches": 2}, "sglang-0.5", "tree_tokens: found 7; 2 steps with 2 branches have at most 6"),
        ({}, "vllm-0.33", "branches: found 4; engine vllm-0.33 drafts chains; allowed: 1 (or engine sglang"),
    ],
)
def test_what_no_tree_is_is_refused(changes: dict[str, Any], engine: str, told: str) -> None:
    data = {"model": SMALL, "cluster": "dgx-h100", "inference": given(engine, **changes)}
    with pytest.raises(InputError, match="speculative") as error:
        parse_scenario(data)
    assert told in str(error.value)
