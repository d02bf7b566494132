"""Batch limits of serving tables that the tables' own figures disprove.

Little's law (Little 1961, Operations Research 9(3)): a queue holds, on average, its throughput times the time that each
spends in it, whatever the arrivals. A request that adds n tokens spends n - 1 gaps between tokens in the batch, so the
batch holds on average at least

    output tokens a second · (n - 1) / n · mean seconds between tokens

requests, which no limit on it can be below. Waiting, the first token and ends of a run, in which fewer are under way,
only make the true batch larger. Rows that differ in nothing but their requests describe one server. So a limit that one
of them disproves did not hold for any of them: none is simulated with it, and the engine's default takes its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

if TYPE_CHECKING:
    from sim.validation.records import Measurement

MARGIN = 1.1  # a tenth: printed figures are rounded


def running_requests(row: Measurement) -> float | None:
    """Requests that a row's own figures need in the batch at least, of all replicas; None where they do not say.

    The mean time a token, the output tokens a second of all GPUs and the length of outputs are needed. A median proves
    nothing, nor does a gap between arrivals (inter-token latency), with which several tokens may come at once.
    """
    requests = _section(row).get("requests")
    count = requests.get("output_len") if isinstance(requests, Mapping) else None
    usual = "_s" if row.data.get("statistic") == "mean" else "_mean_s"
    named = [f"{name}{end}" for name in ("time_per_output_token", "tpot") for end in ("_mean_s", usual)]
    gap_s = next((row.measured[key] for key in named if key in row.measured), None)
    rate = _output_tokens_per_s(row)
    if gap_s is None or rate is None or not isinstance(count, int) or count < 2:
        return None
    return rate * (count - 1) / count * gap_s


def without_false_limits(rows: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """The rows, without the batch limits that their own figures disprove.

    `Measurement.not_believed` says which row does.
    """
    proofs: dict[str, str] = {}
    for row in rows:
        if row.kind == "inference" and (why := contradiction(row)):
            proofs.setdefault(_server(row), f"{row.id} {why}; the engine's default is taken for all rows of its server")
    if not proofs:
        return tuple(rows)
    return tuple([_without_limit(row, proofs[_server(row)]) if _server(row) in proofs else row for row in rows])


def contradiction(row: Measurement) -> str:
    """Why a row cannot have run with the batch limit that it states, or nothing."""
    allowed, parallelism = _section(row).get("max_running_requests"), row.scenario.get("parallelism")
    if not isinstance(allowed, int) or "disaggregated" in _section(row) or (needed := running_requests(row)) is None:
        return ""
    dp = parallelism.get("dp", 1) if isinstance(parallelism, Mapping) else 1
    if not isinstance(dp, int) or needed <= MARGIN * allowed * dp:
        return ""
    return (
        f"needs {math.floor(needed):,} running requests (output tokens a second · time a token), its "
        f"max_running_requests allows {allowed * dp:,}"
    )


def _server(row: Measurement) -> str:
    """All that a row says of what served its requests."""
    others = {**row.scenario, "inference": {**_section(row), "requests": None}}
    return json.dumps([row.served_by, others], sort_keys=True, default=str)


def _without_limit(row: Measurement, why: str) -> Measurement:
    section = {key: value for key, value in _section(row).items() if key != "max_running_requests"}
    return replace(row, scenario={**row.scenario, "inference": section}, not_believed=why)


def _section(row: Measurement) -> Mapping[str, Any]:
    section = row.scenario.get("inference")
    return section if isinstance(section, Mapping) else {}


def _output_tokens_per_s(row: Measurement) -> float | None:
    """Output tokens a second of all GPUs, measured, or published beside what is compared; None if neither."""
    published = row.data.get("published")
    for found in (row.measured, published if isinstance(published, Mapping) else {}):
        if isinstance(rate := found.get("output_tokens_per_s"), int | float):
            return float(rate)
    return None
