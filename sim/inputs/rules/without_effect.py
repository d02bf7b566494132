"""Keys that a scenario sets and that change nothing in it: one record for each key, with what takes its effect away.

A key is named only where its user wrote it with a value other than the one that it has when it is left out. Most lose
their effect to a degree of 1: nothing is sent where there is nobody to send it to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct

from sim.inputs.layout_defaults import with_defaults
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.inputs.zero_keys import sums_apart
from sim.schedules import FORMS, ScheduleForm
from sim.variants.dispatchers import DISPATCHERS
from sim.variants.frameworks.megatron import ROUTERS
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import ADAMW, OPTIMIZERS
from topology.spec import ClusterSpec

# Keys that decide how serving runs.
_LAID_OUT = {
    "dp",
    "tp",
    "sp",
    "cp",
    "cp_method",
    "cp_method_by_layer",
    "hierarchical_context_parallel_sizes",
    "cp_split",
    "ep",
    "expert_tp",
    "rank_order",
}
SERVED = _LAID_OUT | {"pp", "layers_per_stage", "ep_dispatch_dtype"}
SET_BY_ENGINES = {"ep_dispatch_dtype"}  # where a serving workload leaves it out; see sim.inputs.notes


class Layout(Protocol):
    """The sections that decide whether a key has an effect: those of a scenario, or of `Sections` while one is read."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def training(self) -> Training | None: ...

    @property
    def parallelism(self) -> Parallelism: ...

    @property
    def cluster(self) -> ClusterSpec: ...


class Idle(Struct, frozen=True):
    """Hold a key of `parallelism` or `training`, and `why` it changes nothing in a scenario: words such as `with tp 1`,
    or none where it has an effect."""

    key: str
    why: Callable[[Layout], str]


def idle_keys(scenario: Layout) -> set[tuple[str, str]]:
    """Return section and name of each key of `parallelism` that changes nothing in a training step, whatever it is."""
    return {("parallelism", record.key) for record in OF_PARALLELISM if record.why(scenario)}


def keys_without_effect(sections: Sections, written: Parallelism) -> Iterator[str]:
    """Return a note for each key that the scenario sets without any effect; for serving, only for keys that serving
    reads.

    `written`: the section as the user wrote it, before defaults that follow from other sections are filled in.
    """
    t, keys = sections.training, written.model_fields_set
    in_effect = _without(written, "zero") if _shards_nothing(sections) else written
    for record in OF_PARALLELISM:
        read = t is not None or record.key in SERVED - SET_BY_ENGINES
        if read and record.key in keys and (why := record.why(sections)):
            left_out = with_defaults(_without(in_effect, record.key), sections.model, t)
            if getattr(written, record.key) != getattr(left_out, record.key):
                yield f"parallelism.{record.key}: of no effect {why}"
    if t is None:
        return
    for record in OF_TRAINING:
        field = Training.model_fields[record.key]
        left_out = field.get_default(call_default_factory=True, validated_data=dict(t))
        if getattr(t, record.key) != left_out and (why := record.why(sections)):
            yield f"training.{record.key}: of no effect {why}"


def with_zero_in_effect(sections: Sections, written: Parallelism) -> Parallelism:
    """Return the layout as it is without a ZeRO stage that shards nothing, as much else follows from the stage."""
    if not _shards_nothing(sections):
        return sections.parallelism
    return with_defaults(_without(written, "zero"), sections.model, sections.training)


def _shards_nothing(s: Layout) -> bool:
    return s.parallelism.zero > 0 and bool(_zero(s))


def _without(written: Parallelism, key: str) -> Parallelism:
    return Parallelism(**{name: getattr(written, name) for name in written.model_fields_set if name != key})


def _with_one(degree: str) -> Callable[[Layout], str]:
    """Make the rule for keys on how the ranks of one degree work together: without effect where the degree is 1."""
    return lambda s: f"with {degree} 1" if getattr(s.parallelism, degree) == 1 else ""


def _alone(s: Layout) -> str:
    """Tell why keys of data-parallel synchronization have no effect: no two ranks hold the same parameters."""
    return "" if s.parallelism.replicates(s.model.may_have_experts) else "with dp 1 and cp 1"


def _zero(s: Layout) -> str:
    """Tell why the ZeRO stage has no effect: one rank shards nothing. With one rank DeepSpeed's engine still has
    buffers, though, and FSDP still casts and keeps its shard in host memory."""
    t = s.training
    if t is None or not (why := _alone(s)):
        return ""
    framework = framework_of(t)
    casts = t.param_dtype == "fp32" and t.precision != "fp32"
    return "" if framework.zero.buffers or casts or t.parameter_offload else why


