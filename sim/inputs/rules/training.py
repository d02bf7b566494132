"""Rules between keys of a training step: its number formats, optimizer, recomputation and batches."""

from __future__ import annotations

from sim.core.dtypes import MUON_DTYPE, sixteen_bit
from sim.core.errors import InputError
from sim.inputs.autocast import adapter_casts, casts_on_use, not_under_autocast
from sim.inputs.input_source import Problems, show
from sim.inputs.model_config import ModelConfig
from sim.inputs.rules.cuda_graphs import captured_parts
from sim.inputs.rules.fsdp import torch_fsdp
from sim.inputs.rules.layers_apart import layers_in_sixteen_bits, offloaded_parts, waiting_layers
from sim.inputs.rules.layout import batch, first_problem, micro_batches
from sim.inputs.rules.megatron_keys import MEGATRON_KEYS
from sim.inputs.rules.megatron_pipeline import deferred_gradients, gathers_beside_optimizer
from sim.inputs.rules.needs import accumulates, needs_framework, quantizes_by_engine, unmet
from sim.inputs.rules.packing import packing
from sim.inputs.rules.stored_parameters import eight_bit_parameters, remainders
from sim.inputs.sections import Sections, sizes_of
from sim.inputs.training_config import Recompute, Training
from sim.inputs.zero_keys import can_gather_integers
from sim.variants.activations import ACTIVATIONS
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import OPTIMIZERS
from sim.variants.recipes import recipe_of
from topology.architectures import ARCHITECTURES

FUSES_EXPERTS = [name for name, chip in ARCHITECTURES.items() if chip.fuses_experts]


def training_problems(sections: Sections, t: Training) -> Problems:
    """Return what is wrong with a training step."""
    for rule in (
        _dtypes,
        _attention_kernel,
        _autocast,
        _indexer,
        packing,
        _recipe,
        _gathers,
        _optimizer,
        _post_validation,
        _four_bits,
        _frozen_experts,
        _fused_experts,
        _accumulation_fusion,
        _experts_apart,
        _fp8_attention,
        _adamw_kernels,
        _fp8_activation_input,
        layers_in_sixteen_bits,
        offloaded_parts,
        _output,
        eight_bit_parameters,
        remainders,
        waiting_layers,
        captured_parts,
        *MEGATRON_KEYS,
        torch_fsdp,
        gathers_beside_optimizer,
        deferred_gradients,
        _recompute,
        _loss,
        _batches,
    ):
        yield from rule(sections, t)


def _dtypes(_: Sections, t: Training) -> Problems:
    allowed = tuple(dict.fromkeys((sixteen_bit(t.precision), "fp32")))
    if t.param_dtype not in allowed:
        why = f"precision {t.precision} keeps parameters in {' or '.join(allowed)}"
        yield ("training", "param_dtype"), f"found '{t.param_dtype}'; {why}"


