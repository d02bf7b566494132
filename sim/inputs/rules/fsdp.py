"""Rules of which of torch's FSDPs shards parameters, and of what the first one prefetches."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.needs import Need, frameworks_with, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import framework_of, zero_engine


def torch_fsdp(sections: Sections, t: Training) -> Problems:
    """Refuse another FSDP than the framework can have, and gathers without prefetch where it is not torch's first."""
    p, engine = sections.parallelism, framework_of(t).zero
    own, others = engine.fsdp_version, {2} if engine.or_torch else set[int]()
    if p.fsdp_version is not None and own != 2 and p.fsdp_version not in {own, *others}:
        another = (
            "a sharding of its own, not torch's FSDP" if not others else "its own and torch's FSDP2, not the first"
        )
        found = "torch's first FSDP alone" if own else another
        yield ("parallelism", "fsdp_version"), f"found {p.fsdp_version}; framework {t.framework} has {found}"
    if p.fsdp_double_buffer and (p.zero < 2 or p.fsdp_version is not None or not engine.ahead_elements):
        needed = f"found true; needs zero 2 or 3 with {frameworks_with(t, has_own_fsdp)}, and its own FSDP"
        yield ("parallelism", "fsdp_double_buffer"), needed
    yield from _two_levels(sections, t)
    if t.parameter_offload:
        yield from unmet(("training", "parameter_offload"), True, _of_parameters_on_host(sections, t))
    if p.zero == 3 and not p.backward_prefetch and (p.fsdp_version or own) != 1:
        first = frameworks_with(t, lambda framework: framework.zero.fsdp_version == 1)
        needed = f"found false; needs torch's first FSDP: parallelism.fsdp_version 1, or {first}"
        yield ("parallelism", "backward_prefetch"), needed


def _two_levels(sections: Sections, t: Training) -> Problems:
    """Replicas of Megatron's shards that share the optimizer (megatron_fsdp/fully_shard.py: their parameters are
    sharded, too), and the parts of ZeRO++ that DeepSpeed has beside quantized weights."""
    p = sections.parallelism
    for key, needs in (
        ("outer_dp_sharding_strategy", _of_shared_optimizer),
        ("zero_hpz_partition_size", _of_second_copy),
        ("zero_quantized_gradients", _of_four_bits),
    ):
        if (value := getattr(p, key)) not in ("no_shard", None, False):
            yield from unmet(("parallelism", key), value, needs(sections, t))


def has_own_fsdp(framework: Framework) -> bool:
    """Tell whether a framework has Megatron-Core's FSDP, which gathers a number of elements ahead."""
    return bool(framework.zero.ahead_elements)


def _of_plus_plus(sections: Sections, t: Training) -> Need:
    """The ZeRO-3 whose weights and gradients ZeRO++ quantizes, block by block."""

    def scales(framework: Framework) -> bool:
        return framework.zero.scaled_elements > 0

    return sections.parallelism.zero == 3 and scales(framework_of(t)), f"zero 3 with {frameworks_with(t, scales)}"


def _of_shared_optimizer(sections: Sections, t: Training) -> tuple[Need, ...]:
    p = sections.parallelism
    own = has_own_fsdp(framework_of(t)) and p.fsdp_version is None and p.zero == 3
    return (
        (own, f"zero 3 with {frameworks_with(t, has_own_fsdp)}, and its own FSDP"),
        (p.shard_size < p.dp * p.cp, "shard_size below dp·cp"),
        (not t.optimizer_offload, "training.optimizer_offload false"),
    )


def _of_parameters_on_host(sections: Sections, t: Training) -> tuple[Need, ...]:
    p, engine = sections.parallelism, zero_engine(t, sections.parallelism)
    return (
        (p.zero == 3, "parallelism.zero 3"),
        (t.optimizer_offload == "cpu", "training.optimizer_offload cpu"),
        (engine.fsdp_version > 0 or 3 in engine.on_host_at, "torch's FSDP or DeepSpeed's ZeRO"),
        (p.param_gather_dtype != "int8", "another parallelism.param_gather_dtype than int8"),
        (p.zero_hpz_partition_size is None, "no parallelism.zero_hpz_partition_size"),
        (not p.zero_quantized_gradients, "parallelism.zero_quantized_gradients false"),
    )


def _of_second_copy(sections: Sections, t: Training) -> tuple[Need, ...]:
    p = sections.parallelism
    ranks, second = p.dp * p.cp, p.zero_hpz_partition_size or 1
    return (
        _of_plus_plus(sections, t),
        (p.shard_size == ranks and ranks % second == 0, "a divisor of dp·cp, and no shard_size"),
        # deepspeed/runtime/engine.py: "AutoEP with ZeRO Stage 3 does not support hpZeRO secondary tensor groups yet"
        (sections.model.moe is None, "a model without experts"),
        (p.reshard_after_forward, "reshard_after_forward true"),
        (sections.model.program is None, "a described model"),
    )


def _of_four_bits(sections: Sections, t: Training) -> tuple[Need, ...]:
    p, each = sections.parallelism, sections.cluster.gpus_per_node
    ranks = p.dp * p.cp
    return (
        _of_plus_plus(sections, t),
        (p.shard_size == ranks == p.ranks, "all ranks in dp and cp, and no shard_size"),
        (ranks <= each or ranks % each == 0, f"whole nodes (of {each} GPUs)"),
        (sections.model.moe is None, "a model without experts"),
        (not p.accumulate_unsharded, "accumulate_unsharded false"),
    )
