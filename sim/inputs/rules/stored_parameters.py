"""Rules on how parameters and their fp32 copies are kept: remainders of copies, and parameters in 8 bits."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.fsdp import has_own_fsdp
from sim.inputs.rules.needs import accumulates, frameworks_with, needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import OPTIMIZERS, REMAINDERS
from sim.variants.recipes import recipe_of


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