def _attention_kernel(_: Sections, t: Training) -> Problems:
    """No fused kernel by name for fp32: they take 16 bits (flash-attention: csrc/flash_attn/flash_api.cpp,
    flash_attn_triton.py; cuDNN's in torch: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    if t.precision == "fp32" and t.attention == "fused" and t.attention_kernel is not None:
        why = "it takes queries, keys and values in 16 bits, and precision is fp32"
        yield ("training", "attention_kernel"), f"found '{t.attention_kernel}'; {why}"


def _autocast(sections: Sections, t: Training) -> Problems:
    """Autocast casts whole fp32 parameters, and not what was not followed through its lists."""
    if not t.autocast:
        return
    path, p, model = ("training", "autocast"), sections.parallelism, sections.model
    if adapter_casts(t, p):
        return
    if not casts_on_use(t, p, model):
        given = "a captured program has its own" if model.program is not None else f"zero {p.zero}"
        why = "it casts whole fp32 parameters (training.param_dtype fp32, precision bf16 or fp16, zero below 3)"
        yield path, f"found true with param_dtype {t.param_dtype}, precision {t.precision}, {given}; {why}"
    elif bad := not_under_autocast(t, p, model):
        yield path, f"found true; not simulated with {bad}"


def _indexer(sections: Sections, t: Training) -> Problems:
    """No training of indexers that the model lacks, and no warm-up that is not simulated."""
    if t.indexer == "trained":
        return
    path, found = ("training", "indexer"), f"found '{t.indexer}'"
    if sections.model.indexer is None:
        yield path, f"{found}; needs model.indexer"
    if t.indexer == "warm_up" and "reused" in sections.model.attention_pattern:
        yield path, f"{found}; not simulated with layers of kind reused; allowed: trained, frozen"
    if t.indexer == "warm_up" and sections.model.compressed_attention is not None:
        yield path, f"{found}; not simulated with model.compressed_attention; allowed: trained, frozen"
    if t.indexer == "warm_up" and (sections.parallelism.pp > 1 or framework_of(t).masks_unselected):
        why = "simulated only at pp 1 (stages would exchange no gradients) and in frameworks that train indexers"
        yield path, f"{found}; {why}"


def _recipe(_: Sections, t: Training) -> Problems:
    """A recipe that the framework has for the precision."""
    try:
        recipe_of(t)
    except InputError as error:
        yield ("training", "fp8_recipe"), str(error)


def _gathers(sections: Sections, t: Training) -> Problems:
    """Parameters are gathered in the 16 bits that they are used in, or in fp8 where a recipe casts shards."""
    p, recipe = sections.parallelism, None if t.lora is not None else recipe_of(t)
    path, used = ("parallelism", "param_gather_dtype"), sixteen_bit(t.precision)
    if p.param_gather_dtype == "fp8" and not (p.zero == 3 and recipe is not None and recipe.shards_quantized):
        yield path, "found 'fp8'; needs zero 3, precision fp8, torchao's recipe tensorwise and no lora"
    if p.param_gather_dtype == "int8" and not can_gather_integers(t, p):
        yield path, "found 'int8'; needs zero 3, a framework of DeepSpeed, precision bf16 or fp16, and no nf4"
    if p.param_gather_dtype == "bf16" and used != "bf16":
        yield path, f"found 'bf16'; with precision {t.precision} parameters are used in {used}"


def _optimizer(sections: Sections, t: Training) -> Problems:
    """Muon's matrices and their gradients are whole on a rank, and multiplied in bf16. A captured program's states stay
    where they are."""
    optimizer = OPTIMIZERS[t.optimizer]
    if t.optimizer_offload and sections.model.program is not None:
        yield ("training", "optimizer_offload"), f"found {show(t.optimizer_offload)}; a captured program's states stay"
    if t.optimizer_offload == "cpu":
        if not optimizer.on_host:
            yield ("training", "optimizer_offload"), f"found 'cpu'; on the host adamw is simulated, not {t.optimizer}"
        if sections.cluster.host_memory_bandwidth_bytes_per_s is None:
            wanted = "training.optimizer_offload cpu needs the bandwidth of the memory of a node's CPUs"
            yield ("cluster", "host_memory_bandwidth_bytes_per_s"), f"is missing; {wanted}"
    if not optimizer.whole_matrices:
        return
    if why := sections.without_peak(MUON_DTYPE):
        yield ("training", "optimizer"), f"found '{t.optimizer}', which multiplies in {MUON_DTYPE}; {why}"
    zero = sections.parallelism.zero
    if zero >= 2:
        why = "Muon needs a matrix's whole gradient: zero 0 or 1"
        yield ("parallelism", "zero"), f"found {zero}; {why}"
    if t.lora is not None:
        yield ("training", "optimizer"), f"found '{t.optimizer}'; adapters (training.lora) are simulated without Muon"
    if sections.model.program is not None:
        yield ("training", "optimizer"), f"found '{t.optimizer}'; a captured program has its own optimizer"


def _post_validation(sections: Sections, t: Training) -> Problems:
    """Post-validation is about ranks of a pipeline, whose messages do not keep them in step."""
    path, p = ("training", "optimizer_post_validation"), sections.parallelism
    if t.optimizer_post_validation and p.pp == 1:
        yield path, "found true; needs a pipeline (parallelism.pp above 1)"
    if t.optimizer_post_validation and not p.p2p_overlap:
        yield path, f"found true; needs parallelism.p2p_overlap true (schedule {p.schedule} has false by default)"


def _four_bits(sections: Sections, t: Training) -> Problems:
    """Frozen weights in 4 bits are multiplied in 16, and those in 8 bits beside 16-bit ones."""
    if t.lora is None:
        return
    if t.lora.quantized_experts and (t.lora.weights is None or sections.model.moe is None):
        why = "needs training.lora.weights, and a model with experts"
        yield ("training", "lora", "quantized_experts"), f"found true; {why}"
    if t.lora.weights is None:
        return
    path = ("training", "lora", "weights")
    if sixteen_bit(t.precision) != t.precision:
        yield path, f"found '{t.lora.weights}'; precision {t.precision} multiplies in 8 bits or less"


def _frozen_experts(sections: Sections, t: Training) -> Problems:
    """Experts without gradients are cut over the ranks that all other parameters are cut over."""
    p = sections.parallelism
    if t.lora is not None and sections.model.moe is not None and p.zero == 3 and p.ep * p.expert_tp != p.tp:
        why = "frozen experts are simulated sharded as other parameters: zero below 3, or ep·expert_tp = tp"
        yield ("parallelism", "zero"), f"found {p.zero}; {why}"


def _fused_experts(sections: Sections, t: Training) -> Problems:
    """Transformer Engine fuses gated experts and those of a squared ReLU, in some formats and on some GPUs.
    They compute the activation within a matmul, so it cannot be recomputed by itself."""
    if not t.fused_experts:
        return
    model = sections.model
    activation = ACTIVATIONS[(model.moe and model.moe.activation) or model.mlp]
    again = t.recompute.modules if t.recompute.mode == "selective" else ()
    needs = (
        (model.moe is not None, "model.moe"),
        (activation.gated or activation.in_experts, "experts with a gated activation or relu2"),
        (_in_fused_experts(t), "training.precision mxfp8, or nvfp4 of Transformer Engine since 2.17 (July 2026)"),
        needs_framework(t, quantizes_by_engine),
        (sections.cluster.gpu.chip.fuses_experts, f"GPUs of architecture {' or '.join(FUSES_EXPERTS)}"),
        ("moe_act" not in again, "recompute without module moe_act"),
        (t.lora is None, "training without lora"),
    )
    yield from unmet(("training", "fused_experts"), True, needs)


def _in_fused_experts(t: Training) -> bool:
    recipe = recipe_of(t)
    return recipe is not None and (recipe.fuses_experts or recipe.quantizer != "te")


def _experts_apart(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's experts without --moe-grouped-gemm."""
    if t.moe_grouped_gemm is None:
        return
    needs = (
        (sections.model.moe is not None, "model.moe"),
        needs_framework(t, lambda framework: framework.runs_experts_apart),
        (not t.fused_experts, "training.fused_experts false"),
    )
    yield from unmet(("training", "moe_grouped_gemm"), False, needs)


