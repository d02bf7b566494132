"""Rules on keys of `training` that treat some layers otherwise than the rest."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.fsdp import has_own_fsdp
from sim.inputs.rules.graphs import captured_parts, filled_map
from sim.inputs.rules.needs import accumulates, frameworks_with, needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import ActivationOffload, OffloadModule, Training
from sim.variants.frameworks.megatron import FUSIONS, has_fusions
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import OPTIMIZERS, REMAINDERS
from sim.variants.recipes import recipe_of

IN_SIXTEEN_BITS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def layers_in_sixteen_bits(sections: Sections, t: Training) -> Problems:
    """Layers that stay in 16 bits need others that do not. Megatron-Core refuses delayed scaling beside them, whose
    largest values it would reduce wrongly (core/fp8_utils.py: `get_fp8_context`)."""
    layers, recipe = sections.model.layers, recipe_of(t)
    delayed = recipe is not None and recipe.from_history and framework_of(t).accumulates_in_matmul
    for key in IN_SIXTEEN_BITS:
        if not (number := getattr(t, key)):
            continue
        path, program = ("training", key), sections.model.program
        yield from unmet(
            path,
            number,
            (
                (recipe is not None, "training.precision fp8, mxfp8 or nvfp4"),
                (program is None, "a described model; a captured program has its own matmuls"),
                (not delayed, "an fp8_recipe other than delayed"),
            ),
        )
        if number > layers:
            yield path, f"found {number}; must be at most model.layers ({layers})"


def offloaded_parts(sections: Sections, t: Training) -> Problems:
    """Parts that there are, and one of the two: layers of which one stays (Transformer Engine, cpu_offload.py:
    "last layer is not offloaded"), or modules, as Megatron-Core has them (transformer_config.py)."""
    offload, path = t.activation_offload, ("training", "activation_offload")
    if not isinstance(offload, ActivationOffload):
        return
    if (offload.layers is None) == (not offload.modules):
        yield path, "give either layers or modules"
    elif sections.model.program is not None:
        yield path, "found layers or modules; a captured program's activations are offloaded whole (true)"
    elif offload.layers is not None and offload.layers >= (layers := sections.model.layers):
        yield (
            (*path, "layers"),
            f"found {offload.layers}; must be less than model.layers ({layers}): the last one stays",
        )
    yield from _offloaded_modules(sections, t, offload.modules)


def _offloaded_modules(sections: Sections, t: Training, modules: tuple[OffloadModule, ...]) -> Problems:
    """Attention's result is kept by the core, too, so that it goes with it; a layer that runs again keeps its input."""
    path, again, experts = ("training", "activation_offload", "modules"), t.recompute.mode, sections.model.moe
    for module in modules:
        of_experts, ends = module in ("expert_fc1", "moe_act"), module == "layer_input"
        needs = (
            (module != "attn_proj" or "core_attn" in modules, "core_attn beside it, which keeps the same tensor"),
            (not of_experts or experts is not None, "model.moe"),
            (module != "moe_act" or not t.fused_experts, "training.fused_experts false"),
            (not ends or again == "full", "training.recompute full"),
            (ends or again not in ("full", "selective_op"), f"training.recompute none or selective, not {again}"),
        )
        yield from unmet(path, module, needs)
    if len(set(modules)) < len(modules):
        yield path, f"found {list(modules)}; each at most once"


def remainders(sections: Sections, t: Training) -> Problems:
    """Transformer Engine's AdamW keeps them, beside bf16 parameters, where Megatron-Core's distributed optimizer leaves
    it the fp32 copies (optimizer/optimizer_config.py: `use_precision_aware_optimizer_no_fp8_or_ds_fp8`)."""
    if t.master_weights != REMAINDERS:
        return
    recipe = recipe_of(t)
    needs = (
        needs_framework(t, accumulates),
        (t.param_dtype == "bf16", "parameters in bf16"),
        (
            OPTIMIZERS[t.optimizer].is_adam and t.optimizer_dtype != "int8",
            "optimizer adamw with moments in fp32 or bf16",
        ),
        (sections.parallelism.zero == 1, "parallelism.zero 1"),
        (recipe is None or recipe.from_history, "precision bf16, or fp8 with delayed scaling"),
        (not t.optimizer_offload and t.lora is None, "training without lora and optimizer_offload"),
        (sections.model.program is None, "a described model"),
    )
    yield from unmet(("training", "master_weights"), REMAINDERS, needs)


