"""What of a GPU's memory torch's allocator cannot have, and that a step is said to fit in the rest."""

from __future__ import annotations

from typing import Any

import pytest

from sim.commands.search import Asked, search_space
from sim.core.executors import local_workers
from sim.core.units import n_bytes, percent
from sim.inputs.input_source import Source
from sim.inputs.scenario import Scenario, parse_scenario
from sim.results.beside_allocator import allocator_bytes, communicators
from sim.search.found import limit_of_any
from sim.search.space_of_scenario import make_space
from sim.simulation import simulate
from sim.views.headline import headline, memory_limit_bytes

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


@pytest.mark.parametrize(
    ("gpu", "shown"), [("a30", 23.53), ("rtx4090", 23.68), ("a100-sxm", 79.25), ("a40", 44.39), ("rtx-6000-ada", 48.0)]
)
def test_a_gpu_shows_what_was_printed_on_one(gpu: str, shown: float) -> None:
    """All of it where nobody's figure is known (RTX 6000 Ada)."""
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


def test_every_view_reads_the_limit_that_decides() -> None:
    """A step between what is left and the whole memory: what it is compared with is what is shown."""
    peak = simulate(scenario(dp=2, tp=4)).outcome.peak_memory_bytes
    found = simulate(scenario(gpu={"memory_bytes": peak + 2 * GIB}, dp=2, tp=4)).outcome
    row = found.memory[0]
    assert (row.limit < row.peak, found.fits_in_memory) == (True, False)
    assert row.limit + (row.beside or 0.0) == pytest.approx(peak + 2 * GIB)
    shown = next(number for number in headline(found) if number.name == "Peak memory")
    assert f"{percent(peak / row.limit)} of {n_bytes(row.limit)} beside CUDA and NCCL" in shown.note
    assert memory_limit_bytes(found) == row.limit
    assert any(f"{peak / GIB:.1f} GiB of {row.limit / GIB:.1f} GiB" in warning for warning in found.warnings)


def test_what_was_not_counted_is_said_to_be_tight() -> None:
    peak = simulate(scenario("eager", dp=8)).outcome.peak_memory_bytes
    found = simulate(scenario("eager", {"memory_bytes": peak + GIB}, dp=8)).outcome
    assert (found.fits_in_memory, found.memory[0].beside) == (True, None)
    assert headline(found)[-1].note.startswith("tight")
    own = simulate(scenario("nanotron", dp=8)).outcome.peak_memory_bytes
    memory = (own + (0.1 + 0.5 + 2 * 0.84375) * GIB) / 0.988875  # 0.1 GiB more than what CUDA and NCCL leave
    counted = simulate(scenario("nanotron", {"memory_bytes": memory}, dp=8)).outcome
    assert counted.fits_in_memory
    assert headline(counted)[-1].note.startswith("✓ fits")


def test_a_search_without_a_limit_takes_what_is_left_and_one_with_it_that() -> None:
    """Whatever the limit is: one as large as the whole memory is a limit of the user's own too."""
    s = scenario(dp=2, tp=4)
    whole, left = s.cluster.gpu.memory_bytes, allocator_bytes(s, s.cluster.gpu)
    peak = simulate(s).outcome.peak_memory_bytes
    gpu = {"preset": "h100-sxm", "memory_bytes": peak + 2 * GIB}
    data = {
        "model": "llama3-8b",
        "cluster": {"preset": "dgx-h100", "gpu": gpu},
        "training": {"seq_len": 4096, "global_batch_size": 16, "framework": "nanotron"},
    }
    assert left < whole
    only = {"tp": [4], "dp": [2], "sp": [False], "micro_batch_size": [1], "recompute": ["none"], "zero": [0]}
    space = make_space(Source("test", data), 8, "test", {**only, "pp": [1], "cp": [1], "ep": [1]}, [])
    with local_workers(1) as pool:
        (usual, none), (own, best) = [search_space(space, x, Asked(top=1), pool) for x in (None, peak + 2 * GIB)]
    assert not none
    assert limit_of_any(usual) == pytest.approx((peak + 2 * GIB) * 0.988875 - 0.5 * GIB)
    assert limit_of_any(own) == best[0].memory_limit_bytes == peak + 2 * GIB


def test_a_teacher_on_gpus_of_its_own_has_their_whole_memory() -> None:
    """It has none of the student's communicators."""
    data: dict[str, Any] = {
        "model": "llama3.2-1b",
        "cluster": "dgx-h100",
        "parallelism": {"dp": 4, "zero": 1},
        "training": {"seq_len": 1024, "global_batch_size": 4, "framework": "nanotron", "recompute": "full"},
        "distillation": {"teacher": "llama3-8b", "placement": "other"},
    }
    teacher = simulate(parse_scenario(data)).teacher
    assert teacher is not None
    gpu = {"preset": "h100-sxm", "memory_bytes": teacher.held_bytes * 1.001}
    tight = parse_scenario({**data, "cluster": {"preset": "dgx-h100", "gpu": gpu}})
    assert allocator_bytes(tight, tight.cluster.gpu) < teacher.held_bytes
    assert simulate(tight).outcome.fits_in_memory


def test_a_search_proposes_no_more_than_cuda_shows() -> None:
    """A run between what CUDA shows and the whole memory is said to be tight; a search leaves it out."""
    s = scenario("eager", dp=8)
    peak = simulate(s).outcome.peak_memory_bytes
    gpu = {"preset": "h100-sxm", "memory_bytes": peak * 1.005}
    tight = scenario("eager", gpu, dp=8)
    assert tight.cluster.gpu.shown_bytes < peak < allocator_bytes(tight, tight.cluster.gpu)
    data = {
        "model": "llama3-8b",
        "cluster": {"preset": "dgx-h100", "gpu": gpu},
        "training": {"seq_len": 4096, "global_batch_size": 16},
    }
    only = {"dp": [8], "zero": [0], "micro_batch_size": [1], "recompute": ["none"]}
    space = make_space(Source("test", data), 8, "test", only, [])
    with local_workers(1) as pool:
        (usual, none), (_, best) = [search_space(space, x, Asked(top=1), pool) for x in (None, peak * 1.002)]
    assert best
    assert not none
    assert limit_of_any(usual) == tight.cluster.gpu.shown_bytes