def _accumulation_fusion(_: Sections, t: Training) -> Problems:
    """Only Megatron-Core's linear layers have this fusion (core/tensor_parallel/layers.py)."""
    if t.gradient_accumulation_fusion is not None:
        yield from unmet(("training", "gradient_accumulation_fusion"), False, (needs_framework(t, accumulates),))


def _fp8_attention(sections: Sections, t: Training) -> Problems:
    """cuDNN's kernels in 8 bits, which Transformer Engine alone runs, and of packed sequences not with its context
    parallelism (pytorch/attention/dot_product_attention/utils.py: get_attention_backend)."""
    if not t.fp8_dot_product_attention:
        return
    documents = t.packing is not None and sections.parallelism.cp > 1
    needs = (
        needs_framework(t, quantizes_by_engine),
        (recipe_of(t) is not None, "training.precision fp8, mxfp8 or nvfp4"),
        (t.attention != "unfused", "training.attention fused"),
        (not documents, "sequences of one document, or cp 1"),
        (sections.model.program is None, "a described model; a captured program has its own attention"),
    )
    yield from unmet(("training", "fp8_dot_product_attention"), True, needs)


def _adamw_kernels(_: Sections, t: Training) -> Problems:
    """Only torch's own AdamW has kernels to choose from."""
    allowed = framework_of(t).adamw_kernels
    if t.adamw_kernels is not None and t.adamw_kernels not in allowed:
        what = f"allowed: {', '.join(allowed)}" if allowed else "it has an AdamW of its own"
        yield ("training", "adamw_kernels"), f"found '{t.adamw_kernels}' with framework {t.framework}; {what}"


def _fp8_activation_input(sections: Sections, t: Training) -> Problems:
    """Megatron-Core stores the input of fused SwiGLU alone (transformer_config.py: `activation_func_fp8_input_store`),
    which fused experts' kernels do not keep."""
    if not t.activation_func_fp8_input_store:
        return
    model = sections.model
    used = {model.mlp, (model.moe and model.moe.activation) or model.mlp}
    needs = (
        (used == {"swiglu"}, "model.mlp swiglu"),
        needs_framework(t, lambda framework: framework.fuses_activation),
        (t.bias_activation_fusion is not False, "training.bias_activation_fusion null"),
        (not t.fused_experts, "training.fused_experts false"),
        (model.program is None, "a described model; a captured program keeps what it keeps"),
    )
    yield from unmet(("training", "activation_func_fp8_input_store"), True, needs)


