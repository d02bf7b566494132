"""Rules between keys: which products of layouts, models and clusters are legal, each with its reason.

The rules of a schedule about its number of micro-batches stand with the schedule (`sim.schedules`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sim.dtypes import matmul_peak_names, sixteen_bit
from sim.inputs.input_source import Source, show
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import STAGES_PER_RANK, Parallelism
from sim.inputs.training_config import Training
from sim.inputs.workloads import Distillation, Faults, Inference, LinkFault, RequestPattern
from topology.detours import joined, left_of_cut
from topology.spec import ClusterSpec

MAX_RANKS = 10_000_000
MAX_STAGES = 1_000_000
TRAINING_ONLY = (
    "zero", "shard_size", "reshard_after_forward", "accumulate_unsharded", "schedule_memory", "dp_sync", "bucket_bytes",
    "param_gather_overlap", "tp_overlap", "ep_overlap", "p2p_overlap", "p2p_scatter",
)  # fmt: skip


class Parts(NamedTuple):
    """A scenario's sections, each checked for itself. `seq_len`: tokens of the longest sequence known."""

    model: ModelConfig
    training: Training | None
    parallelism: Parallelism
    cluster: ClusterSpec
    inference: Inference | None
    distillation: Distillation | None
    faults: Faults | None
    seq_len: int


def _product(p: Parallelism) -> str:
    return f"tp·cp·dp·pp = {p.tp}·{p.cp}·{p.dp}·{p.pp} = {p.ranks:,} ranks"


def check_size(p: Parallelism, source: Source) -> None:
    """Raise where there are more ranks or stages than can be simulated."""
    if p.ranks > MAX_RANKS:
        raise source.error(("parallelism",), f"{_product(p)}; at most {MAX_RANKS:,} can be simulated")
    if p.stages > MAX_STAGES:
        raise source.error(("parallelism",), f"makes {p.stages:,} stages; at most {MAX_STAGES:,} can be simulated")


def check_rules(parts: Parts, source: Source) -> None:
    """Raise InputError for the first rule broken."""
    _check_ranks(parts, source)
    _check_positions(parts, source)
    _check_tensor_parallel(parts.model, parts.parallelism, source)
    _check_experts(parts.model, parts.parallelism, source)
    _check_schedule(parts, source)
    _check_context_parallel(parts, source)
    _check_sharding(parts.parallelism, source)
    if parts.training is not None:
        _check_batch(parts.training, parts.parallelism, source)
        _check_dtypes(parts.training, source)
        _check_recompute(parts.training, parts.model, source)
        _check_lora(parts.training, parts, source)
        _check_loss(parts.training, parts, source)
    _check_precision(parts, source)
    if parts.inference is not None:
        _check_inference(parts.inference, source)
    if parts.distillation is not None:
        _check_distillation(parts, parts.distillation, source)
    if parts.faults is not None:
        _check_faults(parts, parts.faults, source)


def _check_ranks(parts: Parts, source: Source) -> None:
    p, cluster = parts.parallelism, parts.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    if p.ranks > gpus:
        raise source.error(
            ("cluster", "nodes"),
            f"found {cluster.nodes} nodes of {cluster.gpus_per_node} = {gpus:,} GPUs; {_product(p)} need "
            f"at least {-(-p.ranks // cluster.gpus_per_node)} nodes (or leave nodes out)",
        )


def _check_positions(parts: Parts, source: Source) -> None:
    model = parts.model
    if model.positions == "learned" and parts.seq_len > model.max_positions:
        raise source.error(
            ("model", "max_positions"),
            f"found {model.max_positions}; learned positions must cover {parts.seq_len} tokens",
        )


def _check_tensor_parallel(model: ModelConfig, p: Parallelism, source: Source) -> None:
    path = ("parallelism", "tp")
    if p.sp and p.tp == 1:
        raise source.error(("parallelism", "sp"), "found true; sequence parallelism needs tp above 1")
    if model.heads % p.tp:
        raise source.error(path, f"found {p.tp}; must divide model.heads ({model.heads})")
    if model.kv_heads % p.tp and p.tp % model.kv_heads:
        raise source.error(
            path, f"found {p.tp}; must divide model.kv_heads ({model.kv_heads}) or be a multiple of them"
        )
    if model.hidden % p.tp:
        raise source.error(path, f"found {p.tp}; must divide model.hidden ({model.hidden})")
    if (model.moe is None or model.moe.dense_layers) and model.ffn % p.tp:
        raise source.error(path, f"found {p.tp}; must divide model.ffn ({model.ffn})")
    if model.moe is not None and (model.moe.ffn * model.moe.shared_experts) % p.tp:
        raise source.error(
            path,
            f"found {p.tp}; must divide the shared experts' ffn ({model.moe.ffn * model.moe.shared_experts})",
        )


