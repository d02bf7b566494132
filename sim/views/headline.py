"""The numbers of a result that every view opens with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.core.dtypes import dtype_bytes
from sim.core.units import change_percent, change_s, count, counted, n_bytes, percent, rate, seconds, seconds_between
from sim.results.figures import FIGURES
from sim.results.fit import SURE, Fit
from sim.results.losses import bubble_name, waiting_s
from sim.results.records import tightest
from sim.results.result import StepResult, Utilization

if TYPE_CHECKING:
    from sim.results.evidence import Evidence
    from sim.results.training_run import TrainingRun
    from sim.serve.results.records import Percentiles, ServingResult
    from sim.studies.anchor import Anchor
    from sim.studies.goodput import Goodput
    from sim.studies.spending import Spending, TokenCost
    from topology.spec import GpuSpec

TO_CHECK = (  # where a measured step is far from the simulated one
    "check framework, recompute and micro-batch, and that it is a median without the first steps "
    "(docs/slower_than_simulated.md)"
)
SET_IS_CHANGE = "a --set that the measured run had belongs in the scenario's file"
FULL_SHOWN = 0.005  # of the peak: a smaller difference of the two MFUs is left to the JSON
SHOWN = 1e-4  # of the step: smaller losses are left to the JSON
LATENCIES = ("request_latency_s", "time_to_first_token_s", "time_per_output_token_s")
LINK_NAMES = {
    "domain": "links inside the node or NVLink domain",
    "nic": "NICs",
    "spine": "links above leaf switches",
    "host": "PCIe to the host",
}


class Number(NamedTuple):
    """A headline: `mood` is good, bad or nothing; `compared`: by what two results differ in it, where that is said."""

    name: str
    value: str
    note: str = ""
    mood: str = ""
    compared: float | None = None


def headline(result: StepResult | ServingResult) -> list[Number]:
    """Step time, throughput, MFU, bubble, communication and memory; for serving its latencies and memory, of an engine
    that does not start why."""
    return [*_step(result), _peak(result)] if isinstance(result, StepResult) else _serving(result)


def _figure(key: str, value: float, note: str) -> Number:
    """A number of the result by its record, which is compared with another result's."""
    return Number(FIGURES[key].name, FIGURES[key].show(value), note, compared=value)


def _step(result: StepResult) -> list[Number]:
    step_s, exposed_s = result.step_time_s, result.mean_rank.exposed_comm_s
    if not step_s:
        return []
    use = result.utilization
    interval = _interval(seconds_between(*result.step_time_interval_s, step_s))
    if result.one_step_s is not None:
        interval += f"; from its first forward to its last rank's end a step lasts {seconds(result.one_step_s)}"
    flops, per_gpu = _flops_words(result), result.tokens_per_s_per_gpu
    return [
        _figure("step_time_s", step_s, interval),
        _figure("tokens_per_s_per_gpu", per_gpu, f"{count(result.tokens_per_s)} in all"),
        _figure("mfu", use.mfu, f"{flops}; HFU {percent(use.hfu)}{_in_full(use)}"),
        Number(bubble_name(result.scenario.parallelism), percent(waiting_s(result) / step_s), "of the step"),
        Number(FIGURES["exposed_comm_s"].name, seconds(exposed_s), f"{percent(exposed_s / step_s)} of the step"),
        *_teacher(result),
        *_faults(result),
        *_contention(result),
        *_processes(result),
        *_training_run(result),
    ]


def _teacher(result: StepResult) -> list[Number]:
    """Return how long a distillation's teacher works, on the student's GPUs or on others."""
    found = result.distillation
    if found is None:
        return []
    own_s, student = found.teacher.own_s, f"the student's step of {seconds(found.student_step_s)}"
    if found.teacher.placement == "same":
        return [
            Number("Teacher", seconds(own_s), f"{percent(own_s / result.step_time_s)} of the step, before {student}")
        ]
    return [Number("Teacher", seconds(own_s), f"on {counted(found.teacher.gpus, 'other GPU')}, beside {student}")]


def _flops_words(result: StepResult) -> str:
    """FLOP/s of a GPU; with the peak that MFU divides them by where that is not the usual one, of 16 bits."""
    use, precision = result.utilization, result.scenario.for_training.precision
    words = f"{rate(use.model_flops_per_s_per_gpu, 'FLOP/s')} per GPU"
    if not use.mfu or dtype_bytes(precision) >= 2:
        return words
    return f"{words}, of {rate(use.model_flops_per_s_per_gpu / use.mfu, 'FLOP/s')} in {precision}"


