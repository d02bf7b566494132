"""A result's parts add up: seconds of a rank to the step, of the critical path to the step, bytes to the peak."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.metamorphic.laws import SMALL, vary

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"parallelism": {"dp": 4}},
    "zero3": {"parallelism": {"dp": 4, "zero": 3}},
    "tensor": {"parallelism": {"tp": 4, "sp": True, "dp": 2, "zero": 1}},
    "pipeline": {"parallelism": {"pp": 4, "dp": 2}},
    "split backward, offloaded": {
        "parallelism": {"pp": 2, "cp": 2, "schedule": "zb_h1"},
        "training": {"activation_offload": True, "recompute": "selective_op"},
    },
    "both ends of the model on one rank": {"parallelism": {"pp": 4, "schedule": "zb_v"}},
    "uneven split": {"parallelism": {"cp": 4, "cp_split": "contiguous"}},
    "uneven pipeline, large optimizer": {"parallelism": {"pp": 4}, "model": {"vocab": 1_000_000}},
    "straggler": {"parallelism": {"dp": 4}, "faults": {"stragglers": [{"rank": 1}]}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_seconds_of_every_rank_add_up_to_the_step(name: str) -> None:
    result = vary(SMALL, **VARIANTS[name])
    step_s = result["step_time_s"]
    for rank in result["ranks"]:
        parts = [rank[k] for k in ("compute_s", "exposed_comm_s", "bubble_s", "waiting_s")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step_s, rel=1e-9)  # a norm before the last backward counts once
    assert sum(result["critical_path"].values()) == pytest.approx(step_s, rel=1e-6)
    low, high = result["step_time_interval_s"]
    assert low < step_s < high


@pytest.mark.parametrize("name", VARIANTS)
def test_the_peak_lies_between_what_is_always_held_and_the_sum_of_the_most_of_each(name: str) -> None:
    for rank in vary(SMALL, **VARIANTS[name])["memory"]:
        always = rank["parameters"] + rank["gradients"] + rank["optimizer"]
        assert always <= rank["peak"] <= (always + rank["activations"] + rank["buffers"]) * (1 + 1e-9)


def test_who_waits_for_an_uneven_split_says_so() -> None:
    result = vary(SMALL, **VARIANTS["uneven split"])
    first, last = result["ranks"][0], result["ranks"][-1]
    assert first["waiting_s"] > 0.01 * result["step_time_s"]
    assert last["waiting_s"] == pytest.approx(0.0, abs=0.005 * result["step_time_s"])
