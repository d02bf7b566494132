"""What may differ between training frameworks: one fact a field, with plain torch's value, meaning and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar


class UnfusedLoss(NamedTuple):
    """The kernels of `cross_entropy: unfused`. Bytes are those of one logit, e of them to a 16-bit number.

    Forward moves a copy to fp32 (e + 4, where `copies`), `reads` times e, and `forward_bytes`; backward the copy back
    (4 + e, or e where the last kernel casts by itself), and `backward_bytes`.
    """

    forward_kernels: int
    backward_kernels: int
    forward_bytes: float
    backward_bytes: float
    copies: bool = True
    reads: int = 0
    in_place: bool = False  # the fp32 logits become the softmax and then the gradient
    gradient_in_place: bool = False  # the softmax, a tensor of its own, becomes the gradient
    forward_token_kernels: int = 0  # beside those over all logits, on one number a token
    backward_token_kernels: int = 0


class RouterKernels(NamedTuple):
    """What an expert layer's router launches besides its matmul: scores, choice, auxiliary loss, records of it.

    By token and expert: accesses of the layer's own dtype, and bytes of fp32 and less. `capacity_kernels`, forward:
    more where experts have a capacity. `group_kernels` and `group_bytes`, forward and backward: more where groups are
    chosen first."""

    forward_kernels: int
    backward_kernels: int
    forward_accesses: int
    forward_bytes: float
    backward_accesses: int
    backward_bytes: float
    capacity_kernels: int = 0
    group_kernels: tuple[int, int] = (0, 0)
    group_bytes: tuple[float, float] = (0.0, 0.0)


TORCH_LOSS = UnfusedLoss(7, 4, 32.0, 16.0)
# 16-bit logits, scores in fp32: softmax forward (3), backward (2). With groups (transformers/models/deepseek_v3/
# modeling_deepseek_v3.py: DeepseekV3TopkRouter), fp32 scores: each group's best two (4 bytes), sorted, and their sum;
# top-k of groups; zeros and ones of them; ones copied to experts (4), as booleans (5), inverted (2); scores copied (8)
# and masked (9). Only indices come of it, so that nothing goes backward.
PLAIN_ROUTER = RouterKernels(3, 2, 1, 8.0, 1, 8.0, group_kernels=(11, 0), group_bytes=(32.0, 0.0))
# A compiler copies, converts, inverts and masks in one kernel (8 bytes).
COMPILED_ROUTER = PLAIN_ROUTER._replace(group_kernels=(7, 0), group_bytes=(12.0, 0.0))
AttentionKernel = Literal["flash1", "flash2", "flash3", "cudnn", "triton"]  # those that a scenario may name
T = TypeVar("T")


def fact(default: T, meaning: str, source: str) -> T:
    """A field of `Framework`: plain torch's value, what it means, and where it is to be seen.

    `core/` is megatron/core of Megatron-LM, `TE` is transformer_engine/pytorch.
    """
    found: T = field(default=default, metadata={"meaning": meaning, "source": source})
    return found


class Former(NamedTuple):
    """Facts of releases before the month `until` ("2025-02"), by name, and where that is to be seen."""

    until: str
    facts: Mapping[str, object]
    source: str


@dataclass(frozen=True, slots=True)
class Framework:
    """The facts of one framework; those that a record leaves out are plain torch's. `name`: the key's value."""

    name: str

    fuses_rmsnorm: bool = fact(False, "RMSNorm is one kernel, not eight", "TE module/rmsnorm.py; torch.compile")
    fuses_rope: bool = fact(False, "rope is one kernel a tensor, not five", "TE attention/rope.py")
    fuses_latent_rope: bool = fact(
        False,
        "rope of latent attention, whose pairs lie interleaved, is one kernel a tensor",
        "core/models/common/embeddings/rope_utils.py: apply_rotary_pos_emb; its own kernel is experimental",
    )
    fuses_activation: bool = fact(
        False, "SwiGLU and squared ReLU are one kernel, not two", "core/fusions/fused_bias_swiglu.py"
    )
    clamps_apart: bool = fact(
        False,
        "both halves of a gated activation are clamped and joined again by operators before its kernel",
        "core/fusions/fused_bias_geglu.py: weighted_bias_quick_geglu_impl",
    )
    fuses_residual: bool = fact(
        False, "bias, dropout and residual sum are one kernel", "core/fusions/fused_bias_dropout.py"
    )
    fuses_adapter_sum: bool = fact(False, "scaling and sum of a LoRA adapter are one kernel", "peft has two")
    fuses_chains: bool = fact(False, "a chain without a matmul in it is one kernel", "torch._inductor")
    rebuilds_pointwise: bool = fact(
        False, "backward rebuilds outputs of norms and activations, which are not kept", "torch._functorch.partitioners"
    )
    norm_backward_accesses: int = fact(
        5, "accesses an element in a norm's backward; 3: one pass serves both gradients", "TE common/normalization"
    )
    norm_backward_kernels: int = fact(
        2, "kernels of a norm's backward, those that make and add up its weight's gradient among them", "torch's own"
    )
    reads_strided: bool = fact(
        False,
        "activations read halves of one matmul's result where they lie, and 16-bit gradients are added to fp32 sums: "
        "kernels that torch does not vectorize",
        "nanotron: models/llama.py; torch: aten/src/ATen/native/cuda/CUDALoops.cuh",
    )
    norms_keep_operators: bool = fact(
        False, "a norm of separate operators keeps its fp32 copy and the normalized value", "LlamaRMSNorm"
    )
    softmax_in_fp32: bool = fact(
        False, "unfused softmax is taken in fp32 and cast back, and both are kept", "eager_attention_forward"
    )
    repeats_keys: bool = fact(False, "unfused attention repeats key and value heads for every query head", "repeat_kv")
    keeps_merged_outputs: bool = fact(
        False, "a value cut from a projection that also makes other things keeps all of its output", "torch.split"
    )
    keeps_ordered_heads: bool = fact(
        False,
        "queries stay in one tensor with keys and values put in order, of which the kernel reads copies (equal heads)",
        "nanotron: models/llama.py, CausalSelfAttention.forward",
    )
    output_follows_queries: bool = fact(
        False, "attention's output lies as queries put together anew do, and is copied for the next matmul", "torch.cat"
    )
    casts_routers: bool = fact(
        False, "a router in fp32 keeps the copy of its input; else its own function casts", "x.float()"
    )
    routing_bytes: float = fact(
        4.0, "indices and weights kept of each token copy in an expert layer", "permutation of 32 bits"
    )
    skips_masked_scores: bool = fact(
        False, "unfused softmax reads only what the causal mask leaves", "core/fusions/fused_softmax.py"
    )
    masks_unselected: bool = fact(
        False,
        "sparse attention is dense attention under a mask, its indexer without a gradient",
        "transformers/models/deepseek_v32/modular_deepseek_v32.py",
    )
    attention_kernel: str = fact(
        "", "whose coefficients fused attention has, where the profile knows them", "sim.prices.attention_speed"
    )
    attention_copies: int = fact(
        0, "copies as large as the queries around the fused kernel, to order or to pack tokens", "each trainer's own"
    )
    attention_copy_kernels: tuple[int, int] = fact(
        (1, 1), "kernels of these forward, with those on sequences' lengths, and backward", "each trainer's own"
    )
    loss: UnfusedLoss = fact(  # noqa: RUF009  a tuple
        TORCH_LOSS, "kernels of the unfused loss, forward and backward", "core/tensor_parallel/cross_entropy.py"
    )

    merges_projections: bool = fact(
        False, "query, key, value are one matmul, as gate and up are", "core/transformer/attention.py: linear_qkv"
    )
    starts_with_own_rows: bool = fact(
        False,
        "where communication overlaps (`tp_overlap`), a matmul of gathered rows does its own while others arrive",
        "nanotron: parallel/tensor_parallel/functional.py",
    )
    accumulates_in_matmul: bool = fact(
        False, "a weight gradient's matmul adds to what is kept", "core: gradient_accumulation_fusion"
    )
    keeps_empty_gradients: bool = fact(
        False, "an empty gradient stays for each shape of a weight matrix", "TE module/base.py: get_dummy_wgrad"
    )
    quantizer: str = fact("torchao", "whose kernels quantize, `te` or `torchao`", "sim.models.recipes")
    fp8_recipe: str = fact(
        "tensorwise", "`training.fp8_recipe` where nothing is said", "training/arguments.py; torchao Float8LinearConfig"
    )
    grad_dtype: str = fact("fp32", "`training.grad_dtype` where nothing is said", "training/arguments.py; FSDP's own")
    cross_entropy: str = fact("unfused", "`training.cross_entropy` where nothing is said", "training/arguments.py")
    skips_transposes: bool = fact(
        False,
        "8-bit tensors of one scale have no transposed copy where matmuls read both orders (Blackwell)",
        "TE common/util: is_non_tn_fp8_gemm_supported",
    )
    weights_experts_after_activation: bool = fact(
        False,
        "the router's weight multiplies the activation, not the result",
        "core/transformer/moe/experts.py",
    )
    router: RouterKernels = fact(  # noqa: RUF009  a tuple
        PLAIN_ROUTER, "kernels of an expert layer's router, forward and backward", "core/transformer/moe/router.py"
    )
    loops_over_experts: bool = fact(
        False,
        "a grouped matmul and the quantizing of its operands are launches of each expert, in a loop",
        "TE common/gemm: multi_stream_cublas_gemm; pytorch/csrc/extensions/cast.cpp: multi_tensor_quantize_impl",
    )
    pads_experts: bool = fact(
        False,
        "rows of 8-bit grouped matmuls are copied to fill each expert's up to its tile, and back",
        "TE module/fp8_padding.py",
    )
    biases_experts_one_by_one: bool = fact(
        False,
        "an expert's second bias, weighted for each row, is added expert by expert",
        "core/transformer/moe/experts.py: TEGroupedMLP._apply_bias",
    )
    sends_probabilities: bool = fact(
        False,
        "the router's fp32 weights of copies go to their experts by an all-to-all of their own",
        "core/transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher.token_dispatch",
    )
    counts_copies: bool = fact(
        False,
        "copies for each expert are counted and the counts gathered before an exchange",
        "core/transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher.preprocess",
    )
    splits_experts_over_tp: bool = fact(
        False, "experts are split over tp where nothing is said of `expert_tp`: a warning", "training/arguments.py"
    )
    engine_workspaces: int = fact(
        0, "cuBLAS workspaces beside torch's", "TE module/base.py: get_cublas_workspace_size_bytes"
    )
    grouped_streams: int = fact(
        0, "streams of grouped matmuls, each with such a workspace", "TE common/gemm: multi_stream_cublas_gemm"
    )

    adamw_by_operators: bool = fact(
        False, "AdamW is nine kernels a tensor", "composer/optim/decoupled_weight_decay.py: adamw"
    )
    adds_gradients_late: bool = fact(
        False,
        "a backward's 16-bit gradients are added to fp32 sums when it has ended; at ZeRO-0 DDP's buckets hold as many",
        "nanotron: optim/gradient_accumulator.py, `backward`; trainer.py, `make_ddp`",
    )
    all_reduces_at_zero_1: bool = fact(
        False,
        "ZeRO-1 sums whole gradients on every rank, all at once when the last backward has ended",
        "nanotron: trainer.py, `make_ddp`; sync_gradients_across_dp",
    )
    checkpoint_stops_early: bool = fact(
        True, "under ZeRO-3 recomputation ends at the last tensor needed", "torch.utils.checkpoint: early_stop"
    )
    checks_gradients: bool = fact(False, "the gradient buffer is read for NaNs", "core/distributed: check_grads")
    averages_gradients: bool = fact(
        False, "the buffer is scaled to a mean before reduction, not by NCCL", "core/distributed: start_grad_sync"
    )
    zeroes_gradients: bool = fact(
        False, "the buffer is zeroed, where torch frees gradients", "core/distributed: zero_grad_buffer"
    )

    communicators: tuple[tuple[str, ...], ...] = fact(
        (), "axes that a NCCL communicator of its own joins; none: not counted", "sim.results.beside_allocator"
    )
    small_messages: tuple[int, int] = fact(
        (0, 0),
        "small messages beside a stage's output and beside its gradient, one after the other, both hosts waiting",
        "nanotron: parallel/pipeline_parallel/p2p.py, `_send_meta`",
    )
    plain_host: bool = fact(
        True, "a kernel costs the host `host_operator_eager_s`; else `host_operator_s`", "docs/calibration.md"
    )
    uses_torch_compile: bool = fact(False, "torch.compile writes its kernels", "torchtitan: training.compile")
    emitted_for: tuple[str, ...] = fact((), "trainers whose flags can express it", "sim.emit")
    measurable: bool = fact(False, "calibrate.measure can run a step so", "calibrate.runnable")

    kin: str = fact("", "the record whose code base it shares: one in `evidence`", "")
    former: tuple[Former, ...] = ()  # newest first
