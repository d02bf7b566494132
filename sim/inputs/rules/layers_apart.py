"""Rules on keys of `training` that treat some layers otherwise than the rest."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.graphs import captured_parts, filled_map
from sim.inputs.sections import Sections
from sim.inputs.training_config import ActivationOffload, OffloadModule, Training
from sim.variants.frameworks.megatron import FUSIONS, has_fusions
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import REMAINDERS
from sim.variants.recipes import recipe_of

IN_SIXTEEN_BITS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def layers_in_sixteen_bits(sections: Sections, t: Training) -> Problems:
    """Layers that stay in 16 bits need others that do not. Megatron-Core refuses delayed scaling beside them, whose
    largest values it would reduce wrongly (core/fp8_utils.py: `get_fp8_context`)."""
    layers, recipe = sections.model.layers, recipe_of(t)
    delayed = recipe is not None and recipe.from_history and framework_of(t).accumulates_in_matmul
    for key in IN_SIXTEEN_BITS:
        number = getattr(t, key)
        for bad, what in (
            (recipe is None, "needs training.precision fp8, mxfp8 or nvfp4"),
            (sections.model.program is not None, "needs a described model; a captured program has its own matmuls"),
            (delayed, "needs an fp8_recipe other than delayed"),
            (number > layers, f"must be at most model.layers ({layers})"),
        ):
            if number and bad:
                yield ("training", key), f"found {number}; {what}"


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
        ends = module == "layer_input"
        for bad, what in (
            (module == "attn_proj" and "core_attn" not in modules, "core_attn beside it, which keeps the same tensor"),
            (module in ("expert_fc1", "moe_act") and experts is None, "model.moe"),
            (module == "moe_act" and t.fused_experts, "training.fused_experts false"),
            (ends and again != "full", "training.recompute full"),
            (not ends and again in ("full", "selective_op"), f"training.recompute none or selective, not {again}"),
        ):
            if bad:
                yield path, f"found '{module}'; needs {what}"
    if len(set(modules)) < len(modules):
        yield path, f"found {list(modules)}; each at most once"


def remainders(sections: Sections, t: Training) -> Problems:
    """Transformer Engine's AdamW keeps them, beside bf16 parameters, where Megatron-Core's distributed optimizer leaves
    it the fp32 copies (optimizer/optimizer_config.py: `use_precision_aware_optimizer_no_fp8_or_ds_fp8`)."""
    recipe = recipe_of(t)
    for bad, what in (
        (not framework_of(t).accumulates_in_matmul, "a framework of Megatron-Core (megatron, megatron_bridge or nemo)"),
        (t.param_dtype != "bf16", "parameters in bf16"),
        (t.optimizer != "adamw" or t.optimizer_dtype == "int8", "optimizer adamw with moments in fp32 or bf16"),
        (sections.parallelism.zero != 1, "parallelism.zero 1"),
        (recipe is not None and not recipe.from_history, "precision bf16, or fp8 with delayed scaling"),
        (bool(t.optimizer_offload) or t.lora is not None, "training without lora and optimizer_offload"),
        (sections.model.program is not None, "a described model"),
    ):
        if t.master_weights == REMAINDERS and bad:
            yield ("training", "master_weights"), f"found '{REMAINDERS}'; needs {what}"


def eight_bit_parameters(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's distributed optimizer casts to Transformer Engine's 8 bits (optimizer/distrib_optimizer.py), and
    so does its FSDP (distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: `fp8_quantize`)."""
    recipe, zero = recipe_of(t) if t.fp8_param_gather else None, (1, 3) if t.lora is None else (0, 1)
    own = sections.parallelism.fsdp_version is None and bool(framework_of(t).zero.ahead_elements)
    sharded = sections.parallelism.zero == 3 and recipe is not None
    for bad, what in (
        (sharded and not own, "with zero 3 a framework of Megatron-Core, and its own FSDP"),
        (sharded and recipe is not None and recipe.format != "fp8", "with zero 3 precision fp8"),
        (recipe is None or recipe.format == "nvfp4" or recipe.quantizer != "te", "Transformer Engine's fp8 or mxfp8"),
        (sections.parallelism.zero not in zero, f"parallelism.zero {' or '.join(map(str, zero))}"),
        (bool(t.optimizer_offload), "training without optimizer_offload"),
        (t.param_dtype == "fp32" or t.master_weights is not None, "parameters of 16 bits with fp32 copies"),
        (sections.model.program is not None, "a described model"),
    ):
        if t.fp8_param_gather and bad:
            yield ("training", "fp8_param_gather"), f"found true; needs {what}"


OF_STATES = (eight_bit_parameters, remainders)  # rules on how parameters and their fp32 copies are kept


