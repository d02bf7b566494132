"""Rules between keys: which products of layouts, models and clusters are legal, each with its reason.

Those of a layout's sizes are in `sim.inputs.layout_rules`, which the search asks too.
"""

from __future__ import annotations

import re
from itertools import product

from sim.core.dtypes import matmul_peak_names, sixteen_bit
from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.layout_rules import ALL_RULES, batch, first_problem, micro_batches
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.sections import Sections, sizes_of
from sim.inputs.serving_rules import check_serving
from sim.inputs.training_config import Packing, Recompute, Training
from sim.inputs.workloads import Distillation, Faults, LinkFault
from sim.models.frameworks import framework_of
from sim.models.recipes import recipe_of
from sim.schedules import FORMS
from topology.detours import joined, left_of_cut
from topology.spec import ClusterSpec

MAX_RANKS = 10_000_000
MAX_STAGES = 1_000_000
TRAINING_ONLY = (
    "zero",
    "shard_size",
    "reshard_after_forward",
    "accumulate_unsharded",
    "schedule_memory",
    "dp_sync",
    "bucket_bytes",
    "param_gather_overlap",
    "param_gather_dtype",
    "tp_overlap",
    "ep_overlap",
    "p2p_overlap",
    "p2p_scatter",
)


def _product(p: Parallelism) -> str:
    return f"tp·cp·dp·pp = {p.tp}·{p.cp}·{p.dp}·{p.pp} = {p.ranks:,} ranks"


def check_size(p: Parallelism, source: Source) -> None:
    """Raise where there are more ranks or stages than can be simulated."""
    if p.ranks > MAX_RANKS:
        raise source.error(("parallelism",), f"{_product(p)}; at most {MAX_RANKS:,} can be simulated")
    if p.stages > MAX_STAGES:
        raise source.error(("parallelism",), f"makes {p.stages:,} stages; at most {MAX_STAGES:,} can be simulated")


def check_rules(sections: Sections, source: Source) -> None:
    """Raise InputError for the first rule broken."""
    _check_ranks(sections, source)
    _check_program(sections, source)
    _check_positions(sections, source)
    if problem := first_problem(ALL_RULES, sizes_of(sections)):
        raise source.error(*problem)
    p = sections.parallelism
    if p.dp_sync == "reduce_broadcast" and p.zero > 0:
        why = f"needs whole gradients on every rank (zero 0, found {p.zero})"
        raise source.error(("parallelism", "dp_sync"), f"found 'reduce_broadcast'; {why}")
    if sections.training is not None:
        _check_dtypes(sections.training, source)
        _check_indexer(sections.training, sections.model, p, source)
        _check_packing(sections, sections.training, source)
        _check_recipe(sections.training, source)
        _check_gathers(sections.parallelism, sections.training, source)
        _check_muon(sections, sections.training, source)
        if sections.training.optimizer_offload and sections.model.program is not None:
            raise source.error(("training", "optimizer_offload"), "found true; a captured program's states stay")
        _check_four_bits(sections, sections.training, source)
        _check_frozen_experts(sections, sections.training, source)
        _check_recompute(sections.training, sections.model, source)
        _check_loss(sections.training, sections, source)
        _check_batches(sections.training, sections, source)
    _check_precision(sections, source)
    _check_mixed(sections, source)
    if sections.inference is not None:
        check_serving(sections, sections.inference, source)
    if sections.distillation is not None:
        _check_distillation(sections, sections.distillation, source)
    if sections.faults is not None:
        _check_faults(sections, sections.faults, source)


def _check_ranks(sections: Sections, source: Source) -> None:
    p, cluster = sections.parallelism, sections.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    if p.ranks > gpus:
        raise source.error(
            ("cluster", "nodes"),
            f"found {cluster.nodes} nodes of {cluster.gpus_per_node} = {gpus:,} GPUs; {_product(p)} need "
            f"at least {-(-p.ranks // cluster.gpus_per_node)} nodes (or leave nodes out)",
        )


def _check_program(sections: Sections, source: Source) -> None:
    """A captured program is a training step, and neither teacher nor student."""
    d = sections.distillation
    if d is not None and d.teacher.program is not None:
        raise source.error(
            ("distillation", "teacher", "program"), "a teacher cannot be a captured program; describe its model"
        )
    if sections.model.program is None:
        return
    for key, section in (("inference", sections.inference), ("distillation", d)):
        if section is not None:
            raise source.error((key,), "cannot be given with model.program; a captured program is a training step only")