def _only_with_zero(*stages: int) -> Callable[[Layout], str]:
    """Make the rule for keys of some ZeRO stages: without effect at another stage, and where no two ranks share
    states."""
    names = " and ".join(map(str, stages)).replace(" and ", ", ", len(stages) - 2)
    return lambda s: f"with zero {z}, only with {names}" if (z := s.parallelism.zero) not in stages else _alone(s)


def _fsdp_version(s: Layout) -> str:
    t, named = s.training, s.parallelism.fsdp_version
    as_usual = t is not None and named in (None, framework_of(t).zero.fsdp_version)
    return _only_with_zero(2, 3)(s) or (
        f"with framework {t.framework}, which has that FSDP anyhow" if as_usual and t else ""
    )


def _backward_prefetch(s: Layout) -> str:
    """Say why `backward_prefetch` has no effect: the backward gathers nothing, or nothing runs beside its gathers."""
    p = s.parallelism
    if (why := _only_with_zero(3)(s)) or not p.reshard_after_forward:
        return why or "with reshard_after_forward false, where no backward gathers"
    return "with dp_sync after_backward, where nothing overlaps" if p.dp_sync == "after_backward" else ""


def _pairs_nothing(s: Layout) -> str:
    return _with_one("ep")(s) or ("" if s.parallelism.ep_overlap else "without ep_overlap")


def _cp_split(s: Layout) -> str:
    whole = s.parallelism.cp > 1 and s.parallelism.cp_methods == {"all_to_all"}
    return "with cp_method all_to_all, which attends to whole sequences" if whole else _with_one("cp")(s)


def _on_one_node(s: Layout) -> str:
    return _alone(s) or ("on one node" if s.parallelism.ranks <= s.cluster.gpus_per_node else "")


def _rings_nothing(s: Layout) -> str:
    rings = "all_to_all_ring" in s.parallelism.cp_methods
    return _with_one("cp")(s) or ("" if rings else "without cp_method all_to_all_ring")


def _by_layer(s: Layout) -> bool:
    """Tell whether gradients are reduced layer by layer, whatever the size of buckets."""
    return s.training is not None and s.parallelism.zero == 3 and not framework_of(s.training).zero.buckets_shards


def _at_once(s: Layout) -> str:
    """Tell why sizes of gradient messages have no effect: the framework reduces all gradients in one message."""
    z, t = s.parallelism.zero, s.training
    whole = t is not None and z in framework_of(t).zero.at_once_at
    return f"with framework {t.framework}, which reduces all gradients at once with zero {z}" if t and whole else ""


def _dp_sync(s: Layout) -> str:
    if (why := _alone(s)) or s.parallelism.dp_sync != "per_parameter":
        return why
    return "with zero 3, which reduces layer by layer" if _by_layer(s) else _at_once(s)


def _bucket_bytes(s: Layout) -> str:
    if why := _alone(s) or _at_once(s):
        return why
    if s.training is None or framework_of(s.training).zero.buffers:  # whose buckets take memory in any case
        return ""
    if _by_layer(s):
        return "with zero 3, which reduces layer by layer"
    sync = s.parallelism.dp_sync
    return "" if sync == "bucketed" else f"with dp_sync {sync}, only with bucketed"


def _attention_kernel(s: Layout) -> str:
    return "with attention unfused" if s.training is not None and s.training.attention == "unfused" else ""


def _accumulate_unsharded(s: Layout) -> str:
    p, t = s.parallelism, s.training
    if (why := _only_with_zero(2, 3)(s)) or t is None or p.pp > 1 or p.accumulate_in_a_row:  # which it takes away
        return why
    alone = t.global_batch_size == t.micro_batch_size * p.dp  # see `Scenario.sums_unsharded`
    return "with one micro-batch a step, whose backward reduces each layer's gradients" if alone else ""


def _accumulate_in_a_row(s: Layout) -> str:
    p = s.parallelism
    if p.zero >= 2 and not p.accumulate_unsharded:
        return _alone(s)
    return "but with zero 2 or 3, without accumulate_unsharded"


