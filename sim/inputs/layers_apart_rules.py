"""Rules on keys of `training` that treat some layers otherwise than the rest."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.models.frameworks import framework_of
from sim.models.recipes import recipe_of

IN_SIXTEEN_BITS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def layers_in_sixteen_bits(sections: Sections, t: Training) -> Problems:
    """Layers that stay in 16 bits need others that do not. Megatron-Core refuses delayed scaling beside them, whose
    largest values it would reduce wrongly (core/fp8_utils.py: `get_fp8_context`)."""
    layers, recipe = sections.model.layers, recipe_of(t)
    delayed = recipe is not None and recipe.name == "delayed" and framework_of(t).accumulates_in_matmul
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
