"""The figures of each row of a sweep, and which of them are compared."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sim.results.figures import FIGURES, NUMBER, FigureUnit

Workload = Literal["training", "serving"]


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


STEP, RATE, MEMORY, RESERVED = (
    _figure(key) for key in ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_bytes", "peak_reserved_bytes")
)
TOKENS = _figure("output_tokens_per_s_per_gpu")
GPUS = Metric("gpus", "GPUs", NUMBER)
FIRST = _percentile("ttft_p99_s", "time_to_first_token_s", "p99")
TRAINING = (STEP, MEMORY, RESERVED, RATE, _figure("mfu"), _figure("mfu_full_attention"))
SERVING = (
    _percentile("ttft_p50_s", "time_to_first_token_s", "p50"),
    FIRST,
    _percentile("tpot_p50_s", "time_per_output_token_s", "p50"),
    _percentile("tpot_p99_s", "time_per_output_token_s", "p99"),
    _percentile("latency_p50_s", "request_latency_s", "p50"),
    _percentile("latency_p99_s", "request_latency_s", "p99"),
    TOKENS,
    MEMORY,
    RESERVED,
)


METRICS: dict[Workload, tuple[Metric, ...]] = {"training": TRAINING, "serving": SERVING}
OF_STEP = ("bubble_ratio", "exposed_comm_s")
# Keys of a row's figures: of a step also its time without faults, what these cost, and what it makes of the GPUs.
NUMBERS: dict[Workload, tuple[str, ...]] = {
    "training": (*[m.key for m in TRAINING], "healthy_s", "lost_s", *OF_STEP),
    "serving": tuple(m.key for m in SERVING),
}
