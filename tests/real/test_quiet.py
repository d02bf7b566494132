"""Noise detection and the selection of quiet windows; bucket making."""

from __future__ import annotations

import time

import pytest
import torch

from calibrate.launch import ranks_here
from calibrate.machine_load import machine_busy_s
from calibrate.parallel.comm import COUNTS, WAIT, Clock, Entry
from calibrate.parallel.data import flat_gradients, make_buckets
from calibrate.real_steps.block_cuts import Transfer, merged, pieces_between
from calibrate.real_steps.gradient_times import Beneath, Beside, Timed, expected_waits_s
from calibrate.real_steps.profile_from_steps import (
    _blocks,
    _collectives,
    _share,
    _within_blocks,
    chosen_rounds,
    mean_and_spread,
    median_and_spread,
    ranks_per_core,
    representative,
)
from calibrate.real_steps.timed_rounds import Calibration, Log, Step, good_rounds
from sim.inputs.parallelism import Parallelism


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


def _calibrated(rank: int, key: str, waits_s: list[float], foreign: float = 0.0) -> Log:
    """A rank whose block took 1 ms three times and 9 ms once, 1 ms of CPU time each, and waited within it."""
    blocks = {(key, "forward", 0): [(1e-3, 1e-3)] * 3 + [(9e-3, 1e-3)]}
    begins = [i * 10**12 for i in range(len(waits_s))]  # one after the other
    seen = [
        Transfer("all_reduce", ("tp", 0), 2, 64, at, at, at + round(s * 1e9))
        for at, s in zip(begins, waits_s, strict=True)
    ]
    return Log(rank, calibrations=[Calibration(blocks, seen, [], [], None, [], foreign)])


@pytest.mark.parametrize(
    ("cores", "foreign", "seconds"), [(4, 0.0, 1e-3), (4, 0.9, 1e-3), (2, 0.0, 3e-3), (2, 0.9, 3e-3)]
)
def test_turns_for_a_core_count_where_ranks_share_cores(cores: int, foreign: float, seconds: float) -> None:
    sharing = ranks_per_core(4, {"device": "cpu", "cores": cores})
    assert sharing == 4 / cores
    middle = mean_and_spread if sharing > 1 else median_and_spread
    (point,) = _blocks([_calibrated(0, "layer", [], foreign)], [0], middle, sharing > 1)
    assert point.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("said", "here"), [(None, 8), ("2", 2), ("many", 8), ("0", 8)])
def test_cores_are_shared_by_the_ranks_of_their_own_machine(
    said: str | None, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun on four machines of two ranks each says 2."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert ranks_here(8) == here


@pytest.mark.parametrize(("keys", "seconds"), [(("layer", "layer"), 2.0), (("earlier", "later"), 1.0)])
def test_equal_members_wait_their_mean_and_others_the_least(keys: tuple[str, str], seconds: float) -> None:
    """Which of two equal ranks is late is chance; of unequal ones the simulator knows the work that is waited for."""
    logs = [_calibrated(0, keys[0], [1.0, 1.0]), _calibrated(1, keys[1], [3.0, 3.0])]
    assert _within_blocks(logs, [0], median_and_spread)["all_reduce", 2][64] == [pytest.approx(seconds)]


@pytest.mark.parametrize(
    ("keys", "shared", "foreign", "seconds"),
    [
        ({"dp_sync": "after_backward"}, True, 0.9, 4.0),
        ({"dp_sync": "after_backward"}, False, 0.0, 4.0),
        ({"dp_sync": "after_backward"}, False, 0.9, 1.0),
        ({"dp_sync": "bucketed"}, True, 0.0, 1.0),
    ],
)
def test_who_is_late_keeps_the_others_at_the_first_meeting(
    keys: dict[str, str], shared: bool, foreign: float, seconds: float
) -> None:
    """One of two ranks is 6 s late with its blocks: 3 s on average, in the all-reduce of all gradients alone. Strangers
    are to blame where each rank has a core of its own."""
    ns = 10**9
    sent = [Timed("all_reduce", 2, 0, number, size, 0, ns) for number, size in enumerate((1024, 256))]
    ends = (10 * ns, 16 * ns)
    logs = [Log(r, calibrations=[Calibration({}, [], [], sent, None, [], foreign, end)]) for r, end in enumerate(ends)]
    times = _collectives(logs, [0], Parallelism(dp=2, **keys), shared)
    assert times["all_reduce", 2] == {1024: [pytest.approx(seconds)], 256: [pytest.approx(1.0)]}


def test_posting_is_the_rank_s_own_work() -> None:
    """Computing 0 to 10, posting to 14, computing to 20, waiting to 25, computing to 30."""

    def at(ns: int) -> Clock:
        return Clock(ns, ns)

    post = Entry("send_recv", ("cp", 0), 2, 64, at(10), at(14), 0, True)
    wait = Entry(WAIT, ("cp", 0), 2, 64, at(20), at(25), 0, False)
    assert [p.wall for p in pieces_between([post, wait], at(0), at(30))] == [14, 6, 5]


@pytest.mark.parametrize(("others_cores", "lost_s"), [(0.1, 0.3), (0.9, 0.2)])
def test_what_collectives_take_from_computation(others_cores: float, lost_s: float) -> None:
    """Seconds lost (the wall's in quiet windows, of all threads in others) by those of the collectives alone."""
    beside = Beside((("all_reduce", 2, 4), ("all_reduce", 2, 4), ("all_gather", 2, 8)), (), 0.3, 0.2)
    log = Log(0, calibrations=[Calibration({}, [], [], [], beside, [], others_cores)])
    times = {("all_reduce", 2): {4: [0.1]}, ("all_gather", 2): {8: [0.3, 0.2]}}
    assert _share([log], [0], times, median_and_spread).collective_sm_share == pytest.approx(lost_s / (2 * 0.1 + 0.25))


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
    if not machine_busy_s():
        pytest.skip("this system's /proc/stat counts nothing")
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


def test_counts_belong_to_what_follows_them_and_waits_at_once() -> None:
    """Asking for counts 10 to 14, the exchange itself 14 to 20: one communication of 10 ns."""

    def entry(kind: str, start: int, end: int, posted: bool = False) -> Entry:
        return Entry(kind, ("ep", 0), 2, 64, Clock(start, start), Clock(end, end), start, posted)

    asked = entry(COUNTS, 10, 14)
    tape = [asked, entry("all_to_all", 14, 20)]
    assert [(e.kind, e.start.wall, e.end.wall) for e in merged(tape)] == [("all_to_all", 10, 20)]
    assert [x.wall for x in pieces_between(tape, Clock(0, 0), Clock(30, 30))] == [10, 10]
    with pytest.raises(RuntimeError, match="must precede a blocking communication; found all_to_all"):
        merged([asked, entry("all_to_all", 14, 16, posted=True)])
