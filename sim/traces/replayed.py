"""What a replay found, as records (format sim-replay/1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.results.records import Record
from sim.traces.recording import Recording
from sim.traces.replay import TIMES, RankTimes, Replay, rank_times


class ReplayedRank(Record, frozen=True):
    """A rank's seconds after the changes, and before them."""

    after: RankTimes
    before: RankTimes

    def to_json(self) -> dict[str, Any]:
        """Keys and values as plain data: those before the changes have the prefix `recorded_`."""
        after, before = ({name: getattr(t, name) for name in TIMES} for t in (self.after, self.before))
        return {"rank": self.after.rank, **after, **{f"recorded_{name}": s for name, s in before.items()}}


class Transfers(Record, frozen=True, kw_only=True):
    """The collectives, or messages, of a kind and process group. Seconds are means of the transfers alone."""

    kind: str
    group: str
    count: int
    bytes: float
    recorded_s: float
    seconds: float


class EnginePath(Record, frozen=True):
    """Which engine ran: simpy or static."""

    path: str


class ReplayResult(Record, frozen=True, kw_only=True):
    """A recorded step, replayed as it is and with changes.

    `error`: of the unchanged replay against the recorded step. `change`: of the step, by what `what_if` names.
    """

    format: str = "sim-replay/1"
    traces: str
    priced_on: str | None
    ranks: tuple[int, ...]
    world_size: int
    profiler_step: int | None
    recorded_step_s: float
    replayed_step_s: float
    error: float
    what_if: Mapping[str, Any]
    step_time_s: float
    change: float
    per_rank: tuple[ReplayedRank, ...]
    communication: tuple[Transfers, ...]
    nodes: int
    engine: EnginePath
    warnings: tuple[str, ...]


def make_result(unchanged: Replay, changed: Replay, what_if: Mapping[str, Any]) -> ReplayResult:
    """Compare two replays of a recording. `what_if`: the options that changed the second."""
    recording = unchanged.recording
    recorded_s, before_s = recording.step_ns * 1e-9, unchanged.step_time_s
    return ReplayResult(
        traces=recording.name,
        priced_on=recording.priced_on or None,
        ranks=tuple(recording.ranks),
        world_size=recording.world_size,
        profiler_step=recording.step,
        recorded_step_s=recorded_s,
        replayed_step_s=before_s,
        error=before_s / recorded_s - 1 if recorded_s else 0.0,
        what_if=what_if,
        step_time_s=changed.step_time_s,
        change=changed.step_time_s / before_s - 1 if before_s else 0.0,
        per_rank=tuple(
            ReplayedRank(after, before)
            for before, after in zip(rank_times(unchanged), rank_times(changed), strict=True)
        ),
        communication=_transfers(recording, unchanged, changed),
        nodes=len(recording.own),
        engine=EnginePath(changed.path),
        warnings=tuple(recording.warnings),
    )


def _transfers(recording: Recording, unchanged: Replay, changed: Replay) -> tuple[Transfers, ...]:
    rows: dict[tuple[str, str], list[float]] = {}
    for i, node in enumerate(recording.nodes):
        if node.message is not None and not node.before:
            row = rows.setdefault((node.message.kind, node.message.group), [0, 0.0, 0.0, 0.0])
            row[0] += 1
            row[1] += node.message.bytes
            row[2] += unchanged.end_s[i] - unchanged.begin_s[i]
            row[3] += changed.end_s[i] - changed.begin_s[i]
    return tuple(
        Transfers(kind=k, group=g, count=int(n), bytes=b, recorded_s=old / n, seconds=new / n)
        for (k, g), (n, b, old, new) in sorted(rows.items())
    )
