"""Rules between the sizes of a layout, its model and its batch: the reader and the search ask the same ones.

A rule is a function of `Sizes` that returns None, or the key that is wrong and why. The search asks for each layout, a
hundred thousand and more, so a rule computes with integers and words its message only once it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sim.core.units import counted
from sim.inputs.program_file import read_program
from sim.inputs.rules.context import context_parallel
from sim.inputs.rules.pairs import pairs, whole_pairs
from sim.inputs.rules.sizes import Problem, Sizes
from sim.inputs.rules.sizes import found_at as _found
from sim.schedules import FORMS
from sim.variants.frameworks.records import framework_of

Rule = Callable[[Sizes], Problem | None]


def first_problem(rules: Sequence[Rule], s: Sizes) -> Problem | None:
    """The first rule broken; None where all hold."""
    for rule in rules:
        if (problem := rule(s)) is not None:
            return problem
    return None


def tensor_parallel(s: Sizes) -> Problem | None:
    """Each rank has whole heads, and equal shares of every matrix."""
    m, tp = s.model, s.tp
    attends = not {*m.attention_pattern} <= {"state_space", "none"}
    if attends and m.heads % tp:
        return _found("tp", tp, f"must divide model.heads ({m.heads})")
    if attends and m.kv_heads % tp and tp % m.kv_heads:
        return _found("tp", tp, f"must divide model.kv_heads ({m.kv_heads}) or be a multiple of them")
    more = None if m.full_attention is None else m.full_attention.heads
    if more is not None and more % tp:
        return _found("tp", tp, f"must divide model.full_attention.heads ({more})")
    own = None if m.full_attention is None else m.full_attention.kv_heads
    if own is not None and own % tp and tp % own:
        return _found("tp", tp, f"must divide model.full_attention.kv_heads ({own}) or be a multiple of them")
    if m.compressed_attention is not None and m.compressed_attention.output_groups % tp:
        groups = m.compressed_attention.output_groups
        return _found("tp", tp, f"must divide model.compressed_attention.output_groups ({groups})")
    if m.hidden % tp:
        return _found("tp", tp, f"must divide model.hidden ({m.hidden})")
    if (ngrams := m.ngram_embedding) is not None and ngrams.width // ngrams.heads % tp:
        row = ngrams.width // ngrams.heads
        return _found("tp", tp, f"must divide a row of the n-grams' table (width / heads = {row})")
    if tp > 1 and m.ffn % tp and m.has_dense_layers:
        return _found("tp", tp, f"must divide model.ffn ({m.ffn})")
    if m.moe is not None and m.moe.shared_width % tp:
        return _found("tp", tp, f"must divide the shared experts' ffn ({m.moe.shared_width})")
    if (states := m.state_space) is not None:
        if states.heads % tp:
            return _found("tp", tp, f"must divide model.state_space.heads ({states.heads})")
        if states.groups % tp and tp % states.groups:
            return _found("tp", tp, f"must divide model.state_space.groups ({states.groups}) or be a multiple of them")
    return None


def experts(s: Sizes) -> Problem | None:
    """Expert groups divide the ranks of a stage, and the experts are dealt out evenly."""
    moe, pool = s.model.moe, s.tp * s.cp * s.dp
    if moe is None:
        for key, value, off in (("ep", s.ep, 1), ("expert_tp", s.expert_tp, 1), ("ep_overlap", s.ep_overlap, False)):
            if value != off:
                return _found(key, value, "the model has no experts (model.moe)")
        return None
    if (moe.experts + s.redundant_experts) % s.ep:
        copies = f" + inference.eplb.redundant_experts ({moe.experts} + {s.redundant_experts})"
        dealt = copies if s.redundant_experts else f" ({moe.experts})"
        return _found("ep", s.ep, f"must divide model.moe.experts{dealt}")
    if pool % s.ep:
        return _found("ep", s.ep, f"must divide tp·cp·dp ({pool})")
    if pool % (s.ep * s.expert_tp):
        return _found("expert_tp", s.expert_tp, f"ep·expert_tp must divide tp·cp·dp ({pool})")
    if moe.ffn % s.expert_tp:
        return _found("expert_tp", s.expert_tp, f"must divide model.moe.ffn ({moe.ffn})")
    return None


def sharding(s: Sizes) -> Problem | None:
    """Shards of equal size cover the ranks that hold the same parameters."""
    if (s.dp * s.cp) % s.shard_size:
        return _found("shard_size", s.shard_size, f"must divide dp·cp ({s.dp * s.cp})")
    return None


def captured_layout(s: Sizes) -> Problem | None:
    """A captured program is what one rank runs: its matmuls stay whole."""
    if s.model.program is None:
        return None
    for key, value in (("tp", s.tp), ("cp", s.cp), ("ep", s.ep), ("expert_tp", s.expert_tp)):
        if value > 1:
            how = "python -m calibrate.capture --script 'train.py' --world-size N captures one with it"
            return _found(key, value, f"must be 1, because this program was captured without it; {how}")
    if s.pp > 1 and read_program(Path(s.model.program)).forward_alone:
        return _found(
            "pp", s.pp, "must be 1, because a captured forward is not cut into stages; dp runs it on more GPUs"
        )
    return None


def captured_step(s: Sizes) -> Problem | None:
    """A captured program has one micro-batch size, and recomputes what it was captured with."""
    t = s.training
    if s.model.program is None or t is None:
        return None
    for key, found, captured in (
        ("micro_batch_size", s.micro_batch_size, t.micro_batch_size),
        ("recompute", s.recompute, t.recompute.mode),
    ):
        if found != captured:
            return ("training", key), f"found {found}; {s.model.program} was captured with {captured}"
    return None


def batch(s: Sizes) -> Problem | None:
    """The batch is made of whole micro-batches, equally many on every replica."""
    if s.training is None:
        return None
    size, unit = s.training.global_batch_size, s.micro_batch_size * s.dp
    if size % unit == 0:
        return None
    below, above = size // unit * unit, -(-size // unit) * unit
    nearby = f"{below} or {above}" if below else f"{above}"
    return ("training", "global_batch_size"), (
        f"found {size}; must be a multiple of micro_batch_size·dp = "
        f"{s.micro_batch_size}·{s.dp} = {unit} (nearest: {nearby})"
    )


def loss(s: Sizes) -> Problem | None:
    """A chunk of Liger's loss needs the logits of all words, and TRL's tiles are of one rank's whole matrix."""
    t = s.training
    if s.tp == 1 or t is None or t.loss_chunks is not None or t.cross_entropy not in ("chunked", "tiled"):
        return None
    if t.cross_entropy == "tiled":
        return (
            "training",
            "cross_entropy",
        ), "found 'tiled' with parallelism.tp above 1; its tiles need the whole matrix"
    why = "found 'chunked' with parallelism.tp above 1; Liger's chunks need the whole vocabulary, loss_chunks do not"
    return ("training", "cross_entropy"), why