def eight_bit_parameters(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's distributed optimizer casts to Transformer Engine's 8 bits (optimizer/distrib_optimizer.py), and
    so does its FSDP (distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: `fp8_quantize`)."""
    if not t.fp8_param_gather:
        return
    recipe, zero = recipe_of(t), (1, 3) if t.lora is None else (0, 1)
    own = sections.parallelism.fsdp_version is None and has_own_fsdp(framework_of(t))
    sharded = sections.parallelism.zero == 3 and recipe is not None
    of_engine = recipe is not None and recipe.format != "nvfp4" and recipe.quantizer == "te"
    needs = (
        (own or not sharded, f"with zero 3 {frameworks_with(t, has_own_fsdp)}, and its own FSDP"),
        (not sharded or recipe is None or recipe.format == "fp8", "with zero 3 precision fp8"),
        (of_engine, "Transformer Engine's fp8 or mxfp8"),
        (sections.parallelism.zero in zero, f"parallelism.zero {' or '.join(map(str, zero))}"),
        (not t.optimizer_offload, "training without optimizer_offload"),
        (t.param_dtype != "fp32" and t.master_weights is None, "parameters of 16 bits with fp32 copies"),
        (sections.model.program is None, "a described model"),
    )
    yield from unmet(("training", "fp8_param_gather"), True, needs)


OF_STATES = (eight_bit_parameters, remainders)  # rules on how parameters and their fp32 copies are kept


def waiting_layers(sections: Sections, t: Training) -> Problems:
    """Layers that do not overlap need others that do, by Transformer Engine's userbuffers (Megatron-Core,
    extensions/transformer_engine.py: `tp_comm_overlap_disable_qkv`, `tp_comm_overlap_disable_fc1`)."""
    found = sections.parallelism.tp_overlap_except
    if found:
        needs = (
            (sections.parallelism.tp_overlap == "full", "parallelism.tp_overlap full"),
            needs_framework(t, lambda framework: framework.userbuffers is not None),
        )
        yield from unmet(("parallelism", "tp_overlap_except"), found, needs)


def router_fusion(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's router, fused or not (`moe_router_fusion` of TransformerConfig)."""
    if t.moe_router_fusion is not None:
        needs = ((sections.model.moe is not None, "model.moe"), needs_framework(t, has_fusions))
        yield from unmet(("training", "moe_router_fusion"), t.moe_router_fusion, needs)


def fusions(sections: Sections, t: Training) -> Problems:
    """Fusions of Megatron-Core that are off (`FUSIONS`)."""
    for key in FUSIONS:
        if getattr(t, key) is False:
            described = (sections.model.program is None, "a described model; a captured program runs what it ran")
            yield from unmet(("training", key), False, (needs_framework(t, has_fusions), described))


def of_megatron(sections: Sections, t: Training) -> Problems:
    """Keys that Megatron-Core alone has (transformer/attention.py: `split_qkv`, when one kernel is possible;
    distributed/finalize_model_grads.py: `num_tokens`)."""
    m = sections.model
    described = (m.program is None, "a described model")
    if t.fused_single_qkv_rope:
        plain = not m.qk_norm and m.mla is None and not m.attention_gate and t.packing is None
        needs = (
            needs_framework(t, has_fusions),
            (m.positions == "rope", "model.positions rope"),
            (plain, "queries without norms, gates and latents, and no training.packing"),
            (t.attention == "fused", "training.attention fused"),
            described,
        )
        yield from unmet(("training", "fused_single_qkv_rope"), True, needs)
    if t.calculate_per_token_loss:
        yield from unmet(("training", "calculate_per_token_loss"), True, (needs_framework(t, has_fusions), described))


def shared_experts_beside(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's shared experts beside the exchanges (transformer_config.py: `moe_shared_expert_overlap`)."""
    if not t.moe_shared_expert_overlap:
        return
    moe, p, r = sections.model.moe, sections.parallelism, t.recompute
    by_nccl = p.ep_dispatcher in (None, "all_to_all")
    needs = (
        (
            by_nccl or framework_of(t).shares_beside_libraries,
            "parallelism.ep_dispatcher all_to_all before Megatron-Core 0.18 (June 2026)",
        ),
        (moe is not None and moe.shared_width > 0, "model.moe with shared experts"),
        (moe is None or moe.latent is None, "model.moe without latent"),
        needs_framework(t, lambda framework: framework.sends_probabilities),
        (not p.ep_overlap, "parallelism.ep_overlap false"),
        (r.mode != "selective" or "shared_experts" not in r.modules, "recompute without module shared_experts"),
    )
    yield from unmet(("training", "moe_shared_expert_overlap"), True, needs)


RANK_CAPACITY, STASH = "moe_expert_rank_capacity_factor", "moe_paged_stash_buffer_size_factor_cuda"


def static_buffers(sections: Sections, t: Training) -> Problems:
    """Buffers of HybridEP for fused experts (transformer_config.py: "requires use_transformer_engine_op_fuser"), and a
    stash of what these keep, which does not wait on the host as well (the same file: `moe_paged_stash`)."""
    offload = t.activation_offload
    named = offload.modules if isinstance(offload, ActivationOffload) else ()
    modules = offload is True or {"expert_fc1", "moe_act"} & {*named}
    capacity, stash = t.moe_expert_rank_capacity_factor, t.moe_paged_stash_buffer_size_factor_cuda
    if capacity is not None:
        needs = (
            (sections.parallelism.ep_dispatcher == "hybridep", "parallelism.ep_dispatcher hybridep"),
            (t.fused_experts, "training.fused_experts true"),
        )
        yield from unmet(("training", RANK_CAPACITY), capacity, needs)
    if stash is not None:
        needs = (
            (capacity is not None, f"training.{RANK_CAPACITY}"),
            (not modules, "activation_offload without layers' experts"),
        )
        yield from unmet(("training", STASH), stash, needs)


# Rules on keys of Megatron-Core.
OF_EXPERTS = (router_fusion, fusions, of_megatron, shared_experts_beside, captured_parts, filled_map, static_buffers)
