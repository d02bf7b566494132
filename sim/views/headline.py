"""The numbers of a result that every view opens with, and the line that names its scenario."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.core.dtypes import dtype_bytes
from sim.core.units import billions, change_s, count, counted, n_bytes, percent, rate, seconds, seconds_between
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import preset_name
from sim.inputs.scenario import Scenario
from sim.models.parameters import count_parameters
from sim.results.beside_allocator import MemoryLimit, is_tight
from sim.results.losses import bubble_name, waiting_s
from sim.results.records import tightest
from sim.results.result import StepResult
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.serving_keys import Sampling
    from sim.inputs.training_config import PreferenceLoss, Reference, Training
    from sim.results.evidence import Evidence
    from sim.results.training_run import TrainingRun
    from sim.serve.results.records import Percentiles, ServingResult
    from sim.studies.anchor import Anchor
    from sim.studies.goodput import Goodput
    from sim.studies.spending import Spending, TokenCost

TO_CHECK = (  # where a measured step is far from the simulated one; docs/slower_than_simulated.md says more
    "check that framework, recompute and micro-batch are the run's, and that the time is a median without the first "
    "steps; `stepsim convert` reads a trainer's configuration, `stepsim replay` a profiler's trace"
)
SHOWN = 1e-4  # of the step: smaller losses are left to the JSON
LATENCIES = {
    "Request latency": "request_latency_s",
    "Time to first token": "time_to_first_token_s",
    "Time per output token": "time_per_output_token_s",
}
PAIR_LOSSES: dict[PreferenceLoss, str] = {"dpo": "DPO", "orpo": "ORPO", "reward": "reward model"}
REFERENCES: dict[Reference, str] = {
    "model": " (reference: a second model)",
    "adapters_off": " (reference: the model without adapters)",
    "precomputed": " (reference: computed before)",
    "none": "",
}
LINK_NAMES = {"domain": "links inside domains", "nic": "NICs", "spine": "links above leaves", "host": "PCIe"}


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


def _step(result: StepResult) -> list[Number]:
    step_s, exposed_s = result.step_time_s, result.mean_rank.exposed_comm_s
    if not step_s:
        return []
    use = result.utilization
    interval = _interval(seconds_between(*result.step_time_interval_s))
    if result.one_step_s is not None:
        interval += f"; from its first forward to its last rank's end a step lasts {seconds(result.one_step_s)}"
    flops, per_gpu = _flops_words(result), result.tokens_per_s_per_gpu
    return [
        Number("Step time", seconds(step_s), interval, compared=step_s),
        Number("Tokens/s per GPU", count(per_gpu), f"{count(result.tokens_per_s)} in all", compared=per_gpu),
        Number("MFU", percent(use.mfu), f"{flops}; HFU {percent(use.hfu)}", compared=use.mfu),
        Number(bubble_name(result.scenario.parallelism), percent(waiting_s(result) / step_s), "of the step"),
        Number("Exposed communication", seconds(exposed_s), f"{percent(exposed_s / step_s)} of the step"),
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
        return [Number("  with failures", "never", "no training is effective", "bad")]
    note = f"{run.gpu_hours / useful:,.0f} GPU hours, of which {percent(useful)} effective training"
    return [Number("  with failures", f"{run.days / useful:,.1f} days", note)]


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
    return [Number("Shared links", seconds(lost_s), f"{percent(lost_s / step_s)} of the step lost on {where}")]


def _serving(result: ServingResult) -> list[Number]:
    if result.does_not_start is not None:
        return [Number("Server", "does not start", result.does_not_start, "bad")]
    likely, rate_per_s, numbers = result.intervals, result.output_tokens_per_s, list[Number]()
    for name, key in LATENCIES.items():
        p: Percentiles = getattr(result, key)
        within = "" if likely is None else f", {_interval(seconds_between(*getattr(likely, key).p50))}"
        words = f"median{within}; p90 {seconds(p.p90)}, p99 {seconds(p.p99)}"
        numbers.append(Number(name, seconds(p.p50), words, compared=p.p50))
    within = "" if likely is None else _interval(" – ".join(map(count, likely.output_tokens_per_s)))
    tokens = Number("Output tokens/s", count(rate_per_s), within, compared=rate_per_s)
    return [*numbers, tokens, *_reserved(result), _peak(result)]


def _reserved(result: ServingResult) -> list[Number]:
    """Say what the engine takes of its GPUs when it starts, used or not."""
    if _takes_as_needed(result):
        return []
    reserved, limit = result.peak_reserved_bytes, memory_limit_bytes(result)
    note = f"{percent(reserved / limit)} of {n_bytes(limit)}: weights, the whole cache, buffers"
    return [Number("Reserved memory", n_bytes(reserved), note, compared=reserved)]


def _takes_as_needed(result: StepResult | ServingResult) -> bool:
    """Tell whether the most memory in use is all that is taken."""
    return isinstance(result, StepResult) or result.scenario.for_serving.batching == "static"


def _interval(bounds: str) -> str:
    return f"90 % interval {bounds}"


def _peak(result: StepResult | ServingResult) -> Number:
    row, fits = tightest(result.memory), result.fits_in_memory
    peak, limit, counted = row.peak, row.limit, row.beside is not None
    share = f"{percent(peak / limit)} of {n_bytes(limit)}" + " beside CUDA and NCCL" * counted
    note, mood = f"✓ fits, {share}", "good"
    if not fits:
        note, mood = f"✗ does not fit, {share}", "bad"
    elif is_tight(peak, MemoryLimit(limit, row.beside), result.scenario.cluster.gpu):
        left = f"{n_bytes(limit - peak)} left for CUDA and NCCL, which take 2 to 4 GiB"
        note, mood = f"tight, {share}: {left}", "bad"
    name = "Peak memory" if _takes_as_needed(result) else "Peak memory in use"
    return Number(name, n_bytes(peak), note, mood, result.peak_memory_bytes)


def anchor_numbers(found: Anchor | None) -> list[Number]:
    """A measured step beside the simulated one and, where something was changed, the changed step scaled to it."""
    if found is None:
        return []
    where = "inside" if found.inside_interval else "outside"
    note = f"simulated {seconds(found.simulated_s)} ({found.error:+.1%}), measured {where} the 90 % interval"
    if not found.inside_interval:
        note += f"; {TO_CHECK}"
    numbers = [Number("Measured step", seconds(found.measured_s), note, "" if found.inside_interval else "bad")]
    if found.anchored_step_time_s != found.measured_s:
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
    return [Number(name, _money(cost.price), _cost_note(cost)) for name, cost in costs if cost is not None]


def _money(price: float) -> str:
    return f"{price:,.0f}" if price >= 100 else f"{price:.3g}"


def _cost_note(cost: TokenCost) -> str:
    hours = f"{cost.gpu_hours:,.0f}" if cost.gpu_hours >= 100 else f"{cost.gpu_hours:.3g}"
    kwh = cost.energy_kwh
    energy = f"{kwh / 1e3:,.0f} MWh" if kwh >= 1e4 else f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.3g} kWh"
    return f"{hours} GPU hours; GPUs take {energy} at their power limit"


def layout_words(layout: Mapping[str, Any], short: bool = False) -> list[str]:
    """A mesh and its ZeRO stage, by the keys of `parallelism`; degrees of one are left out.

    >>> layout = {"tp": 8, "sp": True, "cp": 1, "pp": 4, "dp": 2, "ep": 1, "zero": 1}
    >>> layout_words(layout), layout_words(layout, short=True)
    (['tp 8 with sp', 'pp 4', 'dp 2', 'ZeRO-1'], ['tp8+sp', 'pp4', 'dp2', 'z1'])
    """
    space, sp, zero = ("", "+sp", "z") if short else (" ", " with sp", "ZeRO-")
    degrees = [k for k in ("tp", "cp", "pp", "dp", "ep") if layout[k] > 1]
    words = [f"{k}{space}{layout[k]}{sp * (k == 'tp' and layout['sp'])}" for k in degrees]
    words += [] if degrees or short else ["one device"]
    return words + [f"{zero}{layout['zero']}"] * bool(layout["zero"] or short)


def layout_line(scenario: Scenario) -> str:
    """The scenario in one line: model, layout, batch, cluster."""
    layout, training, inference = scenario.parallelism, scenario.training, scenario.inference
    pools = None if inference is None else inference.disaggregated
    states = {} if training is not None else {"zero": 0}  # serving has no optimizer states to shard
    shape = layout_words({**layout.model_dump(), **states})
    if pools is not None:  # what computes prompts, and what adds tokens
        named = (("prefill", pools.prefill), ("decode", pools.decode))
        shape = [f"{name} {p.replicas} × tp {p.tp}" + f", ep {p.ep}" * (p.ep > 1) for name, p in named]
    if inference is not None and inference.afd is not None:
        shape.append(f"experts on {inference.afd.expert_gpus} other GPUs")
    words = [model_words(scenario.model), *shape]
    if layout.pp > 1 and inference is None:
        words.append(layout.schedule)
    if training is not None:
        words.append(
            f"batch {training.global_batch_size} × {counted(training.seq_len, 'token')} "
            f"in micro-batches of {training.micro_batch_size}"
        )
        words += [training.precision, f"framework {training.framework}", *learning_words(training)]
    if inference is not None:
        words.append(f"{inference.batching} batching")
        words.append(inference.precision if inference.quantization == "none" else inference.quantization)
        words.append(f"engine {Path(inference.engine).name}")
        words += [] if inference.sampling is None else [sampling_words(inference.sampling)]
    return " · ".join([*words, gpus_words(scenario)])


def learning_words(training: Training) -> list[str]:
    """What is trained and from what, where that is not all weights and the next tokens of texts.

    >>> from sim.inputs.scenario import load_scenario
    >>> learning_words(load_scenario("scenarios/dpo_lora_llama3_8b.yaml").for_training)
    ['LoRA of rank 16', 'DPO (reference: the model without adapters)']
    """
    words = [] if training.lora is None else [f"LoRA of rank {training.lora.rank}"]
    if training.pair_loss is None:
        return words
    return [*words, PAIR_LOSSES[training.pair_loss] + REFERENCES[training.reference]]


def sampling_words(sampling: Sampling) -> str:
    """How tokens are chosen.

    >>> from sim.inputs.serving_keys import Sampling
    >>> sampling_words(Sampling(temperature=0.6, top_p=0.9))
    'temperature 0.6, top-p 0.9'
    """
    given = [f"temperature {sampling.temperature:g}"]
    given += [f"top-k {sampling.top_k}"] if sampling.top_k is not None else []
    given += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    given += [f"repetition penalty {sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    given += [f"{sampling.logprobs} logprobs"] if sampling.logprobs is not None else []
    given += ["structured outputs"] if sampling.structured_outputs else []
    return ", ".join(given)


def model_words(model: ModelConfig) -> str:
    """A model's name, if it is a shipped one, and size.

    >>> from sim.inputs.model_input import load_model
    >>> model_words(load_model("llama3-8b"))
    'llama3-8b (8.03B parameters, 32 layers)'
    """
    name = preset_name(model)
    return f"{name} ({size_words(model)})" if name else size_words(model)


def size_words(model: ModelConfig) -> str:
    """A model's parameters and layers.

    >>> from sim.inputs.model_input import load_model
    >>> size_words(load_model("mixtral-8x7b"))
    '46.7B parameters, 12.9B active, 32 layers'
    """
    if model.program is not None:
        from sim.inputs.program_file import read_program

        program = read_program(Path(model.program))
        elements = sum(p.elements for p in program.parameters)
        alone = ", a forward alone" if program.forward_alone else ""
        return f"{Path(model.program).name}: {billions(elements)} parameters, {counted(model.layers, 'block')}{alone}"
    sizes = count_parameters(model)
    active = "" if sizes.active == sizes.total else f", {billions(sizes.active)} active"
    return f"{billions(sizes.total)} parameters{active}, {counted(model.layers, 'layer')}"


def gpus_words(scenario: Scenario) -> str:
    """Return how many GPUs of which cluster."""
    cluster, ranks = scenario.cluster, scenario.ranks
    gpus = counted(ranks, "GPU")
    name = "" if cluster.name == "custom" else f"{cluster.name}: "
    kinds = " and ".join(gpu.name for gpu in cluster.gpus)
    return f"{gpus} ({name}{kinds}, {cluster.gpus_per_node} to a node)"


def cluster_words(cluster: ClusterSpec) -> str:
    """A node's GPUs and links; of the most usual node, where they differ.

    >>> from topology.presets import CLUSTERS
    >>> cluster_words(CLUSTERS["dgx-h100"])
    '8 × h100-sxm of 80.00 GiB; nvswitch 450.0 GB/s, 8 NICs of 50.00 GB/s a node (per direction)'
    """
    inside, outside = cluster.intra_node, cluster.inter_node
    links = f"{inside.kind} {rate(inside.bandwidth_bytes_per_s, 'B/s')}"
    nics = counted(outside.nics_per_node, "NIC")
    domain = f", NVLink domains of {cluster.nvlink_domain}" if cluster.nvlink_domain != cluster.gpus_per_node else ""
    kinds = " or ".join(f"{gpu.name} of {n_bytes(gpu.memory_bytes)}" for gpu in cluster.gpus)
    return (
        f"{cluster.gpus_per_node} × {kinds}{domain}; {links}, "
        f"{nics} of {rate(outside.nic_bandwidth_bytes_per_s, 'B/s')} a node (per direction)"
    )


def evidence_line(row: Evidence) -> str:
    """A measured row beside a result, in words."""
    said = f"measured {seconds(row.measured)}, simulated {seconds(row.predicted)} ({row.error:+.1%})"
    return f"{row.table}, {row.where}: {said}"


def memory_limit_bytes(result: StepResult | ServingResult) -> float:
    """Return what fits on the device that is tightest."""
    return tightest(result.memory).limit


def limit_words(found: Mapping[str, Any]) -> str:
    """Return what a search's layouts may take of a GPU; a trainer's communicators differ by layout."""
    limits = [row["memory_limit_bytes"] for row in found["best"]] or [found["memory_limit_bytes"]]
    least, most = n_bytes(min(limits)), n_bytes(max(limits))
    return f"at most {most} each" if least == most else f"at most {least} to {most} each, by layout"
