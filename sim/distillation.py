"""Distillation: what a teacher adds to the student's step, in time and in memory.

`logits` (Hinton et al. 2015, arXiv 1503.02531): the frozen teacher runs forward on the same sequences and the student's
loss compares both distributions at a temperature (`sim.models.head.soft_loss`, part of the student's head). `sequence`
(Kim and Rush 2016, arXiv 1606.07947): the teacher first writes the second part of every sequence, served by
`sim.serve.serving`, then the student trains as ever.

The teacher is cut over `teacher_parallelism.tp` ranks and replicated over the student's ranks, each replica taking its
share of the batch (`placement: same`), or has that many GPUs of its own and works one step ahead (`other`): then the
longer of the two decides. On the same GPUs nothing overlaps, as both keep the matrix units busy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.dtypes import dtype_bytes, sixteen_bit
from sim.errors import InputError
from sim.faults import disturbs, link_scales
from sim.graph.stages import replace_runs, stage_blocks
from sim.graph.template import compile_program
from sim.inputs.parallelism import Parallelism, split_layers
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Training
from sim.inputs.workloads import Distillation, Inference, RequestPattern
from sim.memory import MemoryCurve
from sim.models.dims import dims
from sim.models.head import soft_loss
from sim.plan import make_plan
from sim.prices.costs import Costs
from sim.prices.pricing import Pricing
from sim.program import Block, Comm, Compute, Item
from sim.timeline import Detail, RankClass, Timeline
from topology.network import Network

if TYPE_CHECKING:
    from sim.prices.profile import Profile

INFERENCE = "inference"  # the phase of a measured teacher's block: forward alone, nothing kept, no loss


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the teacher adds. Seconds of a step; bytes on a rank that holds it.

    `forward_s`: of all its micro-batches; `loss_s`: comparing both distributions, within the student's step; `send_s`:
    logits to the ranks that compare them; `generate_s`: sequence mode's generation; `cache_bytes`: of
    keys and values meanwhile.
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
    cache_bytes: float
    generated_tokens: int

    @property
    def own_s(self) -> float:
        """What it takes by itself."""
        return self.forward_s + self.generate_s + self.send_s

    @property
    def held_bytes(self) -> float:
        """The most that a GPU of its own needs."""
        return self.parameter_bytes + self.buffer_bytes + self.cache_bytes

    def step_s(self, student_s: float) -> float:
        """The whole step around a student's of `student_s`."""
        return max(self.own_s, student_s) if self.placement == "other" else self.own_s + student_s


def teacher_of(scenario: Scenario, profile: Profile, held_bytes: float = 0.0) -> Teacher:
    """Costs of the teacher of a scenario with `distillation`. `held_bytes`: what the student keeps on a GPU that the
    teacher writes on.

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
    weights, forward_s, buffers = _forward(scenario, d, profile, replicas)
    if d.mode == "sequence":
        held_bytes = held_bytes if d.placement == "same" else 0.0
        generate_s, tokens, buffers, cache = _generate(scenario, d, profile, replicas, held_bytes)
        return Teacher(d.mode, d.placement, gpus, 0.0, 0.0, 0.0, generate_s, weights, buffers, cache, tokens)
    micro = -(-share // t.micro_batch_size)
    loss_s = _loss_s(scenario, profile)
    send_s = _send_s(scenario, t, d, micro)
    return Teacher(d.mode, d.placement, gpus, micro * forward_s, loss_s, send_s, 0.0, weights, buffers, 0.0, 0)


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
    """The teacher's own forward: the student's sequences, cut over its tp alone, every expert on one rank."""
    tp = d.teacher_parallelism.tp
    experts = d.teacher.moe.experts if d.teacher.moe else 1
    layout = Parallelism(tp=tp, ep=math.gcd(tp, experts), layers_per_stage=split_layers(d.teacher.layers, 1))
    training = None if scenario.training is None else scenario.training.model_copy(update={"lora": None})
    return scenario.model_copy(update={"model": d.teacher, "parallelism": layout, "distillation": None, "faults": None,
                                       "training": training})  # fmt: skip


def teacher_blocks(scenario: Scenario, d: Distillation) -> tuple[Block, ...]:
    """The teacher's blocks on one rank, first to last."""
    plan = make_plan(teacher_scenario(scenario, d))
    return stage_blocks(plan, plan.parts[0], 0)


