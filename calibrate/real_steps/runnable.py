"""Checks which scenarios can be run for real; others are refused with the key that prevents it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from sim.core.dtypes import sixteen_bit
from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.rules.layers_apart import IN_SIXTEEN_BITS
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Training
from sim.models.activations.kernels import is_gated
from sim.models.linear import CHUNKS
from sim.schedules import FORMS, ScheduleForm
from sim.variants.frameworks.megatron import FUSIONS
from sim.variants.frameworks.records import FRAMEWORKS, framework_of

RANKS_PER_CORE = 4


def check_runnable(scenario: Scenario, where: str) -> None:
    """Check that `calibrate.measure` implements everything that the scenario asks for.

    Raises:
        InputError: names the file, the key, what was found and what can be run.
    """
    if scenario.training is None:
        raise InputError(f"{where}: inference: only training steps can be run for real")
    if scenario.rl is not None:
        raise InputError(f"{where}: rl: only training steps can be run for real")
    for key, found, allowed in (
        *_model(scenario),
        *_training(scenario),
        *_layout(scenario),
        *_within_layers(scenario),
        *_routing(scenario),
        *_expert_parallelism(scenario),
        *_distillation(scenario),
    ):
        raise InputError(f"{where}: {key}: found {found}; calibrate.measure can run: {allowed}")


Problem = tuple[str, object, str]


def _names(which: Callable[[ScheduleForm], bool]) -> str:
    return ", ".join(name for name, form in FORMS.items() if which(form))


def _model(s: Scenario) -> Iterator[Problem]:
    m = s.model
    if m.program is not None:
        yield "model.program", m.program, "models without a captured program; --program runs its code"
    if m.qkv_bias or m.qk_norm:
        yield "model", "qkv_bias or qk_norm", "biases on all linear layers or on none, no norms of queries and keys"
    for key, value in m.variations.items():
        yield f"model.{key}", value, "layers of GPT and Llama, without this key"
    if m.positions == "rope" and m.mla is None and m.head_dim % 2:
        yield "model.head_dim", f"{m.head_dim} with rope", "an even size, as rope rotates pairs"
    if m.mtp_layers:
        yield "model.mtp_layers", m.mtp_layers, "0"
    p = s.parallelism
    if m.tied_embeddings and p.pp > 1 and not p.form.ends_on_last_rank:
        found = f"true with schedule {p.schedule}"
        yield "model.tied_embeddings", found, f"at pp > 1: {_names(lambda f: f.ends_on_last_rank)}"
    if s.training is not None and s.training.lora is not None:
        yield "training.lora", "adapters", "training of all parameters; adapters only with --huggingface"
    if s.faults is not None:
        yield "faults", "faults", "runs without faults"


def _distillation(s: Scenario) -> Iterator[Problem]:
    """Check distillation: the whole teacher runs on every rank, and a teacher that generates on one rank only."""
    d, p = s.distillation, s.parallelism
    if d is None:
        return
    if d.placement == "other":
        yield "distillation.placement", d.placement, "same"
    if p.ranks != p.dp or (d.mode == "sequence" and p.ranks > 1):
        yield (
            "parallelism",
            counted(p.ranks, "rank"),
            "dp alone with mode logits, one rank with mode sequence",
        )
    if d.teacher_parallelism.tp > 1:
        yield "distillation.teacher_parallelism.tp", d.teacher_parallelism.tp, "1"
    t = d.teacher
    if t.moe is not None or t.mla is not None or t.qkv_bias or t.qk_norm or t.variations or t.dropout > 0:
        found = "experts, latent attention, dropout or a newer family's keys"
        yield "distillation.teacher", found, "a dense GPT or Llama without dropout"
    if d.mode == "sequence" and t.vocab != s.model.vocab:
        yield "distillation.teacher.vocab", t.vocab, f"the student's, {s.model.vocab}"


def _training(s: Scenario) -> Iterator[Problem]:
    t = s.for_training
    yield from _number_formats(s, t)
    yield from _optimizer(t)
    yield from _recomputation(s, t)
    if t.preference is not None:
        yield "training.preference", "pairs of answers", "null (next tokens)"
    if t.packing is not None:
        yield "training.packing", "packed documents", "null (a sequence is one document)"
    if t.optimizer_offload:
        yield "training.optimizer_offload", t.optimizer_offload, "false"
    if t.optimizer_post_validation:
        yield "training.optimizer_post_validation", "true", "false"
    if t.activation_offload and (t.recompute.mode == "selective_op" or s.distillation is not None):
        found = "true with " + ("a teacher" if s.distillation is not None else "selective_op")
        yield "training.activation_offload", found, "false; true without a teacher and with any other recomputation"
    if not isinstance(t.activation_offload, bool):
        yield "training.activation_offload", "layers or modules", "false, true"
    yield from _attention(s, t)
    if not framework_of(t).measurable:
        yield "training.framework", t.framework, ", ".join(f.name for f in FRAMEWORKS.values() if f.measurable)
    switches = ("fp8_dot_product_attention", "activation_func_fp8_input_store", "fp8_param_gather")
    for key in (*switches, "moe_shared_expert_overlap", "moe_router_padding_for_quantization"):
        if getattr(t, key):
            yield f"training.{key}", "true", "false"
    for key in IN_SIXTEEN_BITS:
        if getattr(t, key):
            yield f"training.{key}", getattr(t, key), "0"
    of_megatron = ("gradient_accumulation_fusion", "moe_grouped_gemm", "moe_router_fusion", *FUSIONS)
    for key in ("cublas_workspace_config", *of_megatron):
        if (found := getattr(t, key)) is not None:
            yield f"training.{key}", found, "null"
    if t.cross_entropy != "unfused":
        yield "training.cross_entropy", t.cross_entropy, "unfused"


def _number_formats(s: Scenario, t: Training) -> Iterator[Problem]:
    if t.precision in ("mxfp8", "nvfp4"):
        rest = "block scales have no emulation on a CPU"
        yield "training.precision", t.precision, f"fp32, bf16, fp16, fp8 ({rest})"
    if t.precision == "fp8":
        yield from _eight_bits(s)
    if t.precision != "fp32" and (t.optimizer != "adamw" or s.distillation is not None):
        found = f"{t.precision} with {t.optimizer if t.optimizer != 'adamw' else 'a teacher'}"
        yield "training.precision", found, "fp32; bf16, fp16 and fp8 with adamw and no teacher"
    if t.precision == "fp16" and not t.gradient_clipping:
        yield "training.gradient_clipping", "false with fp16", "true (an overflow shows in the norm)"
    for name in ("param_dtype", "grad_dtype", "grad_reduce_dtype"):
        if getattr(t, name) != sixteen_bit(t.precision):
            yield f"training.{name}", getattr(t, name), f"{sixteen_bit(t.precision)} with precision {t.precision}"


def _optimizer(t: Training) -> Iterator[Problem]:
    if t.optimizer not in ("adamw", "sgd"):
        yield "training.optimizer", t.optimizer, "adamw, sgd"
    if t.adamw_kernels == "foreach":
        yield "training.adamw_kernels", t.adamw_kernels, "fused"
    if t.optimizer_dtype != "fp32":
        yield "training.optimizer_dtype", t.optimizer_dtype, "fp32"
    if t.master_weights is not None and t.param_dtype != "fp32":
        yield "training.master_weights", t.master_weights, "null (an fp32 copy of 16-bit parameters)"
    if t.zero_grad == "set_to_none":
        yield "training.zero_grad", t.zero_grad, "null, keep"


def _recomputation(s: Scenario, t: Training) -> Iterator[Problem]:
    p = s.parallelism
    beside = (
        ("experts", s.model.moe is not None),
        ("sp", p.sp and p.tp > 1),
        ("latent attention and tp", s.model.mla is not None and p.tp > 1),
        # these change outputs in place that it keeps: partial sums of chunks and of attention over pieces
        ("tp_overlap full", p.tp_overlap == "full" and p.tp > 1),
        (f"cp_method {p.cp_method}", p.cp > 1 and p.cp_method != "all_to_all"),
    )
    if t.recompute.mode == "selective_op" and any(found for _, found in beside):
        found = "selective_op with " + next(name for name, found in beside if found)
        allowed = (
            "none, selective, full; selective_op without experts, sp and tp_overlap full, with cp by all_to_all alone, "
            "with latent attention without tp"
        )
        yield "training.recompute", found, allowed
    if t.recompute.mode == "selective_op" and is_gated(s.model.mlp) and not s.model.merged_projections:
        found = f"selective_op with {s.model.mlp} and separate projections (it keeps every second matmul's output)"
        yield (
            "training.recompute",
            found,
            "selective_op with model.merged_projections: true, as in the bundled layer",
        )
    if t.recompute.early_stop is False:
        yield "training.recompute.early_stop", "false", "true (what torch's checkpoint does)"
    if t.recompute.mode == "selective" and t.recompute.modules != ("core_attn",):
        yield "training.recompute.modules", list(t.recompute.modules), "core_attn"


def _attention(s: Scenario, t: Training) -> Iterator[Problem]:
    drops, cpu = t.attention == "fused" and s.model.dropout > 0, s.cluster.gpu.chip.is_host
    if drops and not cpu:
        yield "training.attention", f"fused, dropout {s.model.dropout:g}", "on GPUs fused without dropout, or unfused"
    if drops and t.recompute.mode == "selective_op":
        found = f"selective_op with fused attention, dropout {s.model.dropout:g}"
        yield "training.recompute", found, "none, selective, full; selective_op unfused or without dropout"
    mla = s.model.mla
    narrow = mla is not None and mla.v_head_dim != s.model.head_dim
    if mla is not None and narrow and t.attention == "fused" and (cpu or s.parallelism.cp > 1):
        found = f"fused with heads of {s.model.head_dim} and values of {mla.v_head_dim}"
        allowed = "unfused; on CPUs and with cp fused only if v_head_dim equals a query head's size"
        yield "training.attention", found, allowed
    if t.attention_kernel is not None:
        yield "training.attention_kernel", t.attention_kernel, "null (the kernel that torch picks)"


def _eight_bits(s: Scenario) -> Iterator[Problem]:
    """Check fp8: a tensor has one scale, and ranks with parts of it would have to agree on the largest value."""
    p, t = s.parallelism, s.for_training
    if not s.cluster.gpu.chip.is_host:
        rest = "8-bit matmuls are emulated in 16 bits, so their times would say nothing about a GPU"
        yield "training.precision", "fp8 on GPUs", f"bf16 on GPUs, fp8 on CPU ranks ({rest})"
    found = "fp8 with " + (f"tp {p.tp}, cp {p.cp}" if p.tp * p.cp > 1 else "experts")
    if p.tp * p.cp > 1 or s.model.moe is not None:
        yield "training.precision", found, "fp8 without tp, cp and experts (a tensor on several ranks has one scale)"
    if s.model.mla is not None:
        yield "training.precision", "fp8 with latent attention", "fp8 with query, key and value of one matrix"
    if p.pp > 1 and p.form.backward != "whole":
        whole = _names(lambda f: f.backward == "whole")
        yield "training.precision", f"fp8 with schedule {p.schedule}", f"fp8 with {whole}"
    if t.recompute.mode == "selective_op":
        yield "training.recompute", "selective_op with fp8", "none, selective, full"


def _layout(s: Scenario) -> Iterator[Problem]:
    p = s.parallelism
    if 0 in p.stage_layers[1:-1]:
        found = list(p.stage_layers)
        yield "parallelism.layers_per_stage", found, "at least one layer on every stage but the first and the last"
    if p.reduces_rows and s.micro_batches > 1:
        yield "parallelism.accumulate_in_a_row", "true", "false"
    if p.fsdp_version == 1 or not p.backward_prefetch:
        yield "parallelism.fsdp_version", "torch's first FSDP", "null, 2 (which gathers a layer ahead)"
    if p.fsdp_double_buffer:
        yield "parallelism.fsdp_double_buffer", "true", "false"
    if p.overlap_param_gather_with_optimizer_step:
        yield "parallelism.overlap_param_gather_with_optimizer_step", "true", "false"
    if p.wgrad_deferral_limit is not None:
        yield "parallelism.wgrad_deferral_limit", p.wgrad_deferral_limit, "null"
    if p.gather_bucket_bytes is not None:
        yield "parallelism.gather_bucket_bytes", p.gather_bucket_bytes, "null: a layer in one message"
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    if s.cluster.gpu.chip.is_host and p.ranks > most:
        yield (
            "parallelism",
            counted(p.ranks, "rank"),
            f"at most {most} here ({RANKS_PER_CORE} for each core)",
        )
    if not s.cluster.gpu.chip.is_host:
        from calibrate.machine import gpu_ranks

        if gpu_ranks() < p.ranks:
            yield "cluster", counted(p.ranks, "GPU"), f"cpu-host, or {counted(gpu_ranks(), 'CUDA device')}"


def _within_layers(s: Scenario) -> Iterator[Problem]:
    """Check tensor, sequence and context parallelism."""
    p, t = s.parallelism, s.training
    assert t is not None
    if p.cp > 1 and t.attention != "fused":
        yield "training.attention", f"{t.attention} with cp {p.cp}", "fused"
    if p.cp > 1 and (p.cp_method_by_layer is not None or p.hierarchical_context_parallel_sizes is not None):
        yield "parallelism.cp_method", "several", "ring, all_gather or all_to_all, the same in all layers"
    for key in ("fused_single_qkv_rope", "calculate_per_token_loss"):
        if getattr(t, key):
            yield f"training.{key}", "true", "false"
    for key in ("zero_hpz_partition_size", "zero_quantized_gradients"):
        if getattr(p, key):
            yield f"parallelism.{key}", str(getattr(p, key)).lower(), "left out"
    if p.outer_dp_sharding_strategy != "no_shard":
        yield "parallelism.outer_dp_sharding_strategy", p.outer_dp_sharding_strategy, "no_shard"
    if p.tp > 1 and p.p2p_scatter and p.pp > 1:
        yield "parallelism.p2p_scatter", "true", "false"
    if p.tp > 1 and p.tp_overlap != "none" and p.form.backward != "whole":
        whole = _names(lambda f: f.backward == "whole")
        yield "parallelism.tp_overlap", p.tp_overlap, f"none; wgrad and full at pp 1 or with schedules {whole}"
    if p.tp > 1 and p.sp and p.tp_overlap_except:
        yield "parallelism.tp_overlap_except", ", ".join(p.tp_overlap_except), "an empty list"
    tokens = t.micro_batch_size * t.seq_len // p.cp // (p.tp if p.sp else 1)
    if p.tp > 1 and p.tp_overlap == "full" and tokens < CHUNKS:
        yield "training.seq_len", f"{counted(tokens, 'token')} on a rank", f"at least {CHUNKS} with tp_overlap full"


def _routing(s: Scenario) -> Iterator[Problem]:
    p, t, moe = s.parallelism, s.training, s.model.moe
    if moe is None or t is None:
        return
    for name in ("groups", "top_groups", "max_nodes_per_token"):
        if getattr(moe, name) is not None:
            yield f"model.moe.{name}", getattr(moe, name), "null (each token chooses among all experts)"
    if moe.imbalance != "balanced":
        yield "model.moe.imbalance", moe.imbalance, "balanced"
    if moe.pad_to_capacity:
        yield "model.moe.pad_to_capacity", "true", "false"
    if moe.router_fp32 and t.precision != "fp32":
        found = f"true with precision {t.precision}"
        yield "model.moe.router_fp32", found, "false (the router multiplies in the activations' dtype)"
    copies = t.micro_batch_size * t.seq_len * moe.top_k
    if moe.capacity_factor is not None and (p.tp * p.cp > 1 or moe.capacity_factor * copies % moe.experts):
        found = f"{moe.capacity_factor:g} with {copies} token copies for {moe.experts} experts, tp {p.tp}, cp {p.cp}"
        yield "model.moe.capacity_factor", found, "null; without tp and cp also a whole number of an expert's copies"


def _expert_parallelism(s: Scenario) -> Iterator[Problem]:
    p, t, moe = s.parallelism, s.training, s.model.moe
    if moe is None or t is None:
        return
    inside = next((k for k in ("tp", "cp", "expert_tp") if getattr(p, k) > 1), None)
    if p.ep > 1 and p.ep_overlap and inside:
        found = f"true with {inside} {getattr(p, inside)}"
        yield "parallelism.ep_overlap", found, "false; true at tp, cp and expert_tp 1 (else threads share a group)"
    if p.ep > 1 and p.ep_dispatcher != "all_to_all":
        yield "parallelism.ep_dispatcher", p.ep_dispatcher, "all_to_all"
    if p.ep > 1 and p.ep_dispatch_dtype != t.precision:
        yield "parallelism.ep_dispatch_dtype", p.ep_dispatch_dtype, t.precision
    if p.ep > 1 and p.ep_overlap and not s.cluster.gpu.chip.is_host:
        yield "parallelism.ep_overlap", "true on GPUs", "false (two threads would share a stream)"
    if p.ep > 1 and p.ep_overlap and not p.delay_wgrad_compute:
        yield "parallelism.delay_wgrad_compute", "false", "true (two threads take turns as they come)"
    if p.ep > 1 and p.ep_overlap and t.recompute.mode != "none":
        yield "training.recompute", f"{t.recompute.mode} with ep_overlap", "none (a recomputation cannot overlap)"
    if p.tp > 1 and not p.sp:
        yield "parallelism.sp", "false with experts and tp above 1", "true"
    if p.cp > 1 and p.cp_split == "striped" and p.cp_method != "all_to_all":
        yield "parallelism.cp_split", "striped with experts", "contiguous, zigzag (striped makes experts uneven)"
    pieces = p.cp * p.tp * (2 if p.cp > 1 else 1)
    if t.micro_batch_size * t.seq_len // pieces * moe.top_k % moe.experts:
        found = f"{t.seq_len} tokens in {pieces} pieces, {moe.top_k} of {moe.experts} experts for each"
        yield "training.seq_len", found, "a length that gives every expert equally many token copies"