def _all_reduce_once(s: Layout) -> str:
    p, t = s.parallelism, s.training
    if why := _only_with_zero(2, 3)(s):
        return why
    if p.accumulate_unsharded:
        return "with accumulate_unsharded, which reduces once a step"
    if p.sharded_over[0] == p.dp * p.cp:
        return f"with shard_size {p.shard_size}, as shards have no replicas"
    if t is not None and p.zero in framework_of(t).zero.all_reduced_at:
        return f"with framework {t.framework}, which all-reduces whole gradients with zero {p.zero}"
    return ""


def _only_with_schedules(able: Callable[[ScheduleForm], bool]) -> Callable[[Layout], str]:
    """Make the reason for keys that only some schedules read (`able`)."""
    names = ", ".join(name for name, form in FORMS.items() if able(form))

    def why(s: Layout) -> str:
        schedule = s.parallelism.schedule
        return f"with schedule {schedule}, only with {names}" if not able(FORMS[schedule]) else _with_one("pp")(s)

    return why


def _p2p_scatter(s: Layout) -> str:
    p = s.parallelism
    if p.sp:
        return "with sp, which has split a stage's input already"
    return f"with tp {p.tp} and pp {p.pp}" if p.tp == 1 or p.pp == 1 else ""


def _rank_order(s: Layout) -> str:
    p = s.parallelism
    return "with one degree above 1 of tp, cp, dp and pp" if sum(n > 1 for n in (p.tp, p.cp, p.dp, p.pp)) < 2 else ""


def _gathers_nothing(s: Layout) -> str:
    return "with zero 0, which gathers no parameters" if s.parallelism.zero == 0 else _alone(s)


def _no_moments(s: Layout) -> str:
    t = s.training
    none = t is not None and not OPTIMIZERS[t.optimizer].moments
    return f"with optimizer {t.optimizer}, which has no moments" if t and none else _on_host(s)


def _no_adamw(s: Layout) -> str:
    t = s.training
    if t is not None and not {t.optimizer, OPTIMIZERS[t.optimizer].others_by} & {ADAMW.name}:
        return f"with optimizer {t.optimizer}"
    if t is not None and t.optimizer_dtype == "int8":
        return "with optimizer_dtype int8, which has a kernel of its own"
    return "with optimizer_offload cpu, where the host updates parameters" if _on_host(s) else ""


def _on_host(s: Layout) -> str:
    host = s.training is not None and s.training.optimizer_offload == "cpu"
    return "with optimizer_offload cpu, where the host keeps all states in fp32" if host else ""


def _reduces_nothing(s: Layout) -> str:
    """Tell why the dtype of summed gradients has no effect: no ranks sum any (replicas, both copies of DualPipe,
    stages of a pipeline that hold the embedding)."""
    of_embedding = s.model.tied_embeddings or s.model.mtp_layers > 0
    several = of_embedding or FORMS[s.parallelism.schedule].model_copies > 1
    return "" if s.parallelism.pp > 1 and several else _alone(s)


def _fused_sums(s: Layout) -> str:
    apart = s.training is not None and sums_apart(s.training, s.parallelism)
    return f"with zero {s.parallelism.zero}, as this FSDP has no such fusion" if apart else ""


def _own_router(s: Layout) -> str:
    t = s.training
    own = t is not None and ROUTERS.get(bool(t.moe_router_fusion)) == framework_of(t).router
    return f"with framework {t.framework}, whose router is so" if t is not None and own else ""


def _no_rope(s: Layout) -> str:
    return "" if s.model.positions == "rope" else f"with model.positions {s.model.positions}"


def _adds_residual_alone(s: Layout) -> str:
    """One kernel either way (`elementwise.residual`)."""
    m = s.model
    more = m.bias or m.biased_attention_out or m.dropout
    return "" if more else "without biases and dropout, where the residual sum is one kernel"


def _per_token(s: Layout) -> str:
    """A pass over all gradients takes the place of one of the same length (`gradient_buffer_items`)."""
    if (
        s.training is None
        or not framework_of(s.training).averages_gradients
        or s.parallelism.dp * s.parallelism.cp == 1
    ):
        return ""
    return f"on times with framework {s.training.framework}: without it a kernel of the same length scales gradients"


def _fills_tiles(s: Layout) -> str:
    by_library = s.parallelism.ep > 1 and DISPATCHERS[s.parallelism.ep_dispatcher or "all_to_all"].fills_tiles
    return f"with ep_dispatcher {s.parallelism.ep_dispatcher}, which fills rows up itself" if by_library else ""


def _no_layers_graphed(s: Layout) -> str:
    graphs = "layers" if s.training is None else s.training.cuda_graphs
    return "" if graphs == "layers" else f"with cuda_graphs {graphs}, only with layers"


