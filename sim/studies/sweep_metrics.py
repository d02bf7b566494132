"""The figures of each row of a sweep, and which of them are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Metric(NamedTuple):
    """A number of a row: its key, its name in tables, its unit, and whether more of it is better."""

    key: str
    name: str
    unit: Literal["s", "bytes", "/s", ""]
    more_is_better: bool = False


STEP = Metric("step_time_s", "step", "s")
RATE = Metric("tokens_per_s_per_gpu", "tok/s/GPU", "/s", True)
MEMORY = Metric("peak_memory_bytes", "memory", "bytes")
GPUS = Metric("gpus", "GPUs", "")
FIRST = Metric("ttft_p99_s", "TTFT p99", "s")
TRAINING = (STEP, MEMORY, RATE)
SERVING = (
    Metric("ttft_p50_s", "TTFT p50", "s"),
    FIRST,
    Metric("tpot_p50_s", "TPOT p50", "s"),
    Metric("tpot_p99_s", "TPOT p99", "s"),
    Metric("latency_p50_s", "latency p50", "s"),
    Metric("latency_p99_s", "latency p99", "s"),
    Metric("output_tokens_per_s_per_gpu", "tok/s/GPU", "/s", True),
    MEMORY,
)


def metrics_of(result: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The metrics of a sweep's rows (sim-sweep/1), behind the number of GPUs where rows differ in it."""
    differ = len({row["gpus"] for row in result["rows"] if not row["refused"]}) > 1
    return (*([GPUS] if differ else []), *(SERVING if result["workload"] == "serving" else TRAINING))


def metric_of(result: Mapping[str, Any]) -> Metric:
    """The metric by which a sweep's rows are compared."""
    return next(m for m in metrics_of(result) if m.key == result["metric"])


def default_metric(workload: str, rows: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the figure by which rows are compared if nobody names one: steps by their time, or by tokens a second and
    GPU where the tokens of a step and GPU differ from row to row; serving by the time to the first token."""
    if workload == "serving":
        return FIRST
    work = [row[STEP.key] * row[RATE.key] for row in rows if not row["refused"]]
    return RATE if max(work) > min(work) * (1 + 1e-9) else STEP
