"""Rules of Megatron-Core about the two ends of a pipeline's step: parameters gathered beside the optimizer, and weight
gradients of the output matrix that wait for the pipeline's flush."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.needs import accumulates, either, frameworks_with, needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.trainer_names import MEGATRON_SCHEDULES
from sim.inputs.training_config import Training
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import OPTIMIZERS

_BY_NUMBERS = [name for name, optimizer in OPTIMIZERS.items() if not optimizer.whole_matrices]


def gathers_beside_optimizer(sections: Sections, t: Training) -> Problems:
    """A first stage's parameters gathered early, as Megatron-LM demands it (training/arguments.py: `validate_args`;
    core/optimizer/__init__.py refuses it for an optimizer that deals out whole matrices)."""
    p = sections.parallelism
    if not p.overlap_param_gather_with_optimizer_step:
        return
    needs = (
        needs_framework(t, lambda framework: framework.zero.first_stage_alone),
        (p.zero == 1, "zero 1"),
        (p.param_gather_overlap, "param_gather_overlap true"),
        (p.pp > 1 and p.form.name == "interleaved_1f1b", "pp above 1 with schedule interleaved_1f1b"),
        (not OPTIMIZERS[t.optimizer].whole_matrices, f"optimizer {either(_BY_NUMBERS)}"),
        (not t.optimizer_offload, "training.optimizer_offload false"),
        (sections.model.program is None, "a described model, not a captured program"),
    )
    yield from unmet(("parallelism", "overlap_param_gather_with_optimizer_step"), True, needs)


def deferred_gradients(sections: Sections, t: Training) -> Problems:
    """Weight gradients that the last stage puts off, as Megatron-Core demands it (core/model_parallel_config.py:
    `__post_init__`; core/extensions/transformer_engine.py), and what is not simulated with it."""
    p, model = sections.parallelism, sections.model
    if p.wgrad_deferral_limit is None:
        return
    fused = accumulates(framework_of(t)) and t.gradient_accumulation_fusion is not False
    of_megatron = p.pp > 1 and p.form.name in MEGATRON_SCHEDULES
    needs = (
        (fused, f"{frameworks_with(t, accumulates)}, and its gradient_accumulation_fusion"),
        (of_megatron, f"pp above 1 with schedule {' or '.join(MEGATRON_SCHEDULES)}"),
        (not p.ep_overlap or p.ep == 1, "ep_overlap false"),
        (p.zero <= 1, "zero 0 or 1"),
        (t.cross_entropy not in ("chunked", "tiled"), "training.cross_entropy unfused, native or fused"),
        (not t.fp8_output_proj, "training.fp8_output_proj false"),
        (t.lora is None, "training without lora"),
        (t.preference is None, "training on next tokens"),
        (t.cuda_graphs == "none", "training.cuda_graphs none"),
        (model.mtp_layers == 0, "model.mtp_layers 0"),
        (model.program is None, "a described model, not a captured program"),
    )
    yield from unmet(("parallelism", "wgrad_deferral_limit"), p.wgrad_deferral_limit, needs)
