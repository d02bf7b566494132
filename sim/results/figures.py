"""Numbers of results: the key of each in the JSON, its unit, what it means, and its name on pages and in tables.

Comparisons, sweeps, searches, the accuracy page and docs/api.md ask these records; nobody reads a unit off a key. A
percentile of a latency has the record of its latency (`figure_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.core.units import count, n_bytes, percent, rate, seconds
from sim.inputs.units import unit_of


class FigureUnit(NamedTuple):
    """A unit of results: its symbol, how a number of it is shown, and the scale and words of a plot's axis."""

    symbol: str
    write: Callable[[float], str]
    axis: str = ""
    axis_scale: float = 1.0


TIME = FigureUnit("s", seconds, " in seconds")
BYTES = FigureUnit("bytes", n_bytes, " in GiB", 2.0**30)
RATE = FigureUnit("1/s", count)  # of tokens, requests or answers
FLOPS = FigureUnit("FLOP/s", lambda value: rate(value, "FLOP/s"))
SHARE = FigureUnit("fraction", percent)
NUMBER = FigureUnit("", count)


class Figure(NamedTuple):
    """A number of a result. `name`: on cards; `column`: in tables, where `name` is too long."""

    key: str
    unit: FigureUnit
    meaning: str
    name: str = ""
    column: str = ""
    more_is_better: bool = False

    def show(self, value: float) -> str:
        """The value in its unit."""
        return self.unit.write(value)


_STEP = (
    Figure("step_time_s", TIME, "a training step, or a step of reinforcement learning", "Step time", "step"),
    Figure("one_step_s", TIME, "one step to its last rank's end, where the next one begins before that"),
    Figure("tokens_per_s", RATE, "tokens trained in a second", "Tokens/s", more_is_better=True),
    Figure("tokens_per_s_per_gpu", RATE, "the same on each GPU", "Tokens/s per GPU", "tok/s/GPU", True),
    Figure("model_flops_per_s_per_gpu", FLOPS, "FLOPs of the model in a second on each GPU", more_is_better=True),
    Figure("mfu", SHARE, "model FLOPs ÷ the peak's; a causal mask halves attention's", "MFU", "MFU", True),
    Figure("mfu_full_attention", SHARE, "`mfu` with attention counted in full", "", "MFU, full attention", True),
    Figure("hfu", SHARE, "`mfu` with recomputed FLOPs and a frozen reference's", "HFU", more_is_better=True),
    Figure("bubble_fraction", SHARE, "idle for want of input ÷ step, mean of ranks", "Bubble"),
    Figure("bubble_ratio", SHARE, "idle for want of input ÷ busy in F, B and W, mean of ranks"),
    Figure(
        "exposed_comm_s", TIME, "communication with no computation beside it, mean of ranks", "Exposed communication"
    ),
    Figure("compute_s", TIME, "computation, mean of ranks", "Computation"),
    Figure("layer_forward_s", TIME, "one middle layer's forward for one micro-batch, its communication included"),
    Figure("layer_backward_s", TIME, "one middle layer's backward for one micro-batch, its communication included"),
    Figure("answers_per_s", RATE, "answers of reinforcement learning in a second", "Answers/s", more_is_better=True),
)
_SERVED = (
    Figure("duration_s", TIME, "from the workload's start to its last token", "Duration"),
    Figure("request_latency_s", TIME, "from a request's arrival to its last token", "Request latency", "latency"),
    Figure("queue_time_s", TIME, "from a request's arrival to its first admission"),
    Figure("time_to_first_token_s", TIME, "from a request's arrival to its first token", "Time to first token", "TTFT"),
    Figure("time_per_output_token_s", TIME, "mean of a request's further tokens", "Time per output token", "TPOT"),
    Figure("inter_token_latency_s", TIME, "gaps between tokens", "Between two tokens", "ITL"),
    Figure("output_tokens_per_s", RATE, "tokens answered in a second", "Output tokens/s", more_is_better=True),
    Figure("output_tokens_per_s_per_gpu", RATE, "the same on each GPU", "Output tokens/s per GPU", "tok/s/GPU", True),
    Figure("total_tokens_per_s", RATE, "tokens of prompts and answers in a second", more_is_better=True),
    Figure("requests_per_s", RATE, "requests finished in a second", more_is_better=True),
    Figure("perplexity_added", SHARE, "by quantization, as measured on a language model of 135M", "Perplexity added"),
    Figure("comm_share", SHARE, "communication ÷ time of iterations", "Communication share"),
)
_MEMORY = (
    Figure("peak_memory_bytes", BYTES, "the most that tensors take of a GPU", "Peak memory", "memory"),
    Figure("peak_reserved_bytes", BYTES, "the most that allocator or engine hold", "Reserved memory", "reserved"),
)
FIGURES = {figure.key: figure for figure in (*_STEP, *_SERVED, *_MEMORY)}
PERCENTILES = "."  # between a latency's key and the statistic: request_latency_s.p50
# Numbers that tables of measurements have under names of their own, which do not say the unit as those of results do.
_MEASURED = {
    "seconds": TIME,
    "samples_per_s": RATE,
    "sequences_per_s": RATE,
}


def figure_of(key: str) -> Figure:
    """The record of a key, or of the latency whose percentile a key names.

    Raises:
        KeyError: for a key that has none.

    >>> figure_of("request_latency_s.p99").column, figure_of("mfu").show(0.41)
    ('latency', '41.0 %')
    """
    return FIGURES[key.partition(PERCENTILES)[0]]


def statistic_of(key: str) -> str:
    """The statistic that a key names behind its latency; empty where it names none."""
    return key.partition(PERCENTILES)[2]


def unit_of_measured(key: str) -> FigureUnit:
    """The unit of a measured number: its record's, or, for a table's own name, what the name ends with.

    >>> [unit_of_measured(key).symbol for key in ("mfu", "seconds", "generation_s", "max_allocated_bytes", "rows")]
    ['fraction', 's', 's', 'bytes', '']
    """
    if key in FIGURES or key in _MEASURED:
        return FIGURES[key].unit if key in FIGURES else _MEASURED[key]
    ending = unit_of(key)
    return NUMBER if ending is None else {"_s": TIME, "_bytes": BYTES, "flops_per_s": FLOPS}.get(ending.ending, NUMBER)