def _check_experts(model: ModelConfig, p: Parallelism, source: Source) -> None:
    if model.moe is None:
        for key in ("ep", "expert_tp"):
            if getattr(p, key) > 1:
                raise source.error(
                    ("parallelism", key), f"found {getattr(p, key)}; the model has no experts (model.moe)"
                )
        if p.ep_overlap:
            raise source.error(("parallelism", "ep_overlap"), "found true; the model has no experts (model.moe)")
        return
    moe, pool = model.moe, p.tp * p.cp * p.dp
    if moe.experts % p.ep:
        raise source.error(("parallelism", "ep"), f"found {p.ep}; must divide model.moe.experts ({moe.experts})")
    if pool % p.ep:
        raise source.error(("parallelism", "ep"), f"found {p.ep}; must divide tp·cp·dp ({pool})")
    if pool % (p.ep * p.expert_tp):
        raise source.error(
            ("parallelism", "expert_tp"), f"found {p.expert_tp}; ep·expert_tp must divide tp·cp·dp ({pool})"
        )
    if moe.ffn % p.expert_tp:
        raise source.error(("parallelism", "expert_tp"), f"found {p.expert_tp}; must divide model.moe.ffn ({moe.ffn})")
    if p.ep_overlap and p.ep > 1 and (p.pp == 1 or p.schedule not in ("dualpipe", "dualpipe_v")):
        raise source.error(
            ("parallelism", "ep_overlap"),
            f"found true with schedule {p.schedule} and pp {p.pp}; only dualpipe and dualpipe_v pair "
            "a forward with a backward to hide it in",
        )


def _check_schedule(parts: Parts, source: Source) -> None:
    p, layers = parts.parallelism, parts.model.layers
    if p.pp > 1:
        needed = STAGES_PER_RANK.get(p.schedule, 1)
        path = ("parallelism", "virtual_stages")
        if p.schedule == "interleaved_1f1b" and p.virtual_stages < 2:
            raise source.error(path, f"found {p.virtual_stages}; interleaved_1f1b needs at least 2 (1 is 1f1b)")
        if p.schedule != "interleaved_1f1b" and p.virtual_stages != needed:
            raise source.error(path, f"found {p.virtual_stages}; schedule {p.schedule} has {needed} per rank")
        if p.schedule == "dualpipe" and p.pp % 2:
            raise source.error(("parallelism", "pp"), f"found {p.pp}; dualpipe needs an even number of ranks")
    path = ("parallelism", "layers_per_stage")
    if len(p.layers_per_stage) != p.stages:
        raise source.error(
            path,
            f"found {len(p.layers_per_stage)} entries; pp {p.pp} with schedule {p.schedule} and "
            f"{p.virtual_stages} virtual stages makes {p.stages} stages",
        )
    if sum(p.layers_per_stage) != layers:
        raise source.error(path, f"found {sum(p.layers_per_stage)} layers in all; model.layers is {layers}")


