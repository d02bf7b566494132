"""A measured run: what `calibrate.measure` writes about a real execution of a scenario, read and checked."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.actions import Schedule, parse_entry, validate
from sim.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.mesh import make_mesh
from sim.prices.profile import Profile, read_json
from sim.schedules import build
from sim.timeline import Detail, RankClass, Span, Timeline, from_spans

FORMAT = "measured-run/1"
MOST_VARYING = 100_000  # actions that jitter is taken from
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
StepTime = Annotated[float, Field(gt=0, le=1e9)]
_STREAMS = {"F": "compute", "B": "compute", "W": "compute", "OPTIMIZER": "compute",
            "OFFLOAD": "host", "RELOAD": "host"}  # fmt: skip


class _Record(BaseModel):
    """Keys beyond those named are left alone: other tools may add their own."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class MeasuredAction(_Record):
    """One thing a rank did. Stage and micro-batch are -1 where they have no meaning."""

    rank: int = Field(ge=0, le=10_000_000)
    kind: str = Field(min_length=1, max_length=40)
    stage: int = Field(default=-1, ge=-1, le=1_000_000)
    micro_batch: int = Field(default=-1, ge=-1, le=100_000_000)
    start_s: Seconds
    end_s: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> MeasuredAction:
        if self.end_s < self.start_s:
            raise ValueError(f"end_s {self.end_s} is before start_s {self.start_s}")
        return self


class MeasuredMemory(_Record):
    """One rank's memory: peak of allocated bytes, and the most that was saved for backward at once."""

    rank: int = Field(ge=0, le=10_000_000)
    allocated_peak_bytes: Bytes
    saved_for_backward_bytes: Bytes | None = None


class MeasuredRun(_Record):
    """A file of format `measured-run/1`. `actions` are of one representative step, from its start."""

    format: Literal["measured-run/1"]
    scenario: dict[str, Any]
    environment: dict[str, Any] = Field(default_factory=dict)
    step_times_s: tuple[StepTime, ...] = Field(min_length=1, max_length=1_000_000)
    actions: tuple[MeasuredAction, ...] = Field(default=(), max_length=10_000_000)
    memory: tuple[MeasuredMemory, ...] = ()
    losses: tuple[float, ...] = ()
    schedule: tuple[tuple[Annotated[str, Field(max_length=80)], ...], ...] | None = None
    profile: dict[str, Any] | None = None

    @property
    def step_time_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_s)

    @property
    def noise(self) -> float:
        """Median absolute deviation of the steps, divided by their median."""
        middle = self.step_time_s
        return statistics.median(abs(t - middle) for t in self.step_times_s) / middle

    def parsed_scenario(self, where: str, cluster: dict[str, Any]) -> Scenario:
        """The workload that was run, as if on `cluster`; `where` starts error messages."""
        kept = {k: v for k, v in self.scenario.items() if k in ("model", "training", "parallelism")}
        return parse_scenario(kept | {"cluster": cluster}, f"{where}: scenario")

    def own_schedule(self, scenario: Scenario, where: str) -> Schedule | None:
        """The lists that were run, where they follow from more than the scenario (zb_search); else None.

        Raises:
            InputError: if they are no schedule of this scenario.
        """
        p = scenario.parallelism
        if self.schedule is None or p.schedule != "zb_search" or p.pp == 1:
            return None
        try:
            ranks = tuple(tuple(parse_entry(e) for e in entries) for entries in self.schedule)
            layout = build("zb_h1", p.pp, scenario.micro_batches)
            if len(ranks) != p.pp:
                raise ValueError(f"{len(ranks)} lists for {p.pp} ranks")
            found = replace(layout, name="zb_search", ranks=ranks)
            validate(found, p2p_overlap=bool(p.p2p_overlap))
            return found
        except ValueError as error:
            raise InputError(f"{where}: schedule: {error}") from None

    def own_profile(self, where: str) -> Profile:
        """The calibration taken beside the steps.

        Raises:
            InputError: if the run holds none.
        """
        if self.profile is None:
            raise InputError(f"{where}: profile: missing; name a calibration instead (--calibration)")
        return Profile.from_json(self.profile, f"{where}: profile")


def load_measured(path: str | Path) -> MeasuredRun:
    """Read a measured run.

    Raises:
        InputError: naming file, key, what was found and what is allowed.
    """
    data = read_json(Path(path))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{path}: format: found {str(found)[:60]!r}; allowed: {FORMAT!r} (see calibrate.measure)")
    try:
        return MeasuredRun.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "file"
        raise InputError(f"{path}: {key}: {first['msg']}; found {str(first['input'])[:60]}") from None


def factors(run: MeasuredRun, where: str) -> tuple[float, ...]:
    """How computations varied: each one's time over the mean of its like (rank, kind, stage, and which piece of its
    micro-batch, where communication cuts it); their mean is 1.

    Raises:
        InputError: where no computation was recorded twice.
    """
    alike: dict[tuple[int, str, int, int], list[float]] = {}
    pieces: dict[tuple[int, str, int, int], int] = {}
    for a in run.actions[:MOST_VARYING]:
        if a.kind in ("F", "B", "W") and a.end_s > a.start_s:
            whole = (a.rank, a.kind, a.stage, a.micro_batch)
            piece = pieces[whole] = pieces.get(whole, -1) + 1
            alike.setdefault((*whole[:3], piece), []).append(a.end_s - a.start_s)
    found = [s / statistics.fmean(times) for times in alike.values() if len(times) > 1 for s in times]
    if not found:
        raise InputError(f"{where}: actions: hold no computation of one rank and stage twice, so none varies")
    return tuple(found)


def to_timeline(actions: Sequence[MeasuredAction], scenario: Scenario) -> Timeline:
    """The recorded step as a Timeline, each rank a class of its own; a message's two ends are paired."""
    mesh = make_mesh(scenario.parallelism)
    ranks = sorted({a.rank for a in actions} | set(range(scenario.parallelism.ranks)))
    classes = [RankClass(r, (r,), mesh.coordinate("pp", r)) for r in ranks]
    detail = Detail("measured", source="recorded")
    spans = [
        Span(a.rank, _stream(a.kind), a.kind, a.stage, a.micro_batch, a.start_s, a.end_s, detail)
        for a in actions
    ]
    lane = {r: tuple(mesh.coordinate(d, r) for d in mesh.sizes if d != "pp") for r in ranks}
    return from_spans(spans, classes, _flows(actions, lane))


def _stream(kind: str) -> str:
    """The stream of the simulator on which this kind runs."""
    if kind.startswith(("SEND_", "RECV_")):
        return kind.lower()
    return _STREAMS.get(kind, "dp")


def _flows(actions: Sequence[MeasuredAction], lane: Mapping[int, tuple[int, ...]]) -> list[int]:
    """The same number for a message's SEND and RECV, -1 for all else."""
    numbers: dict[tuple[object, ...], int] = {}
    flows = []
    for a in actions:
        if a.kind.startswith(("SEND_", "RECV_")) and a.kind != "SEND_RECV":
            key = (a.kind[-1], a.stage, a.micro_batch, lane[a.rank])
            flows.append(numbers.setdefault(key, len(numbers)))
        else:
            flows.append(-1)
    return flows
