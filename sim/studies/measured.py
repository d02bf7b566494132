"""A measured run in the simulator's terms: its scenario, schedule, calibration and timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sim.core.actions import Schedule, parse_entry, validate
from sim.core.errors import InputError
from sim.core.timeline import (
    COMPUTE,
    COMPUTE_KINDS,
    DP,
    MESSAGES,
    OFFLOAD,
    RELOAD,
    Detail,
    RankClass,
    Span,
    Timeline,
    from_spans,
)
from sim.inputs.measured_run import MeasuredAction, MeasuredRun
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profile import Profile
from sim.prices.profile_input import profile_from
from sim.ranks.rank_mesh import make_mesh

_STREAMS = {**dict.fromkeys(COMPUTE_KINDS, COMPUTE), OFFLOAD: "host", RELOAD: "host"}
RAN = ("model", "training", "parallelism")  # sections of a scenario that say what ran, whatever it ran on


def parsed_scenario(run: MeasuredRun, where: str, cluster: dict[str, Any]) -> Scenario:
    """The workload that was run, as if on `cluster`; `where` starts error messages."""
    kept = {k: v for k, v in run.scenario.items() if k in RAN}
    return parse_scenario(kept | {"cluster": cluster}, f"{where}: scenario")


def own_schedule(run: MeasuredRun, scenario: Scenario, where: str) -> Schedule | None:
    """The lists that were run, where they follow from more than the scenario (seconds of actions); else None.

    Raises:
        InputError: if they are no schedule of this scenario.
    """
    p = scenario.parallelism
    if run.schedule is None or not p.form.follows_times:
        return None
    try:
        ranks = tuple(tuple(parse_entry(e) for e in entries) for entries in run.schedule)
        layout = p.form.fewest(p.pp, p.virtual_stages)
        if len(ranks) != p.pp:
            raise ValueError(f"{len(ranks)} lists for {p.pp} ranks")
        found = replace(layout, micro_batches=scenario.micro_batches, ranks=ranks)
        validate(found, p2p_overlap=bool(p.p2p_overlap))
        return found
    except ValueError as error:
        raise InputError(f"{where}: schedule: {error}") from None


def own_profile(run: MeasuredRun, where: str) -> Profile:
    """The calibration taken beside the steps.

    Raises:
        InputError: if the run holds none.
    """
    if run.profile is None:
        raise InputError(f"{where}: profile: missing; name a calibration instead (--calibration)")
    return profile_from(run.profile, f"{where}: profile")


def to_timeline(actions: Sequence[MeasuredAction], p: Parallelism) -> Timeline:
    """The recorded step as a Timeline, each rank a class of its own; a message's two ends are paired."""
    mesh = make_mesh(p)
    ranks = sorted({a.rank for a in actions} | set(range(p.ranks)))
    classes = [RankClass(r, (r,), mesh.coordinate("pp", r)) for r in ranks]
    detail = Detail("measured", source="recorded")
    spans = [Span(a.rank, _stream(a.kind), a.kind, a.stage, a.micro_batch, a.start_s, a.end_s, detail) for a in actions]
    pipeline = {r: tuple(mesh.coordinate(d, r) for d in mesh.sizes if d != "pp") for r in ranks}
    return from_spans(spans, classes, _flows(actions, pipeline))


def _stream(kind: str) -> str:
    """The stream of the simulator on which this kind runs."""
    if kind in (*MESSAGES, "SEND_RECV"):
        return kind.lower()
    return _STREAMS.get(kind, DP)


def _flows(actions: Sequence[MeasuredAction], pipeline: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Number messages: a SEND and its RECV have the same number; all else has -1."""
    numbers: dict[tuple[object, ...], int] = {}
    flows = []
    for a in actions:
        if a.kind in MESSAGES:
            key = (a.kind[-1], a.stage, a.micro_batch, pipeline[a.rank])
            flows.append(numbers.setdefault(key, len(numbers)))
        else:
            flows.append(-1)
    return flows