def _in_full(use: Utilization) -> str:
    """MFU as papers count it that leave the causal mask out, where it is another."""
    more = use.mfu_full_attention - use.mfu > FULL_SHOWN
    return f", MFU {percent(use.mfu_full_attention)} with attention counted in full" if more else ""


def _training_run(result: StepResult) -> list[Number]:
    """Length of the whole training, where its tokens are given."""
    run = result.training_run
    if run is None:
        return []
    steps = counted(run.steps, "step")
    note = f"{steps}, {run.gpu_hours:,.0f} GPU hours, without failures"
    return [Number("Whole training", f"{run.days:,.1f} days", note)]


def goodput_numbers(run: TrainingRun | None, weeks: Goodput | None) -> list[Number]:
    """Length of the whole training with failures and checkpoints, where its tokens and failures were asked for."""
    if run is None or weeks is None:
        return []
    useful = weeks.effective_training_time.mean
    if useful <= 0:
        return [Number("Training with failures", "never", "no training is effective", "bad")]
    note = f"{run.gpu_hours / useful:,.0f} GPU hours, of which {percent(useful)} effective training"
    return [Number("Training with failures", f"{run.days / useful:,.1f} days", note)]


def _processes(result: StepResult) -> list[Number]:
    """Return how much longer processes beside the step make it."""
    if result.processes is None:
        return []
    longer_s, names = result.step_time_s - result.processes.step_time_without_s, dict.fromkeys(result.processes.names)
    return [Number("By processes", change_s(longer_s), ", ".join(names).replace("_", " "))]


def _faults(result: StepResult) -> list[Number]:
    """Return how much shorter the step is without any fault."""
    whole = next((row for row in result.blame if row.kind == "all"), None)
    if whole is None:
        return []
    share = percent(whole.lost_s / result.step_time_s)
    return [Number("Lost to faults", seconds(whole.lost_s), f"{share} of the step")]


def _contention(result: StepResult) -> list[Number]:
    """Cost of sharing links, where that shows."""
    lost_s, step_s = result.contention.lost_s, result.step_time_s
    if lost_s < SHOWN * step_s:
        return []
    where = ", ".join(LINK_NAMES.get(name, name) for name in result.contention.links)
    return [Number("Shared links", seconds(lost_s), f"{percent(lost_s / step_s)} of the step: messages share {where}")]


def _serving(result: ServingResult) -> list[Number]:
    if result.does_not_start is not None:
        return [Number("Server", "does not start", result.does_not_start, "bad")]
    likely, rate_per_s, numbers = result.intervals, result.output_tokens_per_s, list[Number]()
    for key in LATENCIES:
        p: Percentiles = getattr(result, key)
        within = ""
        if likely is not None:
            low, high = getattr(likely, key).p50
            within = f", {_interval(seconds_between(low, high, p.p50))}"
        words = f"median{within}; p90 {seconds(p.p90)}, p99 {seconds(p.p99)}"
        numbers.append(_figure(key, p.p50, words))
    within = "" if likely is None else _interval(" – ".join(map(count, likely.output_tokens_per_s)))
    tokens = _figure("output_tokens_per_s", rate_per_s, within)
    return [*numbers, tokens, *_perplexity(result), *_reserved(result), _peak(result)]


def _perplexity(result: ServingResult) -> list[Number]:
    """What the quantization costs in quality, where that was measured."""
    if result.perplexity_added is None:
        return []
    note = f"by {result.scenario.for_serving.quantization}, measured on a language model of 135M"
    return [_figure("perplexity_added", result.perplexity_added, note)]


def _reserved(result: ServingResult) -> list[Number]:
    """Say what the engine takes of its GPUs when it starts, used or not."""
    if _takes_as_needed(result):
        return []
    row, gpu = tightest(result.memory), result.scenario.cluster.gpu
    note = f"{of_gpu_words(row.reserved, row.limit, gpu)}: weights, the whole cache, buffers"
    return [Number("Reserved memory", n_bytes(row.reserved), note, compared=row.reserved)]


def _takes_as_needed(result: StepResult | ServingResult) -> bool:
    """Tell whether the most memory in use is all that is taken."""
    return isinstance(result, StepResult) or result.scenario.for_serving.batching == "static"


def _interval(bounds: str) -> str:
    return f"90 % interval {bounds}"