_ATTENTION = {"qkv", "attention_out"}


def adapters(s: Sizes) -> Problem | None:
    """Adapters are simulated on dense layers, and on attention beside frozen experts."""
    t, m = s.training, s.model
    if t is None or t.lora is None:
        return None
    if len(set(t.lora.targets)) < len(t.lora.targets):
        return ("training", "lora", "targets"), f"found {list(t.lora.targets)}; each at most once"
    if m.moe is not None and not set(t.lora.targets) <= _ATTENTION:
        why = "adapters on experts' matrices are not simulated; [qkv, attention_out] leaves experts frozen"
        return ("training", "lora", "targets"), f"found {list(t.lora.targets)}; {why}"
    if m.mla is not None and "qkv" in t.lora.targets:
        why = "latent attention's adapters are simulated on its output alone: [attention_out]"
        return ("training", "lora", "targets"), f"found {list(t.lora.targets)}; {why}"
    for what, bad in (
        ("model.block_indexer", m.block_indexer is not None),
        ("model.shared_kv_layers", m.shared_kv_layers > 0),
        ("model.mtp_layers", m.mtp_layers > 0),
        ("training.recompute selective_op", s.recompute == "selective_op"),
    ):
        if bad:
            return ("training", "lora"), f"adapters with {what} are not simulated"
    return None


def states(s: Sizes) -> Problem | None:
    """A state along the sequence is recomputed as part of its layer, not operator by operator."""
    if s.training is None or s.model.state_space is None or s.recompute != "selective_op":
        return None
    why = "found 'selective_op' with model.state_space; recomputed with the whole layer only: none, selective, full"
    return ("training", "recompute"), why


def sequence_parallel(s: Sizes) -> Problem | None:
    """Sequence parallelism cuts what a context-parallel rank has among tensor-parallel ranks."""
    if not s.sp:
        return None
    if s.tp == 1:
        return _found("sp", True, "sequence parallelism needs tp above 1")
    if s.training is not None and s.training.seq_len % (s.cp * s.tp):
        return _found("sp", True, f"cp·tp = {s.cp * s.tp} must divide training.seq_len ({s.training.seq_len})")
    return None


def expert_overlap(s: Sizes) -> Problem | None:
    """Expert communication hides in another micro-batch's computation, where a schedule pairs the two."""
    if not s.ep_overlap or s.ep == 1 or s.form.pairs:
        return None
    pairing = ", ".join(name for name, form in FORMS.items() if form.paired.pairs)
    why = f"only {pairing} (without micro_batch_group) and pp 1 pair a forward with a backward to hide it in"
    return ("parallelism", "ep_overlap"), f"found true with schedule {s.form.name} and pp {s.pp}; {why}"


