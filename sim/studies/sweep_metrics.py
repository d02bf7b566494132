"""The figures of each row of a sweep, and which of them are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.results.figures import FIGURES, NUMBER, FigureUnit


class Metric(NamedTuple):
    """A number of a row: its key, its name in tables, its unit, and whether more of it is better."""

    key: str
    name: str
    unit: FigureUnit
    more_is_better: bool = False


def _figure(key: str) -> Metric:
    """A number that the result has, too."""
    figure = FIGURES[key]
    return Metric(key, figure.column, figure.unit, figure.more_is_better)


def _percentile(key: str, latency: str, statistic: str) -> Metric:
    figure = FIGURES[latency]
    return Metric(key, f"{figure.column} {statistic}", figure.unit)


STEP, RATE, MEMORY = (_figure(key) for key in ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_bytes"))
GPUS = Metric("gpus", "GPUs", NUMBER)
FIRST = _percentile("ttft_p99_s", "time_to_first_token_s", "p99")
TRAINING = (STEP, MEMORY, RATE)
SERVING = (
    _percentile("ttft_p50_s", "time_to_first_token_s", "p50"),
    FIRST,
    _percentile("tpot_p50_s", "time_per_output_token_s", "p50"),
    _percentile("tpot_p99_s", "time_per_output_token_s", "p99"),
    _percentile("latency_p50_s", "request_latency_s", "p50"),
    _percentile("latency_p99_s", "request_latency_s", "p99"),
    _figure("output_tokens_per_s_per_gpu"),
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