def _peak(result: StepResult | ServingResult) -> Number:
    row, reserved = tightest(result.memory), ""
    gpu, in_use = result.scenario.cluster.gpu_of(row.rank), not _takes_as_needed(result)
    if not in_use and not gpu.chip.is_host:
        reserved = f"{n_bytes(row.reserved)} reserved, "
    note, mood = fit_words(result.fit, reserved + of_gpu_words(row.peak if in_use else row.reserved, row.limit, gpu))
    return Number("Peak memory in use" if in_use else "Peak memory", n_bytes(row.peak), note, mood, row.peak)


def fit_words(fit: Fit, what: str) -> tuple[str, str]:
    """Return a verdict in words about the memory that `what` names, with its mood.

    >>> fit_words(Fit("tight", 0.64), "77 of 80 GiB")[0]
    'tight, 77 of 80 GiB: fits with odds of 64 %, by the known error of such predictions'
    """
    if fit.state == "fits":
        return f"✓ fits, {what}", "good"
    odds = f": fits with odds of {100 * fit.odds:.0f} %, by the known error of such predictions"
    if fit.state == "tight":
        return f"tight, {what}{odds}", "bad"
    return f"✗ does not fit, {what}{odds * (fit.odds >= 1 - SURE)}", "bad"


def of_gpu_words(used_bytes: float, limit_bytes: float, gpu: GpuSpec) -> str:
    """Say which part of a limit is used, and which part of the GPU's memory the limit is.

    >>> from topology.presets import GPUS
    >>> of_gpu_words(70 * 2**30, 78.61 * 2**30, GPUS["h100-sxm"])
    '89.0 % of 78.61 GiB beside CUDA and NCCL (nominal 80.00 GiB)'
    """
    of = f"{percent(used_bytes / limit_bytes)} of {n_bytes(limit_bytes)}"
    if gpu.chip.is_host:
        return of
    beside = f"{of} beside CUDA and NCCL"
    return beside if gpu.shown_bytes == gpu.memory_bytes else f"{beside} (nominal {n_bytes(gpu.memory_bytes)})"


def anchor_numbers(found: Anchor | None) -> list[Number]:
    """A measured step beside the simulated one and, where something was changed, the changed step scaled to it."""
    if found is None:
        return []
    where = "inside" if found.inside_interval else "outside"
    changed = found.anchored_step_time_s != found.measured_s
    which = f"{seconds(found.simulated_s)}{' without --set' * changed}"
    note = f"simulated {which} ({change_percent(found.error)}), measured {where} the 90 % interval"
    if not found.inside_interval:
        note += f"; {TO_CHECK}" + f"; {SET_IS_CHANGE}" * changed
    numbers = [Number("Measured step", seconds(found.measured_s), note, "" if found.inside_interval else "bad")]
    if changed:
        factor = found.measured_s / found.simulated_s
        rate = f"{count(found.anchored_tokens_per_s)} tokens/s; simulated × {factor:.3f}, measured ÷ simulated"
        numbers.append(Number("With --set, scaled", seconds(found.anchored_step_time_s), rate))
    return numbers


def spending_numbers(spent: Spending | None) -> list[Number]:
    """Each cost that the workload has at the given price, with its energy."""
    if spent is None:
        return []
    costs = (
        ("Cost per trillion tokens", spent.trillion_tokens),
        ("Cost per million output tokens", spent.million_output_tokens),
        ("Cost of the whole training", spent.whole_training),
        ("Cost of a step", spent.rl_step),
        ("Cost per million answers", spent.million_answers),
    )
    at = f"at {spent.price_per_gpu_hour:,g} a GPU hour"
    return [Number(name, _money(cost.price), f"{at}: {_cost_note(cost)}") for name, cost in costs if cost is not None]


def _money(price: float) -> str:
    return f"{price:,.0f}" if price >= 100 else f"{price:.3g}"


def _cost_note(cost: TokenCost) -> str:
    hours = f"{cost.gpu_hours:,.0f}" if cost.gpu_hours >= 100 else f"{cost.gpu_hours:.3g}"
    kwh = cost.energy_kwh
    energy = f"{kwh / 1e3:,.0f} MWh" if kwh >= 1e4 else f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.3g} kWh"
    return f"{hours} GPU hours; GPUs take {energy} at their power limit"


def evidence_line(row: Evidence) -> str:
    """A measured row beside a result, in words."""
    said = f"measured {seconds(row.measured)}, simulated {seconds(row.predicted)} ({change_percent(row.error)})"
    return f"{row.table}, {row.where}: {said}"


def memory_limit_bytes(result: StepResult | ServingResult) -> float:
    """Return what fits on the device that is tightest."""
    return tightest(result.memory).limit