def _with_faults(own: Scenario, scenario: Scenario, d: Distillation, replicas: int) -> Scenario:
    """The teacher's scenario with the slow ranks and links of the student's, where it runs on its GPUs."""
    if d.placement == "other" or scenario.faults is None or not disturbs(scenario):
        return own
    faults = scenario.faults.model_copy(update={"jitter": None})
    layout = own.parallelism.model_copy(update={"dp": replicas})
    return own.model_copy(update={"faults": faults, "parallelism": layout})


def _forward(scenario: Scenario, d: Distillation, profile: Profile, replicas: int) -> tuple[float, float, float]:
    """Bytes of the teacher's weights on a rank, seconds of one micro-batch's forward on the slowest, bytes that it
    needs meanwhile."""
    own = _with_faults(teacher_scenario(scenario, d), scenario, d, replicas)
    costs, plan = Costs(profile, own.cluster.gpu), make_plan(own)
    pricing = Pricing(plan, costs, Network(own.cluster, link_scales(own)))
    t = own.training
    assert t is not None
    blocks = teacher_blocks(scenario, d)
    items: list[Item] = []
    for b in blocks:
        program = tuple(item for item in b.forward if not _of_loss(item))
        items += replace_runs(program, b.key, INFERENCE, costs) or program
    size = dtype_bytes(sixteen_bit(t.precision))
    weights = sum(b.params + b.expert_params for b in blocks) * size
    logits = t.micro_batch_size * t.seq_len * d.teacher.padded_vocab(own.parallelism.tp) / own.parallelism.tp * size
    buffers = max(b.forward_peak_bytes for b in blocks) + logits
    seconds = (compile_program(tuple(items), pricing.on(c.rank)).makespan_s for c in plan.classes)
    return weights, max(seconds), buffers


def _of_loss(item: Item) -> bool:
    """Whether an operator belongs to the hard-label loss, which a teacher does not compute."""
    if isinstance(item, Compute):
        return item.kind == "cross_entropy"
    return isinstance(item, Comm) and item.name.startswith("loss_")


def _loss_s(scenario: Scenario, profile: Profile) -> float:
    """Seconds of a step in the loss at a temperature."""
    costs, part = Costs(profile, scenario.cluster.gpu), soft_loss(scenario, dims(scenario))
    ops = (i for i in (*part.forward, *part.backward) if isinstance(i, Compute))
    return scenario.micro_batches * sum(costs.compute(op).seconds for op in ops)


