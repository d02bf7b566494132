"""Distillation: what a teacher adds to the student's step, in time and in memory.

`logits` (Hinton et al. 2015, arXiv 1503.02531): the frozen teacher runs forward on the same sequences and the student's
loss compares both distributions at a temperature. `sequence` (Kim and Rush 2016, arXiv 1606.07947): the teacher first
writes the second part of every sequence, served by `sim.serve.serving`, then the student trains as ever.

The teacher is cut over `teacher_parallelism.tp` ranks and replicated over the student's ranks, each replica taking its
share of the batch (`placement: same`), or has that many GPUs of its own and works one step ahead (`other`): then the
longer of the two decides. On the same GPUs nothing overlaps, as both keep the matrix units busy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sim.costs import Costs
from sim.dtypes import dtype_bytes, sixteen_bit
from sim.errors import InputError
from sim.models.operators import F, I, memory_op
from sim.parallelism import Parallelism, split_layers
from sim.plan import make_plan
from sim.pricing import Pricing
from sim.program import Comm, Compute, Item
from sim.scenario import Scenario
from sim.stages import stage_blocks
from sim.template import compile_program
from sim.workloads import Distillation, Inference, RequestPattern
from topology.network import Network

if TYPE_CHECKING:
    from sim.profile import Profile

LOSS_FORWARD_BYTES = 56.0  # per logit, fp32 chain: to fp32 (4), temperature (8), softmax (32), product and sum (12)
LOSS_BACKWARD_BYTES = 20.0  # difference of two distributions (12), temperature (8)
FUSED_BYTES = 5.0  # in elements: both logits read twice, the gradient written


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the teacher adds. Seconds of a step; bytes on a rank that holds it.

    `forward_s`: of all its micro-batches; `loss_s`: the student's comparing both distributions; `send_s`: logits to the
    student's GPUs where they are elsewhere; `generate_s`: sequence mode's generation.
    """

    mode: str
    placement: str
    gpus: int
    forward_s: float
    loss_s: float
    send_s: float
    generate_s: float
    parameter_bytes: float
    buffer_bytes: float
    generated_tokens: int

    def step_s(self, student_s: float) -> float:
        """The whole step around a student's of `student_s`."""
        own = self.forward_s + self.generate_s + self.send_s
        student_s += self.loss_s
        return max(own, student_s) if self.placement == "other" else own + student_s


