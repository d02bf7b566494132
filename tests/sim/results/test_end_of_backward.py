"""The end of a backward, where all gradients are there: what lies beside them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.convert.settings import ALL_IN_BF16
from sim.core.actions import Kind
from sim.inputs.scenario import parse_scenario
from sim.programs.stages import Stage
from sim.results.memory import AtMost
from sim.results.memory_changes import changes_of
from sim.simulation import Simulation, simulate

TOKENS, VOCAB, HIDDEN = 512, 128256, 4096
LAYERS, LAYER = 4, 218_112_000  # elements
WORKSPACES = 2 * 32 * 2**20


def simulated(**training: Any) -> Simulation:
    own: dict[str, Any] = {"seq_len": TOKENS, "global_batch_size": 1, "framework": "transformers"}
    own |= {"recompute": "full", "cross_entropy": "tiled"} | training
    model = {"preset": "llama3-8b", "layers": LAYERS}
    return simulate(parse_scenario({"model": model, "training": own, "cluster": "dgx-h100"}))


def memory(**training: Any) -> AtMost:
    return simulated(**training).outcome.memory[0]


def replaced(stage: Stage) -> Stage:
    """The stage without copies of weights."""
    return replace(stage, dp=replace(stage.dp, casts=None))


def states(found: AtMost) -> float:
    return found.parameters + found.gradients + found.optimizer


def test_the_embedding_s_gradient_is_there_once() -> None:
    """torch keeps the dense gradient that the embedding's backward makes; it was counted twice, 7 % of this peak."""
    found = memory(**ALL_IN_BF16)
    assert found.peak == pytest.approx(states(found) + 2 * TOKENS * HIDDEN + WORKSPACES, rel=1e-4)


def test_of_a_second_micro_batch_it_is_added_to_the_first_one_s() -> None:
    once, twice = (memory(**ALL_IN_BF16, global_batch_size=n, micro_batch_size=1) for n in (1, 2))
    assert twice.peak >= once.peak + 2 * VOCAB * HIDDEN * 0.9


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_autocast_s_copies_are_freed_by_then(recompute: str) -> None:
    """A captured step of Transformers' Trainer over fp32 weights (4 layers, 4,096 tokens, full recomputation) had all
    gradients beside the states as the embedding's backward ran, and nothing of 16 bits: 28.72 GiB with its input."""
    found = memory(param_dtype="fp32", recompute=recompute)
    assert found.peak == pytest.approx(states(found) + 4 * TOKENS * HIDDEN + WORKSPACES, rel=1e-4)


def test_autocast_s_cache_is_full_as_the_forward_ends() -> None:
    """Layers that run again keep nothing, but copies of weights that are trained stay until the forward ends: in a
    captured step of 20 layers the log-softmax of the forward had 1.2 GiB more than its gradient had."""
    training = {"param_dtype": "fp32", "cross_entropy": "unfused"}
    trained, frozen = (simulated(**training, **more) for more in ({}, {"lora": {"rank": 16}}))
    (stage,), (adapted,) = (s.stages[0].values() for s in (trained, frozen))
    forward, without = (changes_of(s, Kind.F, True, False) for s in (stage, replaced(stage)))
    assert forward[0][2] - without[0][2] == pytest.approx(2 * (LAYERS * LAYER + VOCAB * HIDDEN), rel=1e-3)
    assert forward[1][2] + forward[0][2] == pytest.approx(2 * (VOCAB * HIDDEN + HIDDEN))  # the head's, for its backward
    of_frozen = (
        changes_of(adapted, Kind.F, True, False)[0][2] - changes_of(replaced(adapted), Kind.F, True, False)[0][2]
    )
    assert of_frozen < 2 * (LAYER + VOCAB * HIDDEN + 10**8)