def _check_positions(sections: Sections, source: Source) -> None:
    model = sections.model
    if model.positions == "learned" and sections.seq_len > model.max_positions:
        raise source.error(
            ("model", "max_positions"),
            f"found {model.max_positions}; learned positions must cover {sections.seq_len} tokens",
        )


def _check_frozen_experts(sections: Sections, t: Training, source: Source) -> None:
    """Experts without gradients are whole on their rank."""
    zero = sections.parallelism.zero
    if t.lora is not None and sections.model.moe is not None and zero == 3:
        raise source.error(("parallelism", "zero"), f"found {zero}; frozen experts are simulated whole: zero below 3")


def _check_four_bits(sections: Sections, t: Training, source: Source) -> None:
    """Frozen weights in 4 bits are whole on a rank, and multiplied in 16."""
    if t.lora is None or t.lora.weights is None:
        return
    path, zero = ("training", "lora", "weights"), sections.parallelism.zero
    if zero == 3:
        raise source.error(path, f"found '{t.lora.weights}'; 4-bit weights are simulated whole: zero below 3")
    if sections.model.moe is not None:
        raise source.error(path, f"found '{t.lora.weights}'; experts are simulated in 16 bits only")
    if sixteen_bit(t.precision) != t.precision:
        raise source.error(path, f"found '{t.lora.weights}'; precision {t.precision} multiplies in 8 bits or less")


def _check_muon(sections: Sections, t: Training, source: Source) -> None:
    """Muon's matrices and their gradients are whole on a rank."""
    if t.optimizer != "muon":
        return
    zero = sections.parallelism.zero
    if zero >= 2:
        why = "Muon needs a matrix's whole gradient: zero 0 or 1"
        raise source.error(("parallelism", "zero"), f"found {zero}; {why}")
    if t.lora is not None:
        raise source.error(("training", "optimizer"), "found 'muon'; adapters are simulated with adamw and sgd")
    if sections.model.program is not None:
        raise source.error(("training", "optimizer"), "found 'muon'; a captured program has its own optimizer")


def _check_dtypes(t: Training, source: Source) -> None:
    allowed = tuple(dict.fromkeys((sixteen_bit(t.precision), "fp32")))
    if t.param_dtype not in allowed:
        raise source.error(
            ("training", "param_dtype"),
            f"found '{t.param_dtype}'; precision {t.precision} keeps parameters in {' or '.join(allowed)}",
        )


def _check_indexer(t: Training, model: ModelConfig, p: Parallelism, source: Source) -> None:
    """Raise for a training of indexers that the model lacks, and for a warm-up that is not simulated."""
    if t.indexer == "trained":
        return
    path, found = ("training", "indexer"), f"found '{t.indexer}'"
    if model.indexer is None:
        raise source.error(path, f"{found}; needs model.indexer")
    if t.indexer == "warm_up" and (p.pp > 1 or framework_of(t).masks_unselected):
        why = "simulated only at pp 1 (stages would exchange no gradients) and in frameworks that train indexers"
        raise source.error(path, f"{found}; {why}")


def _check_packing(sections: Sections, t: Training, source: Source) -> None:
    """Raise for documents longer than a sequence, and for attention that cannot skip pairs between documents."""
    x, m, p = t.packing, sections.model, sections.parallelism
    if x is None:
        return
    path = ("training", "packing")
    if bool(x.lengths) == (x.mean_seq_len is not None):
        raise source.error(path, "needs either lengths, or mean_seq_len to draw lengths from")
    if sum(x.lengths) > t.seq_len:
        raise source.error(
            (*path, "lengths"), f"found {sum(x.lengths)} tokens in all; a sequence has {t.seq_len} (training.seq_len)"
        )
    longest = min(t.seq_len, x.max_seq_len or t.seq_len)
    if x.min_seq_len > longest:
        raise source.error(
            (*path, "min_seq_len"), f"found {x.min_seq_len}; must be at most {longest}, the longest document"
        )
    if x.mean_seq_len is not None and not x.min_seq_len <= x.mean_seq_len <= longest:
        allowed = f"between the shortest document ({x.min_seq_len}) and the longest ({longest})"
        found = f"found {x.mean_seq_len:g}; must lie {allowed}"
        raise source.error((*path, "mean_seq_len"), found)
    if x.mean_seq_len is not None:
        _check_drawn(x, t, source)
    for bad, what in (
        (m.program is not None, "a captured program, whose attention is replayed as it was"),
        (m.indexer is not None, "model.indexer"),
        (
            t.attention == "unfused",
            "unfused attention (training.attention), which also computes scores between documents",
        ),
        (
            p.cp > 1 and m.window is not None and p.cp_method != "all_to_all",
            "model.window and cp, unless cp_method is all_to_all",
        ),
    ):
        if bad:
            raise source.error(path, f"packed documents are not simulated with {what}")