def waiting_layers(sections: Sections, t: Training) -> Problems:
    """Layers that do not overlap need others that do, by Transformer Engine's userbuffers (Megatron-Core,
    extensions/transformer_engine.py: `tp_comm_overlap_disable_qkv`, `tp_comm_overlap_disable_fc1`)."""
    found = ", ".join(sections.parallelism.tp_overlap_except)
    for bad, what in (
        (sections.parallelism.tp_overlap != "full", "parallelism.tp_overlap full"),
        (framework_of(t).userbuffers is None, "a framework with Transformer Engine's userbuffers"),
    ):
        if found and bad:
            yield ("parallelism", "tp_overlap_except"), f"found {found}; needs {what}"


def router_fusion(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's router, fused or not (`moe_router_fusion` of TransformerConfig)."""
    for bad, what in (
        (sections.model.moe is None, "model.moe"),
        (not has_fusions(framework_of(t)), "framework megatron, megatron_bridge or nemo"),
    ):
        if t.moe_router_fusion is not None and bad:
            yield ("training", "moe_router_fusion"), f"found {str(t.moe_router_fusion).lower()}; needs {what}"


def fusions(sections: Sections, t: Training) -> Problems:
    """Fusions of Megatron-Core that are off (`FUSIONS`)."""
    for key in FUSIONS:
        for bad, what in (
            (not has_fusions(framework_of(t)), "framework megatron, megatron_bridge or nemo"),
            (sections.model.program is not None, "a described model; a captured program runs what it ran"),
        ):
            if getattr(t, key) is False and bad:
                yield ("training", key), f"found false; needs {what}"


def of_megatron(sections: Sections, t: Training) -> Problems:
    """Keys that Megatron-Core alone has (transformer/attention.py: `split_qkv`, when one kernel is possible;
    distributed/finalize_model_grads.py: `num_tokens`)."""
    own, m = has_fusions(framework_of(t)), sections.model
    plain = not m.qk_norm and m.mla is None and not m.attention_gate and t.packing is None
    for key, needs in (
        (
            "fused_single_qkv_rope",
            (
                (own, "framework megatron, megatron_bridge or nemo"),
                (m.positions == "rope", "model.positions rope"),
                (plain, "queries without norms, gates and latents, and no training.packing"),
                (t.attention == "fused", "training.attention fused"),
                (m.program is None, "a described model"),
            ),
        ),
        (
            "calculate_per_token_loss",
            (
                (own, "framework megatron, megatron_bridge or nemo"),
                (m.program is None, "a described model"),
            ),
        ),
    ):
        for good, what in needs:
            if getattr(t, key) and not good:
                yield ("training", key), f"found true; needs {what}"


def shared_experts_beside(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's shared experts beside the exchanges (transformer_config.py: `moe_shared_expert_overlap`)."""
    moe, p, r = sections.model.moe, sections.parallelism, t.recompute
    by_library = p.ep_dispatcher not in (None, "all_to_all") and not framework_of(t).shares_beside_libraries
    for bad, what in (
        (by_library, "parallelism.ep_dispatcher all_to_all before Megatron-Core 0.18 (June 2026)"),
        (moe is None or not moe.shared_width, "model.moe with shared experts"),
        (moe is not None and moe.latent is not None, "model.moe without latent"),
        (not framework_of(t).sends_probabilities, "framework megatron, megatron_bridge or nemo"),
        (p.ep_overlap, "parallelism.ep_overlap false"),
        (r.mode == "selective" and "shared_experts" in r.modules, "recompute without module shared_experts"),
    ):
        if t.moe_shared_expert_overlap and bad:
            yield ("training", "moe_shared_expert_overlap"), f"found true; needs {what}"


RANK_CAPACITY, STASH = "moe_expert_rank_capacity_factor", "moe_paged_stash_buffer_size_factor_cuda"


def static_buffers(sections: Sections, t: Training) -> Problems:
    """Buffers of HybridEP for fused experts (transformer_config.py: "requires use_transformer_engine_op_fuser"), and a
    stash of what these keep, which does not wait on the host as well (the same file: `moe_paged_stash`)."""
    offload = t.activation_offload
    named = offload.modules if isinstance(offload, ActivationOffload) else ()
    modules = offload is True or {"expert_fc1", "moe_act"} & {*named}
    for key, needs in (
        (
            RANK_CAPACITY,
            (
                (sections.parallelism.ep_dispatcher == "hybridep", "parallelism.ep_dispatcher hybridep"),
                (t.fused_experts, "training.fused_experts true"),
            ),
        ),
        (
            STASH,
            (
                (t.moe_expert_rank_capacity_factor is not None, f"training.{RANK_CAPACITY}"),
                (not modules, "activation_offload without layers' experts"),
            ),
        ),
    ):
        for good, what in needs:
            if getattr(t, key) is not None and not good:
                yield ("training", key), f"found {getattr(t, key):g}; needs {what}"


# Rules on keys of Megatron-Core.
OF_EXPERTS = (router_fusion, fusions, of_megatron, shared_experts_beside, captured_parts, filled_map, static_buffers)
