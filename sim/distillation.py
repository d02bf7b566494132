"""Distillation: what a teacher adds to the student's step, in time and in memory.

`logits` (Hinton et al. 2015, arXiv 1503.02531): the frozen teacher runs forward on the same sequences and the student's
loss compares both distributions at a temperature (`sim.models.output.head.soft_loss`, part of the student's head).
`sequence` (Kim and Rush 2016, arXiv 1606.07947): the teacher first writes the second part of every sequence, served by
`sim.serve.simulation`, then the student trains as ever.

The teacher is cut over `teacher_parallelism.tp` ranks and replicated over the student's ranks, each replica taking its
share of the batch (`placement: same`), or has that many GPUs of its own and works one step ahead (`other`): then the
longer of the two decides. On the same GPUs nothing overlaps, as both keep the tensor cores busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.core.program import Block, Comm, Compute, Item
from sim.inputs.distillation_config import Distillation
from sim.inputs.parallelism import Parallelism, split_layers
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Training
from sim.inputs.workloads import Inference, RequestPattern
from sim.models.dims import dims
from sim.models.output.head import soft_loss
from sim.prices.rank_prices import Pricing
from sim.prices.shared_cores import costs_of
from sim.programs.compile import compile_program
from sim.programs.stages import replace_runs, stage_blocks
from sim.ranks.faults import disturbs, network_of
from sim.ranks.plan import make_plan
from sim.results.beside_allocator import left_of
from sim.results.fit import PEAK_UNCERTAINTY, judge
from sim.results.records import MemoryRow, tightest
from sim.results.result import StepResult
from sim.results.teacher import Distilled, Teacher
from topology.network import Network

if TYPE_CHECKING:
    from sim.prices.profile import Profile

INFERENCE = "inference"  # the phase of a measured teacher's block: forward alone, nothing kept, no loss


def teacher_of(scenario: Scenario, profile: Profile, held_bytes: float = 0.0) -> Teacher:
    """Costs of the teacher of a scenario with `distillation`. `held_bytes`: what the student keeps on a GPU that the
    teacher writes on.

    Raises:
        InputError: without that section.
    """
    d, t = scenario.distillation, scenario.training
    if d is None or t is None:
        raise scenario.error(("distillation",), "is missing")
    replicas, share = _replicas(scenario, d)
    weights, forward_s, buffers = _forward(scenario, d, profile, replicas)
    if d.mode == "sequence":
        held_bytes = held_bytes if d.placement == "same" else 0.0
        generate_s, tokens, buffers, cache = _generate(scenario, d, profile, replicas, held_bytes)
        return Teacher(
            mode=d.mode,
            placement=d.placement,
            gpus=d.own_gpus,
            forward_s=0.0,
            loss_s=0.0,
            send_s=0.0,
            generate_s=generate_s,
            parameter_bytes=weights,
            buffer_bytes=buffers,
            cache_bytes=cache,
            generated_tokens=tokens,
        )
    micro = -(-share // min(share, t.micro_batch_size))
    return Teacher(
        mode=d.mode,
        placement=d.placement,
        gpus=d.own_gpus,
        forward_s=micro * forward_s,
        loss_s=_loss_s(scenario, profile),
        send_s=_send_s(scenario, t, d, micro),
        generate_s=0.0,
        parameter_bytes=weights,
        buffer_bytes=buffers,
        cache_bytes=0.0,
        generated_tokens=0,
    )


def _replicas(scenario: Scenario, d: Distillation) -> tuple[int, int]:
    """Return how many replicas the teacher has, and how many of a step's sequences each of them reads."""
    replicas = 1 if d.placement == "other" else scenario.parallelism.ranks // d.teacher_parallelism.tp
    return replicas, -(-scenario.for_training.global_batch_size // replicas)


def _send_s(scenario: Scenario, t: Training, d: Distillation, messages: int) -> float:
    """Seconds in which a step's logits reach the ranks of the student's last stage, each its tokens' and its part of
    the vocabulary.

    A teacher elsewhere (on the GPUs after the student's) sends all of them over its own links or the receivers',
    whichever are fewer. On the student's ranks what one has computed itself stays: of 1/(teacher's tp) of the
    vocabulary, for tp/ranks of the tokens, the part that it needs.
    """
    p, tp = scenario.parallelism, d.teacher_parallelism.tp
    receivers = p.ranks // p.pp
    size = float(t.global_batch_size * t.seq_len * d.teacher.vocab * dtype_bytes(sixteen_bit(t.precision)))
    if d.placement == "other":
        size, far = size / min(tp, receivers), p.ranks
    else:
        own = min(tp, p.tp * p.pp) / (p.pp * max(tp, p.tp))
        size, far = size / receivers * (1.0 - own), (p.ranks if p.pp > 1 else max(tp, p.tp)) - 1
    if not size:
        return 0.0
    cluster = scenario.cluster
    nodes = max(cluster.nodes, far // cluster.gpus_per_node + 1)
    return messages * Network(cluster.model_copy(update={"nodes": nodes})).send(0, far, size / messages)


def teacher_scenario(scenario: Scenario, d: Distillation) -> Scenario:
    """The teacher's own forward: a replica's sequences in micro-batches of at most the student's size, cut over its tp
    alone, every expert on one rank."""
    tp = d.teacher_parallelism.tp
    experts = d.teacher.moe.experts if d.teacher.moe else 1
    layout = Parallelism(tp=tp, ep=math.gcd(tp, experts), layers_per_stage=split_layers(d.teacher.layers, 1))
    training = scenario.training
    if training is not None:
        size = min(training.micro_batch_size, _replicas(scenario, d)[1])
        training = training.model_copy(update={"lora": None, "micro_batch_size": size})
    return scenario.unchecked_copy(
        update={"model": d.teacher, "parallelism": layout, "distillation": None, "faults": None, "training": training}
    )


def teacher_blocks(scenario: Scenario, d: Distillation) -> tuple[Block, ...]:
    """The teacher's blocks on one rank, first to last."""
    plan = make_plan(teacher_scenario(scenario, d))
    return stage_blocks(plan, plan.parts[0], 0)


def _with_faults(scenario: Scenario, d: Distillation, replicas: int) -> Scenario:
    """The teacher's scenario with the slow ranks and links of the student's, where it runs on its GPUs."""
    own = teacher_scenario(scenario, d)
    if d.placement == "other" or scenario.faults is None or not disturbs(scenario):
        return own
    faults = scenario.faults.model_copy(update={"jitter": None})
    layout = own.parallelism.model_copy(update={"dp": replicas})
    return own.unchecked_copy(update={"faults": faults, "parallelism": layout})


def _forward(scenario: Scenario, d: Distillation, profile: Profile, replicas: int) -> tuple[float, float, float]:
    """Return the bytes of the teacher's weights on a rank, the seconds of one micro-batch's forward on the slowest rank
    and the bytes that this forward needs beside weights (its largest layer's, and logits)."""
    own = _with_faults(scenario, d, replicas)
    costs, plan = costs_of(scenario, profile).near(own), make_plan(own)
    pricing = Pricing(plan, costs, network_of(own))
    t = own.for_training
    blocks = teacher_blocks(scenario, d)
    items: list[Item] = []
    for b in blocks:
        program = tuple(item for item in b.forward if not _of_loss(item))
        items += replace_runs(program, b, INFERENCE, costs) or program
    size = dtype_bytes(sixteen_bit(t.precision))
    weights = sum(b.params + b.expert_params for b in blocks) * size
    logits = t.micro_batch_size * t.seq_len * dims(own).vocabulary_of(d.teacher) * size
    buffers = max(b.forward_peak_bytes for b in blocks) + logits
    seconds = (compile_program(tuple(items), pricing.on(c.rank)).makespan_s for c in plan.classes)
    return weights, max(seconds), buffers


def _of_loss(item: Item) -> bool:
    """Tell whether an operator belongs to the hard-label loss, which a teacher does not compute."""
    if isinstance(item, Compute):
        return item.kind == "cross_entropy"
    return isinstance(item, Comm) and item.of_loss


def _loss_s(scenario: Scenario, profile: Profile) -> float:
    """Seconds of a step in the loss at a temperature."""
    costs, part = costs_of(scenario, profile).near(scenario), soft_loss(scenario, dims(scenario))
    ops = (i for i in (*part.forward, *part.backward) if isinstance(i, Compute))
    return scenario.micro_batches * sum(costs.compute(op).seconds for op in ops)


def _generate(
    scenario: Scenario, d: Distillation, profile: Profile, replicas: int, held_bytes: float
) -> tuple[float, int, float, float]:
    """Seconds until the teacher has written the second part of every sequence; how many tokens those are; bytes of an
    iteration's tensors and of the cache at its fullest. The cache has what the student's `held_bytes` leave.
    """
    from sim.serve.simulation import simulate_serving

    t = scenario.for_training
    prompt = d.prompt_len or max(1, t.seq_len // 2)
    if prompt >= t.seq_len:
        why = f"must be below training.seq_len ({t.seq_len}), as the teacher writes the rest"
        raise scenario.error(("distillation", "prompt_len"), f"found {prompt}; {why}")
    own = _with_faults(scenario, d, replicas)
    precision = sixteen_bit(t.precision)
    pattern = RequestPattern(prompt_len=prompt, output_len=t.seq_len - prompt, count=t.global_batch_size)
    inference = Inference(requests=pattern)
    cache = inference.kv_cache.model_copy(update={"dtype": precision})
    inference = inference.model_copy(update={"precision": precision, "kv_cache": cache})
    layout = own.parallelism.model_copy(update={"dp": replicas})
    serving = own.unchecked_copy(update={"training": None, "inference": inference, "parallelism": layout})
    served = simulate_serving(serving, profile, held_bytes=held_bytes)
    row = max(served.outcome.memory, key=lambda row: row.peak)
    return served.end_s, t.global_batch_size * (t.seq_len - prompt), row.buffers, row.activations


def with_teacher(student: StepResult, teacher: Teacher, scenario: Scenario) -> StepResult:
    """A student's result with the teacher's time and memory added, and what they are as `distillation`."""
    student_s = student.step_time_s
    step_s = teacher.step_s(student_s)
    slower = student_s / step_s if step_s > 0 else 1.0
    gpus = scenario.parallelism.ranks
    per_gpu = slower * gpus / (gpus + teacher.gpus)
    low, high = student.step_time_interval_s
    together = replace(
        student,
        step_time_s=step_s,
        step_time_interval_s=(low / slower, high / slower),
        tokens_per_s=student.tokens_per_s * slower,
        tokens_per_s_per_gpu=student.tokens_per_s_per_gpu * per_gpu,
        utilization=student.utilization.scaled(per_gpu),
        mean_rank=replace(student.mean_rank, bubble_fraction=student.mean_rank.bubble_fraction * slower),
        critical_path=_critical_path(student.critical_path, teacher, student_s),
        distillation=Distilled(teacher, student_s),
    )
    together = _with_memory(together, teacher, left_of(scenario.cluster.gpu).limit)
    if student.fits_in_memory and not together.fits_in_memory:
        beside = (
            "the student does not fit beside its teacher"
            if teacher.placement == "same"
            else "the teacher does not fit on its own GPUs"
        )
        warning = f"does not fit in memory: the student would by itself, but {beside}"
        together = replace(together, warnings=(*student.warnings, warning))
    return together


def _with_memory(student: StepResult, teacher: Teacher, own_gpu_bytes: float) -> StepResult:
    """The result with the teacher's memory: on the student's ranks, or on GPUs of its own, which have no trainer's
    communicators."""
    if teacher.placement != "same":
        fit = min(student.fit, judge(teacher.held_bytes, own_gpu_bytes, PEAK_UNCERTAINTY), key=lambda x: x.odds)
        return replace(student, fits_in_memory=fit.fits, fit=fit)
    memory = tuple(_beside(row, teacher) for row in student.memory)
    peak, reserved, fit = max(x.peak for x in memory), max(x.reserved for x in memory), tightest(memory).fit
    peaks = {"peak_memory_bytes": peak, "peak_reserved_bytes": reserved}
    return replace(student, memory=memory, **peaks, fits_in_memory=fit.fits, fit=fit)


def _critical_path(student: Mapping[str, float], teacher: Teacher, student_s: float) -> dict[str, float]:
    """Seconds by kind on the critical path: of both in turn on the same GPUs, else of the longer one."""
    own = {"TEACHER": teacher.forward_s + teacher.send_s, "GENERATE": teacher.generate_s}
    longer = own if teacher.own_s > student_s else student
    path = {**own, **student} if teacher.placement == "same" else longer
    return dict(sorted(((k, v) for k, v in path.items() if v), key=lambda kv: -kv[1]))


def _beside(row: MemoryRow, teacher: Teacher) -> MemoryRow:
    """A rank's memory with the teacher on it: the more of the student's own peak and the teacher's turn, in which it
    needs its buffers and cache beside what the student holds."""
    turn = row.lasting + teacher.buffer_bytes + teacher.cache_bytes
    peak = teacher.parameter_bytes + max(row.peak, turn)
    return replace(
        row,
        parameters=row.parameters + teacher.parameter_bytes,
        teacher=teacher.parameter_bytes,
        buffers=max(row.buffers, teacher.buffer_bytes),
        activations=max(row.activations, teacher.cache_bytes),
        peak=peak,
        reserved=row.reserved + peak - row.peak,
    )
