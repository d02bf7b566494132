"""What of a GPU's memory torch's allocator cannot have, and that a step is said to fit in the rest."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario
from sim.results.beside_allocator import allocator_bytes, communicators
from sim.simulation import simulate

GIB = 2.0**30


def scenario(framework: str = "nanotron", gpu: dict[str, Any] | None = None, **parallelism: int) -> Scenario:
    training = {"seq_len": 4096, "global_batch_size": 16, "framework": framework}
    cluster = {"preset": "dgx-h100", "gpu": {"preset": "h100-sxm"} | (gpu or {})}
    return parse_scenario({"model": "llama3-8b", "cluster": cluster, "parallelism": parallelism, "training": training})


@pytest.mark.parametrize(
    ("layout", "count"),
    [({}, 0), ({"dp": 8}, 2), ({"tp": 8}, 2), ({"dp": 2, "tp": 4}, 3), ({"dp": 2, "tp": 2, "pp": 2}, 5)],
)
def test_sets_of_ranks_have_a_communicator_each_and_one_is_of_all(layout: dict[str, int], count: int) -> None:
    assert communicators(scenario(**layout)) == count


def test_what_is_left_is_the_shown_memory_without_context_and_buffers() -> None:
    """Three connections of 12 MiB in each of 24 channels: 864 MiB a communicator."""
    s = scenario(dp=2, tp=4)
    assert allocator_bytes(s, s.cluster.gpu) == pytest.approx((79.11 - 0.5 - 3 * 0.84375) * GIB)


@pytest.mark.parametrize(("gpu", "shown"), [("a30", 23.53), ("rtx4090", 23.68), ("a100-sxm", 79.25), ("l40s", 48.0)])
def test_a_gpu_shows_what_was_printed_on_one(gpu: str, shown: float) -> None:
    """All of it where nobody's figure is known (L40S)."""
    s = scenario(gpu={"preset": gpu})
    assert allocator_bytes(s, s.cluster.gpu) == pytest.approx((shown - 0.5) * GIB, rel=1e-4)


def test_nothing_is_taken_off_where_nobody_counted() -> None:
    s = scenario("eager", dp=8)
    assert allocator_bytes(s, s.cluster.gpu) == s.cluster.gpu.memory_bytes


def test_a_step_fits_in_what_is_left() -> None:
    peak = simulate(scenario(dp=2, tp=4)).outcome.peak_memory_bytes
    for beside, fits in ((4.0 * GIB, True), (2.0 * GIB, False)):  # some 3.3 GiB are the allocator's no more
        found = simulate(scenario(gpu={"memory_bytes": peak + beside}, dp=2, tp=4)).outcome
        assert (found.peak_memory_bytes, found.fits_in_memory) == (peak, fits)
        assert any("does not fit" in warning for warning in found.warnings) is not fits
