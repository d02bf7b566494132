"""Noise detection and the selection of quiet windows; bucket making."""

from __future__ import annotations

import time

import pytest
import torch

from calibrate.gradient_times import Beneath, Beside, expected_waits_s
from calibrate.machine_load import machine_busy_s
from calibrate.parallel.data import flat_gradients, make_buckets
from calibrate.profile_from_steps import _share, chosen_rounds, median_and_spread, representative
from calibrate.timed_rounds import Calibration, Log, Step, good_rounds

pytestmark = pytest.mark.real


def _log(*rounds: tuple[float, float, float, float]) -> Log:
    """Rounds of (first step's seconds, second's, foreign cores in the steps, in the calibration)."""
    log = Log(0)
    for first, second, in_steps, in_calibration in rounds:
        log.steps += [Step(0, first, [], 0.0, 0.0), Step(0, second, [], 0.0, in_steps)]
        log.calibrations.append(Calibration({}, [], [], [], None, [], in_calibration))
    return log


def test_noisy_and_unsteady_rounds_are_dropped() -> None:
    log = _log((1, 1.05, 0.1, 0.1), (1, 1.0, 0.9, 0.1), (1, 1.0, 0.1, 0.9), (1, 1.5, 0, 0), (1.5, 1.5, 0, 0))
    assert good_rounds(log) == [0, 4]
    assert chosen_rounds(log) == [0, 4]


def test_the_quietest_three_stand_in_where_none_was_good() -> None:
    log = _log((1, 1, 0.9, 0.1), (1, 1, 0.1, 0.4), (1, 1, 1.5, 0.3), (1, 1, 0.3, 0.6))
    assert chosen_rounds(log) == [0, 1, 3]


def test_the_representative_step_is_the_median_one() -> None:
    log = _log((1.0, 2.5, 0, 0), (3.1, 9.0, 0, 0))
    assert representative(log, [0, 1, 2]) == 1


def test_median_and_spread() -> None:
    assert median_and_spread([1.0, 2.0, 4.0]) == (2.0, 0.5)


@pytest.mark.parametrize(("others_cores", "lost_s"), [(0.1, 0.3), (0.9, 0.2)])
def test_what_collectives_take_from_computation(others_cores: float, lost_s: float) -> None:
    """Seconds lost (the wall's in quiet windows, of all threads in others) by those of the collectives alone."""
    beside = Beside((("all_reduce", 2, 4), ("all_reduce", 2, 4), ("all_gather", 2, 8)), (), 0.3, 0.2)
    log = Log(0, calibrations=[Calibration({}, [], [], [], beside, [], others_cores)])
    times = {("all_reduce", 2): {4: [0.1]}, ("all_gather", 2): {8: [0.3, 0.2]}}
    assert _share([log], [0], times).collective_sm_share == pytest.approx(lost_s / (2 * 0.1 + 0.25))


def test_waits_that_collectives_alone_would_cause() -> None:
    """A gather of 2 s started at 0 and wanted at 1 keeps the rank for 1 s, whatever it really took; one behind it in
    the queue, of 1 s, wanted 5 s later, does not keep it, though the rank waited for another 3 s."""
    ns = 10**9
    held_up = [Beneath("all_gather", 2, 8, 0, 1 * ns, 4 * ns), Beneath("reduce_scatter", 2, 8, 1, 9 * ns, 12 * ns)]
    seconds = {"all_gather": 2.0, "reduce_scatter": 1.0}
    assert expected_waits_s(held_up, lambda c: seconds[c.op]) == pytest.approx(1.0)
    behind = [held_up[0], held_up[1]._replace(from_ns=4 * ns, until_ns=7 * ns)]
    assert expected_waits_s(behind, lambda c: seconds[c.op]) == pytest.approx(2.0)


def test_busy_time_counts_this_process() -> None:
    """Half a second of work shows in the machine's busy time, whatever else runs."""
    before, own = machine_busy_s(), time.process_time()
    while time.process_time() - own < 0.5:
        pass
    assert machine_busy_s() - before > 0.4


@pytest.mark.parametrize("limit", [0, 1, 10, 100, 10_000])
def test_buckets_hold_everything_in_order(limit: int) -> None:
    sizes = [7, 1, 30, 2, 2, 60, 5]
    buckets = make_buckets(sizes, limit)
    assert [i for b in buckets for i in b] == list(range(len(sizes)))
    for bucket in buckets[:-1]:
        assert sum(sizes[i] for i in bucket) >= limit
        assert sum(sizes[i] for i in bucket[:-1]) < max(limit, 1)


def test_flat_gradients_are_one_buffer() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    flat = flat_gradients(params)
    (params[0].sum() + 2 * params[1].sum()).backward()
    assert flat.tolist() == [1.0] * 6 + [2.0] * 4
