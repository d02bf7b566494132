"""Rules of Megatron-Core about the two ends of a pipeline's step: parameters gathered beside the optimizer, and weight
gradients of the output matrix that wait for the pipeline's flush."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.variants.frameworks.records import framework_of, zero_engine
from sim.variants.optimizers import OPTIMIZERS

MEGATRON = "a framework of Megatron-Core (megatron, megatron_bridge or nemo)"


def gathers_beside_optimizer(sections: Sections, t: Training) -> Problems:
    """A first stage's parameters gathered early, as Megatron-LM demands it (training/arguments.py: `validate_args`;
    core/optimizer/__init__.py refuses it for an optimizer that deals out whole matrices)."""
    p = sections.parallelism
    if not p.overlap_param_gather_with_optimizer_step:
        return
    for bad, what in (
        (not zero_engine(t, p).first_stage_alone, MEGATRON),
        (p.zero != 1, "zero 1"),
        (not p.param_gather_overlap, "param_gather_overlap true"),
        (p.pp == 1 or p.form.name != "interleaved_1f1b", "pp above 1 with schedule interleaved_1f1b"),
        (OPTIMIZERS[t.optimizer].whole_matrices, "optimizer adamw or sgd"),
        (bool(t.optimizer_offload), "training.optimizer_offload false"),
        (sections.model.program is not None, "a described model, not a captured program"),
    ):
        if bad:
            yield ("parallelism", "overlap_param_gather_with_optimizer_step"), f"found true; needs {what}"


def deferred_gradients(sections: Sections, t: Training) -> Problems:
    """Weight gradients that the last stage puts off, as Megatron-Core demands it (core/model_parallel_config.py:
    `__post_init__`; core/extensions/transformer_engine.py), and what is not simulated with it."""
    p, model = sections.parallelism, sections.model
    if p.wgrad_deferral_limit is None:
        return
    fused = framework_of(t).accumulates_in_matmul and t.gradient_accumulation_fusion is not False
    for bad, what in (
        (not fused, f"{MEGATRON}, and its gradient_accumulation_fusion"),
        (
            p.pp == 1 or p.form.name not in ("1f1b", "interleaved_1f1b"),
            "pp above 1 with schedule 1f1b or interleaved_1f1b",
        ),
        (p.ep_overlap and p.ep > 1, "ep_overlap false"),
        (p.zero > 1, "zero 0 or 1"),
        (t.cross_entropy in ("chunked", "tiled"), "training.cross_entropy unfused, native or fused"),
        (t.fp8_output_proj, "training.fp8_output_proj false"),
        (t.lora is not None, "training without lora"),
        (t.preference is not None, "training on next tokens"),
        (t.cuda_graphs != "none", "training.cuda_graphs none"),
        (model.mtp_layers > 0, "model.mtp_layers 0"),
        (model.program is not None, "a described model, not a captured program"),
    ):
        if bad:
            yield ("parallelism", "wgrad_deferral_limit"), f"found {p.wgrad_deferral_limit}; needs {what}"