def _captured(s: Layout) -> str:
    captured = s.model.program is not None and s.training is not None and s.training.zero_grad == "keep"
    return "with a captured program, whose gradients come and go as it ran" if captured else ""


def _no_copy(s: Layout) -> str:
    fp32 = s.training is not None and s.training.param_dtype == "fp32"
    return "with param_dtype fp32, which has no master copy" if fp32 else _on_host(s)


def _one_layer(s: Layout) -> str:
    offload = s.training.activation_offload if s.training is not None else False
    by_layer = not isinstance(offload, bool) and offload.layers is not None
    known = s.parallelism.layers_per_stage != "balanced"  # which have no numbers here
    alone = by_layer and known and max(s.parallelism.stage_layers, default=0) < 2
    return "where no stage has two layers, as the last one of each stays" if alone else ""


def _no_logits(s: Layout) -> str:
    rewards = s.training is not None and s.training.pair_loss == "reward"
    return "with preference.loss reward, which has no logits" if rewards else ""


OF_PARALLELISM: tuple[Idle, ...] = (
    Idle("zero", _zero),
    Idle("shard_size", _only_with_zero(1, 2, 3)),
    Idle("reshard_after_forward", _only_with_zero(3)),
    Idle("fsdp_version", _fsdp_version),
    Idle("backward_prefetch", _backward_prefetch),
    Idle("fsdp_double_buffer", _alone),
    Idle("outer_dp_sharding_strategy", _alone),
    Idle("zero_hpz_partition_size", _alone),
    Idle("zero_quantized_gradients", _on_one_node),
    Idle("accumulate_unsharded", _accumulate_unsharded),
    Idle("all_reduce_once", _all_reduce_once),
    Idle("accumulate_in_a_row", _accumulate_in_a_row),
    Idle("schedule", _with_one("pp")),
    Idle("schedule_memory", _only_with_schedules(lambda form: form.follows_times)),
    Idle("virtual_stages", _with_one("pp")),
    Idle("micro_batch_group", _only_with_schedules(lambda form: form.in_groups_of is not None)),
    Idle("layers_per_stage", _with_one("pp")),
    Idle("mtp_stage", _with_one("pp")),
    Idle("dp_sync", _dp_sync),
    Idle("bucket_bytes", _bucket_bytes),
    Idle("gather_bucket_bytes", _only_with_zero(3)),
    Idle("param_gather_overlap", _only_with_zero(1, 2)),
    Idle("overlap_param_gather_with_optimizer_step", _alone),
    Idle("param_gather_dtype", _gathers_nothing),
    Idle("cp_method", _with_one("cp")),
    Idle("cp_method_by_layer", _with_one("cp")),
    Idle("hierarchical_context_parallel_sizes", _rings_nothing),
    Idle("cp_split", _cp_split),
    Idle("tp_overlap", _with_one("tp")),
    Idle(
        "tp_overlap_except", lambda s: "" if s.parallelism.sp else "without sp" if s.parallelism.tp > 1 else "with tp 1"
    ),
    Idle("ep_overlap", _with_one("ep")),
    Idle("delay_wgrad_compute", _pairs_nothing),
    Idle("ep_dispatch_dtype", _with_one("ep")),
    Idle("ep_dispatcher", _with_one("ep")),
    Idle("p2p_overlap", _with_one("pp")),
    Idle("p2p_scatter", _p2p_scatter),
    Idle("rank_order", _rank_order),
)
OF_TRAINING: tuple[Idle, ...] = (
    Idle("attention_kernel", _attention_kernel),
    Idle("grad_reduce_dtype", _reduces_nothing),
    Idle("gradient_accumulation_fusion", _fused_sums),
    Idle("moe_router_fusion", _own_router),
    Idle("moe_shared_expert_overlap", _with_one("ep")),
    Idle("apply_rope_fusion", _no_rope),
    Idle("bias_dropout_fusion", _adds_residual_alone),
    Idle("calculate_per_token_loss", _per_token),
    Idle("cuda_graph_scope", _no_layers_graphed),
    Idle("moe_router_padding_for_quantization", _fills_tiles),
    Idle("adamw_kernels", _no_adamw),
    Idle("optimizer_dtype", _no_moments),
    Idle("zero_grad", _captured),
    Idle("master_weights", _no_copy),
    Idle("activation_offload", _one_layer),
    Idle("cross_entropy", _no_logits),
)
