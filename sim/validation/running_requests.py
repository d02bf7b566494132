"""Rows of serving tables whose own figures contradict the batch that they state.

Little's law (Little 1961, Operations Research 9(3)): a queue holds, on average, its throughput times the time that each
spends in it, whatever the arrivals. A request that adds n tokens spends n - 1 gaps between tokens in the batch, so the
batch holds on average at least

    output tokens a second · (n - 1) / n · mean seconds between tokens

requests, which no limit on it can be below. Waiting, the first token and ends of a run, in which fewer are under way,
only make the true batch larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.validation.tables import Row

MARGIN = 1.1  # a tenth: printed figures are rounded


def running_requests(row: Row) -> float | None:
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


def contradiction(row: Row) -> str:
    """Why a row cannot have run as it says, or nothing."""
    allowed, parallelism = _section(row).get("max_running_requests"), row.scenario.get("parallelism")
    if not isinstance(allowed, int) or "disaggregated" in _section(row) or (needed := running_requests(row)) is None:
        return ""
    dp = parallelism.get("dp", 1) if isinstance(parallelism, Mapping) else 1
    if not isinstance(dp, int) or needed <= MARGIN * allowed * dp:
        return ""
    return (
        f"contradicts itself: its figures need {math.floor(needed):,} running requests (output tokens a second · time "
        f"a token), its max_running_requests allows {allowed * dp:,}"
    )


def _section(row: Row) -> Mapping[str, Any]:
    section = row.scenario.get("inference")
    return section if isinstance(section, Mapping) else {}


def _output_tokens_per_s(row: Row) -> float | None:
    """Of all GPUs, measured or published beside what is compared."""
    published = row.data.get("published")
    for found in (row.measured, published if isinstance(published, Mapping) else {}):
        if isinstance(rate := found.get("output_tokens_per_s"), int | float):
            return float(rate)
    return None