def _check_drawn(x: Packing, t: Training, source: Source) -> None:
    """Raise for more documents than can be drawn in seconds."""
    from sim.models.packing import MOST_DOCUMENTS, expected_tokens  # with numpy, which no other reader needs

    tokens = expected_tokens(x, t.seq_len)
    if t.global_batch_size * t.seq_len / tokens > MOST_DOCUMENTS:
        found = (
            f"found {x.mean_seq_len:g} with lognormal_sigma {x.lognormal_sigma:g}; clipped to the allowed lengths, "
            f"the documents have {tokens:.3g} tokens on average"
        )
        most = f"at most {MOST_DOCUMENTS:,} documents are drawn for a step; give lengths or a smaller lognormal_sigma"
        raise source.error(("training", "packing", "mean_seq_len"), f"{found}; {most}")


def _packing_note(sections: Sections) -> list[str]:
    """How full the packed sequences are, and how uneven the replicas' work is."""
    t, dp = sections.training, sections.parallelism.dp
    if t is None or t.packing is None:
        return []
    from sim.models.packing import pack  # numpy draws them, which no other reader of scenarios needs

    batch = pack(t.packing, t.seq_len, t.global_batch_size, dp)
    number = sum(n for _, n in batch.all_documents)
    found = (
        f"training.packing: each sequence holds {number:.1f} documents on average, which fill {batch.filled:.1%} of it"
    )
    if (given := t.packing.mean_seq_len) is not None:
        mean = batch.filled * t.seq_len / number
        found += f"; a document has {mean:.0f} tokens on average, against {given:g} before lengths are clipped or cut"
    if batch.imbalance > 1.0:
        found += f"; the slowest of {dp} replicas has {batch.imbalance:.3f} times the mean number of query-key pairs"
    return [found]


def _check_modules(recompute: Recompute, model: ModelConfig, source: Source) -> None:
    """Parts that are run again are there, and stand beside the one mode that takes them."""
    path, modules = ("training", "recompute", "modules"), recompute.modules
    usual = Recompute.model_fields["modules"].default  # which resolved scenarios write out for every mode
    if modules != usual and recompute.mode != "selective":
        raise source.error(path, f"cannot be given with mode {recompute.mode}; only mode selective takes it")
    if len(set(modules)) < len(modules):
        raise source.error(path, f"found {list(modules)}; each at most once")
    shared = model.moe is not None and model.moe.shared_width > 0
    for name, there, needed in (
        ("moe", model.moe is not None, "model.moe"),
        ("moe_act", model.moe is not None, "model.moe"),
        ("shared_experts", shared, "shared experts in model.moe"),
        ("mla_up_proj", model.mla is not None, "model.mla"),
        ("mlp", model.has_dense_layers, "layers with a dense MLP"),
    ):
        if name in modules and not there:
            raise source.error(path, f"found '{name}'; needs {needed}")


def _check_recompute(t: Training, model: ModelConfig, source: Source) -> None:
    path, recompute = ("training", "recompute"), t.recompute
    if recompute.layers is not None and recompute.every is not None:
        raise source.error(path, "found both layers and every; give one of the two")
    for key in ("layers", "every"):
        if getattr(recompute, key) is not None and recompute.mode != "full":
            raise source.error((*path, key), f"cannot be given with mode {recompute.mode}; only mode full takes it")
    _check_modules(recompute, model, source)
    if recompute.layers is not None and recompute.layers > model.layers:
        raise source.error(
            (*path, "layers"), f"found {recompute.layers}; must be at most model.layers ({model.layers})"
        )


def _check_loss(t: Training, sections: Sections, source: Source) -> None:
    path, d = ("training", "cross_entropy"), sections.distillation
    if t.cross_entropy == "chunked" and d is not None and d.mode == "logits":
        raise source.error(path, "found 'chunked'; distillation.mode logits needs all logits (unfused or fused)")


