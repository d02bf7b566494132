"""Noise detection and the selection of quiet windows; bucket making."""

from __future__ import annotations

import time

import pytest
import torch

from calibrate.paired import median_and_spread, quiet, representative, step_seconds
from calibrate.parallel.data import flat_gradients, make_buckets
from calibrate.parallel.pipeline import Record
from calibrate.quiet import machine_busy_s
from calibrate.rounds import Calibration, Log, Step

pytestmark = pytest.mark.real


def _calibration(foreign: float) -> Calibration:
    return Calibration({}, [], [], [], foreign)


def test_noisy_windows_are_dropped() -> None:
    assert quiet([_calibration(f) for f in (0.1, 0.9, 0.2, 0.3)]) == [0, 2]


def test_the_quietest_three_stand_in_where_none_was_quiet() -> None:
    assert quiet([_calibration(f) for f in (0.9, 0.4, 1.5, 0.6)]) == [0, 1, 3]


def test_a_step_lasts_until_its_last_rank() -> None:
    def log(rank: int, ends: list[int]) -> Log:
        steps = [Step(100, [Record("F", 0, 0, 100, e)], 0.0, 0.0) for e in ends]
        return Log(rank, steps)

    logs = [log(0, [1100, 2100, 900]), log(1, [600, 2600, 3100])]
    assert [step_seconds(logs, i) for i in range(3)] == pytest.approx([1e-6, 2.5e-6, 3e-6])
    assert representative(logs, [0, 1, 2]) == 1


def test_median_and_spread() -> None:
    assert median_and_spread([1.0, 2.0, 4.0]) == (2.0, 0.5)


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