def _generate(
    scenario: Scenario, d: Distillation, profile: Profile, replicas: int, held_bytes: float
) -> tuple[float, int, float, float]:
    """Seconds until the teacher has written the second part of every sequence; how many tokens those are; bytes of an
    iteration's tensors and of the cache at its fullest. The cache has what the student's `held_bytes` leave.
    """
    from sim.serve.serving import simulate_serving

    t = scenario.training
    assert t is not None
    prompt = d.prompt_len or max(1, t.seq_len // 2)
    if prompt >= t.seq_len:
        raise InputError(
            f"{scenario.name}: distillation.prompt_len: found {prompt}; must be below training.seq_len "
            f"({t.seq_len}), as the teacher writes the rest"
        )
    own = _with_faults(teacher_scenario(scenario, d), scenario, d, replicas)
    precision = sixteen_bit(t.precision)
    pattern = RequestPattern(prompt_len=prompt, output_len=t.seq_len - prompt, count=t.global_batch_size)
    inference = Inference(requests=pattern)
    cache = inference.kv_cache.model_copy(update={"dtype": precision})
    inference = inference.model_copy(update={"precision": precision, "kv_cache": cache})
    layout = own.parallelism.model_copy(update={"dp": replicas})
    serving = own.model_copy(update={"training": None, "inference": inference, "parallelism": layout})
    served = simulate_serving(serving, profile, held_bytes=held_bytes)
    row = max(served.result["memory"], key=lambda row: row["peak"])
    return served.end_s, t.global_batch_size * (t.seq_len - prompt), row["buffers"], row["kv_cache"]


def held_bytes(result: dict[str, Any]) -> float:
    """What the fullest rank of a student holds all the time."""
    return max(_held(row) for row in result["memory"])


def with_teacher(result: dict[str, Any], teacher: Teacher, scenario: Scenario) -> dict[str, Any]:
    """A student's result with the teacher's time and memory added, and what they are under `distillation`."""
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
    elif teacher.held_bytes > scenario.cluster.gpu.memory_bytes:
        out["fits_in_memory"] = False
    if not out["fits_in_memory"] and result["fits_in_memory"]:
        beside = "with the teacher not" if teacher.placement == "same" else "the teacher on its own GPUs does not"
        out["warnings"] = [*result["warnings"], f"does not fit in memory: the student alone would, {beside}"]
    out["distillation"] = {**asdict(teacher), "student_step_s": student_s}
    return out


def _critical_path(student: dict[str, float], teacher: Teacher, student_s: float) -> dict[str, float]:
    """Both one after the other on the same GPUs; else the longer of the two."""
    own = {"TEACHER": teacher.forward_s + teacher.send_s, "GENERATE": teacher.generate_s}
    longer = own if teacher.own_s > student_s else student
    path = {**own, **student} if teacher.placement == "same" else longer
    return dict(sorted(((k, v) for k, v in path.items() if v), key=lambda kv: -kv[1]))


def _held(row: dict[str, Any]) -> float:
    """What a rank of the student holds all the time."""
    return float(row["parameters"] + row["gradients"] + row["optimizer"])


def _beside(row: dict[str, Any], teacher: Teacher) -> dict[str, Any]:
    """A rank's memory with the teacher on it: the more of the student's own peak and the teacher's turn, in which it
    needs its buffers and cache beside what the student holds."""
    turn = _held(row) + teacher.buffer_bytes + teacher.cache_bytes
    peak = teacher.parameter_bytes + max(row["peak"], turn)
    return {**row, "parameters": row["parameters"] + teacher.parameter_bytes, "teacher": teacher.parameter_bytes,
            "buffers": max(row["buffers"], teacher.buffer_bytes),
            "activations": max(row["activations"], teacher.cache_bytes), "peak": peak}  # fmt: skip


def timeline_with_teacher(timeline: Timeline, teacher: Teacher) -> Timeline:
    """The student's timeline after the teacher's turn, a span on every rank; or beside it, on the teacher's ranks."""
    kind = "GENERATE" if teacher.mode == "sequence" else "TEACHER"
    text = f"{teacher.generated_tokens:,} tokens written" if teacher.generated_tokens else "forward, nothing kept"
    same = teacher.placement == "same"
    classes = timeline.classes
    if not same:
        first = 1 + max(c.ranks[-1] for c in classes)
        classes = (*classes, RankClass(first, range(first, first + teacher.gpus), len(classes)))
    rows = np.arange(len(timeline.classes)) if same else np.array([len(timeline.classes)])
    streams, kinds = (_with(values, new) for values, new in ((timeline.streams, "compute"), (timeline.kinds, kind)))
    new = {"class_index": rows, "stream": streams.index("compute"), "kind": kinds.index(kind),
           "detail": len(timeline.details), "stage": -1, "micro_batch": -1, "flow": -1, "start_s": 0.0,
           "end_s": teacher.own_s}  # fmt: skip
    shift = teacher.own_s if same else 0.0
    columns = {name: np.concatenate([np.full(len(rows), value) if np.isscalar(value) else value,
                                     getattr(timeline, name) + (shift if name.endswith("_s") else 0)])
               for name, value in new.items()}  # fmt: skip
    details = (*timeline.details, Detail(f"teacher: {text}"))
    return replace(timeline, classes=classes, streams=streams, kinds=kinds, details=details, **columns)


def _with(values: tuple[str, ...], new: str) -> tuple[str, ...]:
    return values if new in values else (*values, new)


def memory_with_teacher(curve: MemoryCurve, teacher: Teacher) -> MemoryCurve:
    """A rank's memory, the teacher's turn first; unchanged where the teacher is elsewhere."""
    if teacher.placement != "same":
        return curve

    def column(turn: float, values: Any) -> Any:
        return np.concatenate([[turn], values])

    c, weights = curve, teacher.parameter_bytes
    return MemoryCurve(
        c.rank, column(0.0, c.time_s + teacher.own_s), column(c.parameters[0], c.parameters) + weights,
        column(c.gradients[0], c.gradients), column(c.optimizer[0], c.optimizer),
        column(teacher.cache_bytes, c.activations), column(teacher.buffer_bytes, c.buffers),
    )  # fmt: skip
