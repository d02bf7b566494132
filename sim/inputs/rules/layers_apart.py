"""Rules on keys of `training` and `parallelism` that treat some layers or parts otherwise than the rest."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.needs import needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import ActivationOffload, OffloadModule, Training
from sim.variants.frameworks.records import framework_of
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
