"""The requests of a benchmark's command, or assumed ones where no command states them: number, lengths and rate."""

from __future__ import annotations

import math
from typing import Any

from sim.convert.serving.names import Benchmark
from sim.convert.serving.options import within
from sim.convert.settings import Settings, without_none
from sim.variants.engines import ENGINES

EXACT_SINCE = (0, 9)  # vLLM's records; releases from 0.10 on scale gaps
RANDOM = "random"  # benchmarks' data set of random texts
LENGTHS = ("prompt", "output")
EQUAL_GAPS = 1e9  # the largest `burstiness` of a scenario
PATTERNS = {"constant": EQUAL_GAPS, "poisson": 1.0, "gamma": None}  # None: what the flag of burstiness says


def requests_of(b: Settings, benchmark: Benchmark, engine: str = "") -> dict[str, Any]:
    """What the flags say of requests of an engine's server. Of several values of a flag, which SGLang's batches try in
    turn, the first."""
    for name in ("count", *LENGTHS):
        first, *others = str(b.values.get(name, "")).split()[:2] or [""]
        if others:
            b.notes.append(f"{b.written_as(name)} {b.values[name]}: the first is simulated, {first}")
            b.values = {**b.values, name: first}
    count, prompt, output = (b.integer(name, benchmark.defaults[name]) for name in ("count", *LENGTHS))
    ratio, ramp = b.number("ratio", benchmark.ratio) or 0.0, _ramp(b, count)
    rate = b.number("rate") if ramp is None else ramp
    prompt += _prefix(b, ratio)
    if benchmark.range_ends_at_length:  # from ratio·length to length
        prompt, output = (max(1, round(n * (1 + ratio) / 2)) for n in (prompt, output))
        ratio = round((1 - ratio) / (1 + ratio), 4)
    finite = rate if rate is not None and math.isfinite(rate) else None
    burstiness = _burstiness(b, benchmark)
    count = _answers(b, count)
    b.take("dataset")
    return without_none(
        {
            "prompt_len": prompt,
            "output_len": output,
            "range_ratio": ratio or None,
            "count": count,
            "rate_per_s": finite,
            "burstiness": burstiness if finite and burstiness != 1 else None,
            "exact_rate": True if finite and ramp is None and _is_exact(benchmark, engine) else None,
            "max_concurrency": most if (most := b.whole("concurrency")) is None or most > 0 else None,
            "seed": b.whole("seed"),
        }
    )


def _is_exact(benchmark: Benchmark, engine: str) -> bool:
    """Whether gaps are scaled to their sum: those of vLLM's benchmark, which is taken to be of its server's release."""
    record = ENGINES.get(engine)
    return benchmark.exact_rate and not (record and record.product == "vLLM" and record.since < EXACT_SINCE)


def _ramp(b: Settings, count: int) -> float | None:
    """The mean rate of requests that come faster and faster, or None where no flag says so: the number by the sum of
    the mean gaps (vllm/benchmarks/serve.py, _get_current_request_rate)."""
    how, start, end = b.values.get("ramp"), b.number("ramp_start"), b.number("ramp_end")
    if how not in ("linear", "exponential") or start is None or end is None or min(start, end) <= 0:
        b.taken -= {"ramp_start", "ramp_end"}
        return None
    b.take("ramp")
    parts = [i / max(count - 1, 1) for i in range(count)]
    rates = [start + (end - start) * p if how == "linear" else start * (end / start) ** p for p in parts]
    mean = float(f"{count / sum(1 / rate for rate in rates):.6g}")
    b.notes.append(f"--ramp-up-strategy {how}: the rate stays at its mean, {mean:g} requests a second")
    return mean


def _prefix(b: Settings, ratio: float) -> int:
    """Tokens that all prompts begin with, before those of their stated length (vllm/benchmarks/datasets.py)."""
    shared = b.whole("prefix") or 0
    if shared > 0:
        b.notes.append(
            f"{b.written_as('prefix')} {shared}: prompts are longer by these tokens; that all share them is not "
            "expressed here, only a trace's prefix_id does (inference.requests.trace)"
            + f"; range_ratio {ratio:g} spreads them, too, which the benchmark does not"
            * bool(ratio)
        )
    return max(0, shared)


def _burstiness(b: Settings, benchmark: Benchmark) -> float | None:
    """Of the gaps between requests; endless is equal gaps (vllm/benchmarks/serve.py, get_request). A named pattern
    decides over a number, which only a gamma distribution has (AIPerf, docs/tutorials/arrival-patterns.md)."""
    stated = b.number("burstiness", benchmark.burstiness)
    named = b.values.get("pattern")
    if named in PATTERNS:
        b.take("pattern")
        stated = stated if PATTERNS[named] is None else PATTERNS[named]
    return EQUAL_GAPS if stated == math.inf else stated


def _answers(b: Settings, count: int) -> int:
    """Requests of so many prompts with several answers each: vLLM makes each answer a request of its own
    (v1/engine/parallel_sampling.py), which finds the prompt in the cache."""
    answers = b.integer("answers", 1)
    if answers > 1:
        b.notes.append(
            f"--n {answers}: {answers} answers of a prompt are as many requests here, each of which "
            "computes its prompt; the engine finds it in its cache, as do requests of a trace with one prefix_id"
        )
    return count * answers


def with_dataset(b: Settings, dataset: Settings) -> None:
    """Add the number and lengths of a data set's requests that a command of the script writes; 0 requests are all."""
    own = {name: value for name, value in b.values.items() if (name, value) != ("count", "0")}
    lengths = {name: dataset.values[name] for name in ("count", *LENGTHS) if name in dataset.values}
    b.values = {**lengths, **own, "dataset": RANDOM}


def states_lengths(b: Settings) -> bool:
    """Tell whether lengths are those of random texts, or a flag says them."""
    return b.values.get("dataset", RANDOM) == RANDOM or bool({*LENGTHS} & b.values.keys())


def of_defaults(b: Settings, found: dict[str, Any]) -> str:
    """What to say where no flag says how long the requests are."""
    lengths = f"prompts of {found['prompt_len']:,} and answers of {found['output_len']:,} tokens"
    return (
        "" if {*LENGTHS} & b.values.keys() else f"requests: {lengths}, the benchmark's defaults, as no flag says them"
    )


def assumed(s: Settings, requests: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Requests whose lengths the file does not state, shortened to the engine's limit."""
    found = requests if limit is None else within(requests, limit)
    if found != requests:
        lengths = f"{found['prompt_len']:,} and {found['output_len']:,} tokens"
        s.notes.append(f"requests: prompts and answers of {lengths}, as the engine refuses what is beyond {limit:,}")
    return found


def of_dataset(name: str) -> str:
    """What to say of a benchmark's data: only random lengths are known from its flags."""
    known = f"the requests of dataset {name} are not in the command: random ones stand for them"
    return "" if name == RANDOM else f"{known} (inference.requests.trace reads a file of requests)"
