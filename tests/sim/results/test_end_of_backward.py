"""The end of a backward, where all gradients are there: what lies beside them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.convert.settings import ALL_IN_BF16
from sim.inputs.scenario import parse_scenario
from sim.results.memory import AtMost
from sim.simulation import simulate

TOKENS, VOCAB, HIDDEN = 512, 128256, 4096
WORKSPACES = 2 * 32 * 2**20


def memory(**training: Any) -> AtMost:
    own: dict[str, Any] = {"seq_len": TOKENS, "global_batch_size": 1, "framework": "transformers"}
    own |= {"recompute": "full", "cross_entropy": "tiled"} | training
    model = {"preset": "llama3-8b", "layers": 4}
    found = simulate(parse_scenario({"model": model, "training": own, "cluster": "dgx-h100"}))
    return found.outcome.memory[0]


def states(found: AtMost) -> float:
    return found.parameters + found.gradients + found.optimizer


def test_the_embedding_s_gradient_is_there_once() -> None:
    """torch keeps the dense gradient that the embedding's backward makes; it was counted twice, 7 % of this peak."""
    found = memory(**ALL_IN_BF16)
    assert found.peak == pytest.approx(states(found) + 2 * TOKENS * HIDDEN + WORKSPACES, rel=1e-4)


def test_of_a_second_micro_batch_it_is_added_to_the_first_one_s() -> None:
    once, twice = (memory(**ALL_IN_BF16, global_batch_size=n, micro_batch_size=1) for n in (1, 2))
    assert twice.peak >= once.peak + 2 * VOCAB * HIDDEN * 0.9