def _check_batches(t: Training, sections: Sections, source: Source) -> None:
    """A schedule of batches starts with the first token, grows in tokens to less than all, and every batch is legal."""
    path, schedule = ("training", "batch_schedule"), t.batch_schedule
    if not schedule:
        return
    if t.tokens is None:
        raise source.error(path, "found phases without training.tokens, which says where the last one ends")
    starts = [phase.from_tokens for phase in schedule]
    if starts[0] != 0:
        raise source.error((*path, 0, "from_tokens"), f"found {starts[0]:g}; the first phase starts at 0")
    for i, (before, start) in enumerate(zip(starts, [*starts[1:], t.tokens], strict=True), 1):
        if start <= before:
            where = (*path, i, "from_tokens") if i < len(starts) else ("training", "tokens")
            raise source.error(where, f"found {start:g}; must be above {before:g}, where the phase before starts")
    for i, phase in enumerate(schedule):
        changed = t.model_copy(update={"global_batch_size": phase.global_batch_size})
        if problem := first_problem((batch, micro_batches), sizes_of(sections._replace(training=changed))):
            raise source.error((*path, i, "global_batch_size"), problem[1])


def _check_precision(sections: Sections, source: Source) -> None:
    section, workload = ("training", sections.training) if sections.training else ("inference", sections.inference)
    assert workload is not None
    for gpu, needed in product(sections.cluster.gpus, (workload.precision, sixteen_bit(workload.precision))):
        peaks = gpu.peak_flops_per_s
        if not any(name in peaks for name in matmul_peak_names(needed)):
            raise source.error(
                (section, "precision"),
                f"found '{workload.precision}'; GPU {gpu.name} has no {needed} peak (it has: {', '.join(peaks)})",
            )


def _check_recipe(t: Training, source: Source) -> None:
    """Raise for a recipe that the framework does not have for the precision."""
    try:
        recipe_of(t)
    except InputError as error:
        raise source.error(("training", "fp8_recipe"), str(error)) from None


def _check_gathers(p: Parallelism, t: Training, source: Source) -> None:
    """Parameters are gathered in the 16 bits that they are used in, or in fp8 where a recipe casts shards."""
    recipe = None if t.lora is not None else recipe_of(t)
    in_8_bits = p.zero == 3 and recipe is not None and recipe.shards_quantized
    path, used = ("parallelism", "param_gather_dtype"), sixteen_bit(t.precision)
    if p.param_gather_dtype == "fp8" and not in_8_bits:
        raise source.error(path, "found 'fp8'; needs zero 3, precision fp8, torchao's recipe tensorwise and no lora")
    if p.param_gather_dtype == "bf16" and used != "bf16":
        raise source.error(path, f"found 'bf16'; with precision {t.precision} parameters are used in {used}")


def _check_mixed(sections: Sections, source: Source) -> None:
    """Serving and a teacher are priced on one sort of GPU."""
    names = " and ".join(gpu.name for gpu in sections.cluster.gpus)
    if len(sections.cluster.gpus) > 1 and sections.inference is not None:
        raise source.error(("cluster",), f"has GPUs of several kinds, {names}; requests are served on one kind")
    if len(sections.cluster.gpus) > 1 and sections.distillation is not None:
        raise source.error(("cluster",), f"has GPUs of several kinds, {names}; a teacher is priced on one kind")


def _check_distillation(sections: Sections, distillation: Distillation, source: Source) -> None:
    path, teacher, tp = ("distillation",), distillation.teacher, distillation.teacher_parallelism.tp
    if distillation.mode == "logits" and teacher.vocab != sections.model.vocab:
        raise source.error(
            (*path, "teacher"),
            f"has a vocabulary of {teacher.vocab}; mode logits needs the student's ({sections.model.vocab})",
        )
    if teacher.positions == "learned" and sections.seq_len > teacher.max_positions:
        raise source.error(
            (*path, "teacher", "max_positions"),
            f"found {teacher.max_positions}; learned positions must cover {sections.seq_len} tokens",
        )
    for what, size in (("heads", teacher.heads), ("ffn", teacher.ffn)):
        if size % tp:
            raise source.error(
                (*path, "teacher_parallelism", "tp"), f"found {tp}; must divide the teacher's {what} ({size})"
            )
    if sections.parallelism.ranks % tp:
        raise source.error(
            (*path, "teacher_parallelism", "tp"),
            f"found {tp}; must divide the number of ranks ({sections.parallelism.ranks})",
        )