def _output(sections: Sections, t: Training) -> Problems:
    """Transformer Engine's linear layer in the place of the output projection, for MXFP8 alone."""
    if not t.fp8_output_proj:
        return
    needs = (
        (t.precision == "mxfp8", "training.precision mxfp8"),
        needs_framework(t, quantizes_by_engine),
        (t.cross_entropy != "chunked", "a training.cross_entropy other than chunked"),
        (t.lora is None, "training without lora"),
        (not sections.model.tied_embeddings, "a model whose output projection is not its embedding"),
    )
    yield from unmet(("training", "fp8_output_proj"), True, needs)


def _recompute(sections: Sections, t: Training) -> Problems:
    path, recompute, model = ("training", "recompute"), t.recompute, sections.model
    if recompute.layers is not None and recompute.every is not None:
        yield path, "found both layers and every; give one of the two"
    for key in ("layers", "every", "early_stop"):
        takes = ("full", "selective_op") if key == "early_stop" else ("full",)
        if getattr(recompute, key) is not None and recompute.mode not in takes:
            only = f"only mode {' or '.join(takes)} takes it"
            yield (*path, key), f"cannot be given with mode {recompute.mode}; {only}"
    if recompute.early_stop and framework_of(t).checkpoint_stops_early is None:
        yield (*path, "early_stop"), f"found true; framework {t.framework} runs whole layers again"
    if recompute.early_stop is False and framework_of(t).uses_torch_compile:
        why = f"with framework {t.framework}, torch.compile leaves out of the backward what no gradient needs"
        yield (*path, "early_stop"), f"found false; {why}"
    yield from _modules(recompute, model)
    if recompute.layers is not None and recompute.layers > model.layers:
        yield (*path, "layers"), f"found {recompute.layers}; must be at most model.layers ({model.layers})"


def _modules(recompute: Recompute, model: ModelConfig) -> Problems:
    """No parts that the model lacks, and no `modules` with a mode other than selective."""
    path, modules = ("training", "recompute", "modules"), recompute.modules
    usual = Recompute.model_fields["modules"].default  # which resolved scenarios write out for every mode
    if modules != usual and recompute.mode != "selective":
        yield path, f"cannot be given with mode {recompute.mode}; only mode selective takes it"
    if len(set(modules)) < len(modules):
        yield path, f"found {list(modules)}; each at most once"
    shared = model.moe is not None and model.moe.shared_width > 0
    for name, there, needed in (
        ("moe", model.moe is not None, "model.moe"),
        ("moe_act", model.moe is not None, "model.moe"),
        ("shared_experts", shared, "shared experts in model.moe"),
        ("mla_up_proj", model.mla is not None, "model.mla"),
        ("mlp", model.has_dense_layers, "layers with a dense MLP"),
    ):
        if name in modules:
            yield from unmet(path, name, ((there, needed),))


def _loss(sections: Sections, t: Training) -> Problems:
    path, d = ("training", "cross_entropy"), sections.distillation
    if t.cross_entropy == "native":
        own = needs_framework(t, lambda framework: framework.native_loss is not None)
        yield from unmet(path, "native", (own,))
    if t.cross_entropy in ("chunked", "tiled") and d is not None and d.mode == "logits":
        yield path, f"found '{t.cross_entropy}'; distillation.mode logits needs all logits (unfused or fused)"
    if t.loss_chunks is not None and t.cross_entropy != "chunked":
        yield (
            ("training", "loss_chunks"),
            f"found {t.loss_chunks}; needs cross_entropy chunked, found {t.cross_entropy}",
        )


def _batches(sections: Sections, t: Training) -> Problems:
    """A schedule of batches starts with the first token, grows in tokens to less than all, and every batch is legal."""
    path, schedule = ("training", "batch_schedule"), t.batch_schedule
    if not schedule:
        return
    if t.tokens is None:
        yield path, "found phases without training.tokens, which says where the last one ends"
        return
    starts = [phase.from_tokens for phase in schedule]
    if starts[0] != 0:
        yield (*path, 0, "from_tokens"), f"found {starts[0]:g}; the first phase starts at 0"
    for i, (before, start) in enumerate(zip(starts, [*starts[1:], t.tokens], strict=True), 1):
        if start <= before:
            where = (*path, i, "from_tokens") if i < len(starts) else ("training", "tokens")
            yield where, f"found {start:g}; must be above {before:g}, where the phase before starts"
    for i, phase in enumerate(schedule):
        changed = t.model_copy(update={"global_batch_size": phase.global_batch_size})
        if problem := first_problem((batch, micro_batches), sizes_of(sections._replace(training=changed))):
            yield (*path, i, "global_batch_size"), problem[1]