def _check_context_parallel(parts: Parts, source: Source) -> None:
    p, model = parts.parallelism, parts.model
    path = ("parallelism", "cp")
    if parts.training is None:
        if p.cp > 1:
            raise source.error(path, f"found {p.cp}; inference is not split by context parallelism")
        return
    seq_len = parts.training.seq_len
    zigzag = p.cp_split == "zigzag" and p.cp_method != "all_to_all" and p.cp > 1
    pieces = 2 * p.cp if zigzag else p.cp
    if seq_len % pieces:
        reason = f"2·cp = {pieces} (zigzag split)" if zigzag else f"cp = {pieces}"
        raise source.error(path, f"found {p.cp}; {reason} must divide training.seq_len ({seq_len})")
    if p.cp_method == "all_to_all" and (model.heads // p.tp) % p.cp:
        raise source.error(
            path,
            f"found {p.cp}; cp_method all_to_all exchanges heads, so cp must divide heads/tp ({model.heads // p.tp})",
        )
    if p.sp and seq_len % (p.cp * p.tp):
        raise source.error(
            ("parallelism", "sp"),
            f"found true; cp·tp = {p.cp * p.tp} must divide training.seq_len ({seq_len})",
        )


def _check_sharding(p: Parallelism, source: Source) -> None:
    if (p.dp * p.cp) % p.shard_size:
        raise source.error(("parallelism", "shard_size"), f"found {p.shard_size}; must divide dp·cp ({p.dp * p.cp})")


def _check_batch(t: Training, p: Parallelism, source: Source) -> None:
    unit = t.micro_batch_size * p.dp
    if t.global_batch_size % unit:
        below, above = t.global_batch_size // unit * unit, -(-t.global_batch_size // unit) * unit
        nearby = f"{below} or {above}" if below else f"{above}"
        raise source.error(
            ("training", "global_batch_size"),
            f"found {t.global_batch_size}; must be a multiple of micro_batch_size·dp = "
            f"{t.micro_batch_size}·{p.dp} = {unit} (nearest: {nearby})",
        )


def _check_dtypes(t: Training, source: Source) -> None:
    allowed = tuple(dict.fromkeys((sixteen_bit(t.precision), "fp32")))
    if t.param_dtype not in allowed:
        raise source.error(
            ("training", "param_dtype"),
            f"found '{t.param_dtype}'; precision {t.precision} keeps parameters in {' or '.join(allowed)}",
        )


def _check_recompute(t: Training, model: ModelConfig, source: Source) -> None:
    path, recompute = ("training", "recompute"), t.recompute
    if recompute.layers is not None and recompute.every is not None:
        raise source.error(path, "found both layers and every; give one of the two")
    for key in ("layers", "every"):
        if getattr(recompute, key) is not None and recompute.mode != "full":
            raise source.error((*path, key), f"stands beside mode {recompute.mode}; only mode full takes it")
    if recompute.layers is not None and recompute.layers > model.layers:
        raise source.error(
            (*path, "layers"), f"found {recompute.layers}; must be at most model.layers ({model.layers})"
        )


def _check_lora(t: Training, parts: Parts, source: Source) -> None:
    """Adapters are simulated on dense layers that tensor parallelism does not split, in 16 or 32 bits."""
    if t.lora is None:
        return
    m, path = parts.model, ("training", "lora")
    if len(set(t.lora.targets)) < len(t.lora.targets):
        raise source.error((*path, "targets"), f"found {list(t.lora.targets)}; each at most once")
    for what, bad in (
        ("parallelism.tp above 1", parts.parallelism.tp > 1), ("experts", m.moe is not None),
        ("latent attention", m.mla is not None), ("model.mtp_layers", m.mtp_layers > 0),
        (f"training.precision {t.precision}", t.precision != sixteen_bit(t.precision)),
        ("training.recompute selective_op", t.recompute.mode == "selective_op"),
    ):  # fmt: skip
        if bad:
            raise source.error(path, f"found adapters with {what}; simulated without it only")


def _check_loss(t: Training, parts: Parts, source: Source) -> None:
    path, d = ("training", "cross_entropy"), parts.distillation
    if t.cross_entropy == "chunked" and parts.parallelism.tp > 1:
        raise source.error(path, "found 'chunked' with parallelism.tp above 1; chunks need the whole vocabulary")
    if t.cross_entropy == "chunked" and d is not None and d.mode == "logits":
        raise source.error(path, "found 'chunked'; distillation.mode logits needs all logits (unfused or fused)")


def _check_precision(parts: Parts, source: Source) -> None:
    section, workload = ("training", parts.training) if parts.training else ("inference", parts.inference)
    assert workload is not None
    peaks = parts.cluster.gpu.peak_flops_per_s
    for needed in (workload.precision, sixteen_bit(workload.precision)):
        if not any(name in peaks for name in matmul_peak_names(needed)):
            raise source.error(
                (section, "precision"),
                f"found '{workload.precision}'; GPU {parts.cluster.gpu.name} has no {needed} peak "
                f"(it has: {', '.join(peaks)})",
            )


def _check_inference(inference: Inference, source: Source) -> None:
    path = ("inference",)
    requests = inference.requests
    if inference.batching == "static":
        if not isinstance(requests, RequestPattern):
            raise source.error((*path, "requests"), "found a trace; static batching takes one batch of equal requests")
        if requests.rate_per_s is not None:
            raise source.error(
                (*path, "requests", "rate_per_s"),
                f"found {requests.rate_per_s:g}; a static batch starts all at once (null)",
            )
    if inference.prefix_cache != "none" and inference.kv_cache.layout != "paged":
        raise source.error(
            (*path, "prefix_cache"),
            f"found '{inference.prefix_cache}'; shared prefixes need kv_cache.layout paged",
        )


def _check_distillation(parts: Parts, distillation: Distillation, source: Source) -> None:
    path, teacher, tp = ("distillation",), distillation.teacher, distillation.teacher_parallelism.tp
    if distillation.mode == "logits" and teacher.vocab != parts.model.vocab:
        raise source.error(
            (*path, "teacher"),
            f"has a vocabulary of {teacher.vocab}; mode logits needs the student's ({parts.model.vocab})",
        )
    if teacher.positions == "learned" and parts.seq_len > teacher.max_positions:
        raise source.error(
            (*path, "teacher", "max_positions"),
            f"found {teacher.max_positions}; learned positions must cover {parts.seq_len} tokens",
        )
    for what, size in (("heads", teacher.heads), ("ffn", teacher.ffn)):
        if size % tp:
            raise source.error(
                (*path, "teacher_parallelism", "tp"), f"found {tp}; must divide the teacher's {what} ({size})"
            )
    if parts.parallelism.ranks % tp:
        raise source.error(
            (*path, "teacher_parallelism", "tp"),
            f"found {tp}; must divide the number of ranks ({parts.parallelism.ranks})",
        )


def _check_faults(parts: Parts, faults: Faults, source: Source) -> None:
    ranks, nodes = parts.parallelism.ranks, parts.cluster.nodes
    for index, straggler in enumerate(faults.stragglers):
        if straggler.rank >= ranks:
            raise source.error(
                ("faults", "stragglers", index, "rank"),
                f"found {straggler.rank}; must be below the number of ranks ({ranks})",
            )
    for index, link in enumerate(faults.links):
        for place, name in enumerate(link.between):
            match = re.fullmatch(r"node([0-9]{1,9})", name)
            if match is None or int(match[1]) >= nodes:
                raise source.error(
                    ("faults", "links", index, "between", place),
                    f"found {show(name)}; the cluster has node0 to node{nodes - 1}",
                )
        if link.bandwidth_scale == 0:
            _check_cut(parts.cluster, index, link, source)


def _check_cut(cluster: ClusterSpec, index: int, link: LinkFault, source: Source) -> None:
    """A cut link must have a detour."""
    a, b = sorted(int(name.removeprefix("node")) for name in link.between)
    if left_of_cut(cluster, a, b) == 0:
        where = f"inside node{a}" if a == b else f"between node{a} and node{b}"
        far = cluster.inter_node.kind == "torus" and not joined(cluster, a, b)
        why = "no link joins them (only neighbours)" if far and a != b else "there is no other way"
        raise source.error(
            ("faults", "links", index, "bandwidth_scale"), f"found 0: {where} {why}; must be above 0 there"
        )


def notes(parts: Parts) -> tuple[str, ...]:
    """What is legal but worth saying: the padded vocabulary, keys that have no effect here."""
    model, p = parts.model, parts.parallelism
    found: list[str] = []
    padded = model.padded_vocab(p.tp)
    if padded != model.vocab:
        found.append(f"model.vocab: {model.vocab} is padded to {padded}, a multiple of 128·tp")
    if not p.reshard_after_forward and p.zero != 3:
        found.append(f"parallelism.reshard_after_forward: of no effect with zero {p.zero}, only with 3")
    if p.accumulate_unsharded and p.zero < 2:
        found.append(f"parallelism.accumulate_unsharded: of no effect with zero {p.zero}, only with 2 and 3")
    if "schedule_memory" in p.model_fields_set and p.schedule_memory != 1.0 and p.schedule != "zb_search":
        found.append(f"parallelism.schedule_memory: of no effect with schedule {p.schedule}, only with zb_search")
    if parts.training is None:
        usual = Parallelism(dp=p.dp, cp=p.cp, schedule=p.schedule)
        changed = (key for key in TRAINING_ONLY if getattr(p, key) != getattr(usual, key))
        found += (f"parallelism.{key}: of no effect on serving" for key in changed)
    if p.ep_overlap and p.ep == 1:
        found.append("parallelism.ep_overlap: of no effect with ep 1")
    return tuple(found)