def _check_faults(sections: Sections, faults: Faults, source: Source) -> None:
    ranks, nodes = sections.parallelism.ranks, sections.cluster.nodes
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
            _check_cut(sections.cluster, index, link, source)
    for index, fault in enumerate(faults.nics):
        match = re.fullmatch(r"node([0-9]{1,9})", fault.node)
        if match is None or int(match[1]) >= nodes:
            known = f"the cluster has node0 to node{nodes - 1}"
            raise source.error(("faults", "nics", index, "node"), f"found {show(fault.node)}; {known}")
        nics = sections.cluster.inter_node.nics_per_node
        if fault.nic is not None and fault.nic >= nics:
            raise source.error(("faults", "nics", index, "nic"), f"found {fault.nic}; a node has NICs 0 to {nics - 1}")


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


def _expert_split_note(sections: Sections) -> list[str]:
    """Frameworks split experts as they do all else unless told otherwise (Megatron's
    `--expert-tensor-parallel-size`, by default the tensor-parallel size)."""
    p, t = sections.parallelism, sections.training
    unsaid = p.tp > 1 and "expert_tp" not in p.model_fields_set and sections.model.moe is not None
    if unsaid and t is None and p.ep == 1:
        split = (
            f"expert_tp: {p.tp} splits each expert (default of vLLM, SGLang, TensorRT-LLM), ep: {p.tp} distributes them"
        )
        return [f"parallelism.tp: each of {p.tp} ranks holds all experts; {split}"]
    if not unsaid or t is None or not framework_of(t).splits_experts_over_tp:
        return []
    return [f"parallelism.expert_tp: 1, as nothing is said; framework {t.framework}'s own default is tp, {p.tp}"]


def notes(sections: Sections) -> tuple[str, ...]:
    """What is legal but worth saying: the padded vocabulary, keys that have no effect here."""
    model, p = sections.model, sections.parallelism
    found: list[str] = []
    padded = model.padded_vocab(p.tp)
    if padded != model.vocab and model.program is None:
        found.append(f"model.vocab: {model.vocab} is padded to {padded}, a multiple of 128·tp")
    if not p.reshard_after_forward and p.zero != 3:
        found.append(f"parallelism.reshard_after_forward: of no effect with zero {p.zero}, only with 3")
    if p.accumulate_unsharded and p.zero < 2:
        found.append(f"parallelism.accumulate_unsharded: of no effect with zero {p.zero}, only with 2 and 3")
    found += _expert_split_note(sections)
    found += _packing_note(sections)
    if "schedule_memory" in p.model_fields_set and p.schedule_memory != 1.0 and not FORMS[p.schedule].follows_times:
        only = ", ".join(name for name, form in FORMS.items() if form.follows_times)
        found.append(f"parallelism.schedule_memory: of no effect with schedule {p.schedule}, only with {only}")
    if p.param_gather_dtype is not None and p.zero == 0:
        found.append("parallelism.param_gather_dtype: of no effect with zero 0, which gathers no parameters")
    if p.micro_batch_group is not None and FORMS[p.schedule].in_groups_of is None:
        only = ", ".join(name for name, form in FORMS.items() if form.in_groups_of is not None)
        found.append(f"parallelism.micro_batch_group: of no effect with schedule {p.schedule}, only with {only}")
    t = sections.training
    if t is not None and t.optimizer_dtype != "fp32" and t.optimizer == "sgd":
        found.append(f"training.optimizer_dtype: of no effect with optimizer {t.optimizer}, which has no moments")
    if t is not None and t.zero_grad == "keep" and model.program is not None:
        found.append("training.zero_grad: of no effect with a captured program, whose gradients come and go as it ran")
    if t is not None and t.master_weights is False and t.param_dtype == "fp32":
        found.append("training.master_weights: of no effect with param_dtype fp32, which has no master copy")
    if sections.training is None:
        usual = Parallelism(dp=p.dp, cp=p.cp, schedule=p.schedule)
        changed = (key for key in TRAINING_ONLY if getattr(p, key) != getattr(usual, key))
        found += (f"parallelism.{key}: of no effect on serving" for key in changed)
    i = sections.inference
    if i is not None and i.disaggregated is None and p.dp == 1 and i.router != "round_robin":
        found.append("inference.router: of no effect with dp 1, which is one replica")
    if p.ep_overlap and p.ep == 1:
        found.append("parallelism.ep_overlap: of no effect with ep 1")
    return tuple(found)