def teacher_of(scenario: Scenario, profile: Profile) -> Teacher:
    """Costs of the teacher of a scenario with `distillation`.

    Raises:
        InputError: without that section.
    """
    d, t = scenario.distillation, scenario.training
    if d is None or t is None:
        raise InputError(f"{scenario.name}: this scenario has no `distillation` section")
    ranks, tp = scenario.parallelism.ranks, d.teacher_parallelism.tp
    replicas = 1 if d.placement == "other" else ranks // tp
    share = -(-t.global_batch_size // replicas)
    gpus = tp if d.placement == "other" else 0
    weights, forward_s, buffers = _forward(scenario, d, profile)
    if d.mode == "sequence":
        generate_s, tokens = _generate(scenario, d, profile, replicas)
        return Teacher(d.mode, d.placement, gpus, 0.0, 0.0, 0.0, generate_s, weights, buffers, tokens)
    micro = -(-share // t.micro_batch_size)
    loss_s, logits_bytes = _loss(scenario, profile)
    send_s = 0.0
    if d.placement == "other" or scenario.parallelism.pp > 1:
        size = t.micro_batch_size * t.seq_len * d.teacher.vocab * dtype_bytes(sixteen_bit(t.precision)) / tp
        network = Network(scenario.cluster)
        send_s = micro * network.send(0, max(1, scenario.cluster.nodes * scenario.cluster.gpus_per_node - 1), size)
    buffers += logits_bytes
    return Teacher(d.mode, d.placement, gpus, micro * forward_s, loss_s, send_s, 0.0, weights, buffers, 0)


def teacher_scenario(scenario: Scenario, d: Distillation) -> Scenario:
    """The teacher's own forward: the student's sequences, cut over its tp alone, every expert on one rank."""
    tp = d.teacher_parallelism.tp
    experts = d.teacher.moe.experts if d.teacher.moe else 1
    layout = Parallelism(tp=tp, ep=math.gcd(tp, experts), layers_per_stage=split_layers(d.teacher.layers, 1))
    return scenario.model_copy(update={"model": d.teacher, "parallelism": layout, "distillation": None, "faults": None})


def _forward(scenario: Scenario, d: Distillation, profile: Profile) -> tuple[float, float, float]:
    """Bytes of the teacher's weights on a rank, seconds of one micro-batch's forward, bytes that it needs meanwhile."""
    own = teacher_scenario(scenario, d)
    plan = make_plan(own)
    pricing = Pricing(plan, Costs(profile, own.cluster.gpu), Network(own.cluster))
    t = own.training
    assert t is not None
    blocks = stage_blocks(plan, plan.parts[0], 0)
    program = tuple(item for b in blocks for item in b.forward if not _of_loss(item))
    size = dtype_bytes(sixteen_bit(t.precision))
    weights = sum(b.params + b.expert_params for b in blocks) * size
    logits = t.micro_batch_size * t.seq_len * d.teacher.padded_vocab(own.parallelism.tp) / own.parallelism.tp * size
    buffers = max(b.forward_peak_bytes for b in blocks) + logits
    return weights, compile_program(program, pricing.on(0)).makespan_s, buffers


def _of_loss(item: Item) -> bool:
    """Whether an operator belongs to the hard-label loss, which a teacher does not compute."""
    if isinstance(item, Compute):
        return item.kind == "cross_entropy"
    return isinstance(item, Comm) and item.name.startswith("loss_")


def _loss(scenario: Scenario, profile: Profile) -> tuple[float, float]:
    """Seconds of a step in the loss at a temperature, and bytes of the teacher's logits held for it."""
    t, p = scenario.training, scenario.parallelism
    assert t is not None
    costs = Costs(profile, scenario.cluster.gpu)
    act = sixteen_bit(t.precision)
    n = t.micro_batch_size * t.seq_len / p.cp * scenario.model.padded_vocab(p.tp) / p.tp
    size = dtype_bytes(act)
    if t.cross_entropy == "fused":
        ops = [memory_op("distillation_loss", F, "cross_entropy", n, FUSED_BYTES * size * n, act, 2)]
        held = size * n
    else:
        ops = [memory_op("distillation_loss", F, "cross_entropy", n, (LOSS_FORWARD_BYTES + size) * n, act, 10),
               memory_op("distillation_loss_backward", I, "cross_entropy", n, LOSS_BACKWARD_BYTES * n, act, 2)]
        held = (size + 4.0) * n
    return scenario.micro_batches * sum(costs.compute(op).seconds for op in ops), held


def _generate(scenario: Scenario, d: Distillation, profile: Profile, replicas: int) -> tuple[float, int]:
    """Seconds until the teacher has written the second part of every sequence, and how many tokens those are."""
    from sim.serve.serving import simulate_serving

    t = scenario.training
    assert t is not None
    prompt = d.prompt_len or max(1, t.seq_len // 2)
    if prompt >= t.seq_len:
        raise InputError(f"{scenario.name}: distillation.prompt_len: found {prompt}; must be below training.seq_len "
                         f"({t.seq_len}), as the teacher writes the rest")
    own = teacher_scenario(scenario, d)
    precision = sixteen_bit(t.precision)
    pattern = RequestPattern(prompt_len=prompt, output_len=t.seq_len - prompt, count=t.global_batch_size)
    inference = Inference(requests=pattern)
    cache = inference.kv_cache.model_copy(update={"dtype": precision})
    inference = inference.model_copy(update={"precision": precision, "kv_cache": cache})
    layout = own.parallelism.model_copy(update={"dp": replicas})
    serving = own.model_copy(update={"training": None, "inference": inference, "parallelism": layout})
    return simulate_serving(serving, profile).end_s, t.global_batch_size * (t.seq_len - prompt)


def with_teacher(result: dict[str, Any], scenario: Scenario, profile: Profile) -> dict[str, Any]:
    """A student's result with the teacher's time and memory added, and what they are under `distillation`."""
    teacher = teacher_of(scenario, profile)
    student_s = result["step_time_s"]
    step_s = teacher.step_s(student_s)
    slower = student_s / step_s if step_s > 0 else 1.0
    gpus = scenario.parallelism.ranks
    per_gpu = slower * gpus / (gpus + teacher.gpus)
    out = dict(result)
    out["step_time_s"] = step_s
    out["step_time_interval_s"] = [bound / slower for bound in result["step_time_interval_s"]]
    out["tokens_per_s"] = result["tokens_per_s"] * slower
    for key in ("tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu", "mfu_full_attention", "hfu"):
        out[key] = result[key] * per_gpu
    out["bubble_fraction"] = result["bubble_fraction"] * slower
    out["critical_path"] = _critical_path(result["critical_path"], teacher, student_s)
    if teacher.placement == "same":
        out["memory"] = [_beside(row, teacher) for row in result["memory"]]
        peak = max(row["peak"] for row in out["memory"])
        out["peak_reserved_bytes"] = result["peak_reserved_bytes"] + peak - result["peak_memory_bytes"]
        out["peak_memory_bytes"] = peak
        out["fits_in_memory"] = out["peak_memory_bytes"] <= scenario.cluster.gpu.memory_bytes
    if not out["fits_in_memory"] and result["fits_in_memory"]:
        out["warnings"] = [*result["warnings"], "does not fit in memory: the student alone would, with the teacher not"]
    out["distillation"] = {**asdict(teacher), "student_step_s": student_s}
    return out


def _critical_path(student: dict[str, float], teacher: Teacher, student_s: float) -> dict[str, float]:
    """Both one after the other on the same GPUs; else the longer of the two."""
    own = {"TEACHER": teacher.forward_s + teacher.send_s, "GENERATE": teacher.generate_s}
    learning = {**student, "LOSS": teacher.loss_s}
    if teacher.placement == "same":
        path = {**own, **learning}
    else:
        path = own if sum(own.values()) > student_s + teacher.loss_s else learning
    return dict(sorted(((k, v) for k, v in path.items() if v), key=lambda kv: -kv[1]))


def _beside(row: dict[str, Any], teacher: Teacher) -> dict[str, Any]:
    """A rank's memory with the teacher on it; its buffers are needed before the student's backward, not beside them."""
    buffers = max(row["buffers"], teacher.buffer_bytes)
    more = teacher.parameter_bytes + buffers - row["buffers"]
    return {**row, "parameters": row["parameters"] + teacher.parameter_bytes, "buffers": buffers,
            "teacher": teacher.parameter_bytes, "peak": row["peak"] + more}  # fmt: skip