def stages(s: Sizes) -> Problem | None:
    """The schedule has such a pipeline, and the model's layers fill it."""
    form, counts = s.form, s.layers_per_stage
    if s.pp > 1 and "reused" in s.model.attention_pattern:
        return _found("pp", s.pp, "keys that an earlier layer selected are not sent between stages: 1")
    for key, there in (
        ("shared_kv_layers", bool(s.model.shared_kv_layers)),
        ("layer_embedding", s.model.layer_embedding is not None),
    ):
        if s.pp > 1 and there:
            return _found("pp", s.pp, f"what layers read of earlier ones (model.{key}) is not sent between stages: 1")
    if problem := form.stages_problem(s.virtual_stages):
        return ("parallelism", "virtual_stages"), f"found {s.virtual_stages} with schedule {form.name}; {problem}"
    if problem := form.ranks_problem(s.pp):
        return ("parallelism", "pp"), f"found {s.pp} with schedule {form.name}; {problem}"
    if counts == "balanced" and s.training is None:
        return ("parallelism", "layers_per_stage"), "found 'balanced', by a training step's FLOPs; serving takes a list"
    if counts is None:
        return empty_stages(s)
    if counts == "balanced":
        return None
    if len(counts) != (number := form.model_stages(s.pp, s.virtual_stages)):
        why = f"pp {s.pp}, schedule {form.name} and virtual_stages {s.virtual_stages} make {counted(number, 'stage')}"
        return ("parallelism", "layers_per_stage"), f"found a list of {len(counts)}; {why}"
    if sum(counts) != s.model.layers:
        why = f"found {counted(sum(counts), 'layer')} in all; model.layers is {s.model.layers}"
        return ("parallelism", "layers_per_stage"), why
    return None


def empty_stages(s: Sizes) -> Problem | None:
    """Of layers that are dealt out evenly: a trainer that refuses stages which hold nothing has none; the first and the
    last may have the embedding and the output alone."""
    if s.training is None or s.model.program is not None or not framework_of(s.training).fills_stages:
        return None
    most = s.model.layers + 2 + (s.mtp_stage is not None)
    if s.pp == 1 or s.form.model_stages(s.pp, s.virtual_stages) <= most:
        return None
    why = f"framework {s.training.framework} refuses stages that hold nothing (model.layers {s.model.layers})"
    return _found("pp", s.pp, f"{why}: at most {most} stages, or layers_per_stage with zeros")


def prediction_stage(s: Sizes) -> Problem | None:
    """Modules of multi-token prediction stand where Megatron-LM lets them (core/transformer/
    pipeline_parallel_layer_layout.py, `validate_layer_layout`): behind all layers, on the last stage of a rank, not of
    the first rank, whose copy of the embedding matrix would not be synchronized."""
    k = s.mtp_stage
    if k is None:
        return None
    if s.training is None or not s.model.mtp_layers:
        return _found("mtp_stage", k, "no prediction modules are trained (model.mtp_layers): null")
    last = s.form.model_stages(s.pp, s.virtual_stages) - 1 if s.pp > 1 else 0
    if s.form.least_stages is None and s.form.stages_per_rank > 1 and k != last:
        return _found("mtp_stage", k, f"with schedule {s.form.name} the modules are on the last stage: {last} or null")
    if k > last:
        return _found("mtp_stage", k, f"the last stage is {last}")
    if k < min(last, first := last + 2 - s.pp):
        places = f"{first} to {last}" if first < last else str(last)
        return _found("mtp_stage", k, f"must be the last stage of a rank behind the first: {places}")
    if isinstance(s.layers_per_stage, tuple) and any(s.layers_per_stage[k + 1 :]):
        why = f"found layers behind stage {k}, which has the prediction modules (mtp_stage); 0 there"
        return ("parallelism", "layers_per_stage"), why
    return None


def micro_batches(s: Sizes) -> Problem | None:
    """The schedule can run this many micro-batches."""
    if s.training is None:
        return None
    m = s.training.global_batch_size // (s.micro_batch_size * s.dp)
    if (problem := s.form.micro_batches_problem(s.pp, m)) is None:
        return None
    origin = f"global_batch_size / (micro_batch_size·dp) = {counted(m, 'micro-batch')}"
    return _found("schedule", s.form.name, f"with pp {s.pp}, {origin} {problem}")


# What the mesh alone decides (the batch: for micro-batches of one sequence), and what each layout of a legal mesh does.
MESH_RULES: tuple[Rule, ...] = (
    captured_layout,
    tensor_parallel,
    experts,
    context_parallel,
    sharding,
    batch,
    loss,
    whole_pairs,
)
LAYOUT_RULES: tuple[Rule, ...] = (
    captured_step,
    sequence_parallel,
    expert_overlap,
    stages,
    prediction_stage,
    batch,
    pairs,
    micro_batches,
    adapters,
    states,
)
ALL_RULES = tuple(dict.fromkeys((*MESH_RULES, *LAYOUT_RULES)))
