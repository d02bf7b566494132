"""What a training framework does its own way: which operators share a kernel, what is kept, who adds up gradients.

`training.framework` names one of `FRAMEWORKS`. Adding a framework is one more record there: the key's allowed values,
the JSON Schema and `--explain` follow from the dict, and nothing else in the simulator asks for a framework's name.

A record holds what releases of today do; `former` what older ones did, until when. `training.software_date` says which
are meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple, Protocol, TypeVar


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


TORCH_LOSS = UnfusedLoss(7, 4, 32.0, 16.0)
# megatron/core/tensor_parallel/cross_entropy.py. On one number a token, forward: targets' mask (3), their place in this
# shard (4), their logits (4), logarithm and difference (2), mean over the text's mask and over replicas (6); backward:
# the target's one subtracted (6), the mean's gradient (3) (`loss_func` in pretrain_gpt.py).
MEGATRON_LOSS = UnfusedLoss(6, 2, 32.0, 8.0, in_place=True, forward_token_kernels=19, backward_token_kernels=9)
# nanotron: parallel/tensor_parallel/functional.py, after Megatron's; but the maximum is subtracted into a new tensor.
NANOTRON_LOSS = MEGATRON_LOSS._replace(in_place=False, gradient_in_place=True)
COMPILED_LOSS = UnfusedLoss(3, 1, 4.0, 4.0, copies=False, reads=2)


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


# 16-bit logits, scores in fp32: softmax forward (3), backward (2).
PLAIN_ROUTER = RouterKernels(3, 2, 1, 8.0, 1, 8.0)
# megatron/core/transformer/moe/moe_utils.py and router.py. Forward: softmax, top-k and its sort, cast, probabilities
# (3) and map (5) written to [tokens, experts]; the auxiliary loss's own scores (8: softmax, top-k, sort, map), tokens
# of each expert, four kernels of the loss, three of its record. Backward: gather, cast, top-k (2), softmax, cast; of
# the auxiliary loss scale (2), product (3), softmax, cast, and the sum of both gradients. With a capacity: top-k of
# probabilities over tokens, its mask (4), product. 9 accesses of the layer's dtype and 55 bytes; 5 and 40. With groups
# (`group_limited_topk`): each group's best scores, sorted, and their sum; top-k of groups; their mask (2), copied to
# experts, cast, inverted; scores copied and masked. Backward: the masked scores' gradient copied and masked.
MEGATRON_ROUTER = RouterKernels(
    28, 14, 9, 55.0, 5, 40.0, capacity_kernels=6, group_kernels=(11, 2), group_bytes=(28.0, 13.0)
)
# `moe_router_fusion`, Transformer Engine from 2.6 on: choice, scores of the loss, tokens of each expert, the loss and
# its record (3); random logits (2) where the balance is forced. Backward: both kernels, the loss's, its scale, the sum.
FUSED_ROUTER = RouterKernels(9, 6, 2, 16.0, 2, 16.0, capacity_kernels=6)


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
        "copies for each expert are counted and the counts gathered before an exchange without a capacity",
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


_MEGATRON = Framework(
    "megatron",  # Megatron-Core with Transformer Engine's layers
    fuses_rmsnorm=True,
    fuses_rope=True,
    fuses_activation=True,
    clamps_apart=True,
    fuses_residual=True,
    fuses_adapter_sum=True,
    norm_backward_accesses=3,
    skips_masked_scores=True,
    attention_kernel="megatron",
    loss=MEGATRON_LOSS,
    merges_projections=True,
    accumulates_in_matmul=True,
    keeps_empty_gradients=True,
    quantizer="te",
    fp8_recipe="delayed",
    skips_transposes=True,
    weights_experts_after_activation=True,
    sends_probabilities=True,
    counts_copies=True,
    router=MEGATRON_ROUTER,
    loops_over_experts=True,
    pads_experts=True,
    biases_experts_one_by_one=True,
    splits_experts_over_tp=True,
    engine_workspaces=1,
    grouped_streams=4,
    checkpoint_stops_early=False,
    checks_gradients=True,
    averages_gradients=True,
    zeroes_gradients=True,
    plain_host=False,
    emitted_for=("megatron",),
    former=(
        Former("2025-02", {"skips_transposes": False}, "Transformer Engine 2.0"),
        Former(
            "2024-01",
            {"keeps_empty_gradients": False, "engine_workspaces": 0, "grouped_streams": 0},
            "megatron/arguments.py of 2023: `--transformer-impl` is local, which is without Transformer Engine",
        ),
    ),
)
_RECORDS = (
    Framework("eager", emitted_for=("torchtitan", "megatron"), measurable=True),
    _MEGATRON,
    replace(  # NVIDIA's recipes for it: scripts/performance of NeMo-Megatron-Bridge set `apply_rope_fusion`
        _MEGATRON,
        name="megatron_bridge",
        kin="megatron",
        fuses_latent_rope=True,  # with Megatron-Core's experimental kernels
        router=FUSED_ROUTER,  # configs: moe_router_fusion
        checks_gradients=False,  # utils/helpers.py: check_for_nan_in_grad
        averages_gradients=False,  # recipes: average_in_collective
        grad_dtype="bf16",  # set_*_common_configs: grad_reduce_in_fp32 False
        cross_entropy="fused",  # utils/helpers.py: cross_entropy_fusion_impl te
    ),
    Framework(
        "compiled",  # plain torch code under torch.compile
        fuses_rmsnorm=True,
        fuses_rope=True,
        fuses_activation=True,
        fuses_residual=True,
        fuses_adapter_sum=True,
        fuses_latent_rope=True,
        fuses_chains=True,
        rebuilds_pointwise=True,
        attention_kernel="compiled",
        loss=COMPILED_LOSS,
        uses_torch_compile=True,
        emitted_for=("torchtitan",),
        former=(
            Former("2025-05", {"attention_kernel": "torch_2024"}, "torchtitan: ScaledDotProductAttention.backends"),
        ),
    ),
    Framework(
        "transformers",  # Hugging Face Transformers' own modules, each torch operator a kernel
        norms_keep_operators=True,  # transformers/models/llama/modeling_llama.py: LlamaRMSNorm
        softmax_in_fp32=True,  # the same file: eager_attention_forward
        repeats_keys=True,  # the same file: repeat_kv
        keeps_merged_outputs=True,
        output_follows_queries=True,
        masks_unselected=True,
        casts_routers=True,  # transformers/models/deepseek_v3/modeling_deepseek_v3.py: DeepseekV3TopkRouter
        # transformers/integrations/moe.py: grouped_mm_experts_forward; four 64-bit indices, one fp32 weight
        routing_bytes=36.0,
    ),
    Framework(
        "composer",  # MosaicML's llm-foundry: torch's FSDP
        quantizer="te",  # composer/trainer/trainer.py: `amp_fp8` is te.fp8_autocast with DelayedScaling
        fp8_recipe="delayed",
        attention_kernel="flash2",
        # llm-foundry layers/attention.py, flash_attn_fn: unpad_input of query, key and value, pad_input. Each of three
        # (flash_attn/bert_padding.py) sums the mask, lists what is not zero (3), takes the largest, sums up, pads (2)
        # and gathers; before them a mask of ones, after them zeros that the output is written to (2). Backward: zeros
        # and a scatter each; a gather.
        attention_copies=4,
        attention_copy_kernels=(30, 7),
        adamw_by_operators=True,
        former=(Former("2024-02", {"attention_kernel": "flash_2022"}, "llm-foundry setup.py: flash-attn==1.0.9"),),
    ),
    Framework(
        "nanotron",
        fuses_rmsnorm=True,  # nn/layer_norm.py: flash-attn's Triton kernels; one pass backward makes both gradients
        norm_backward_accesses=3,
        fuses_rope=True,  # models/llama.py: flash-attn's rotary kernel
        merges_projections=True,  # the same file: qkv_proj, gate_up_proj
        attention_kernel="flash2",
        # CausalSelfAttention.forward: query, key and value put in order (3), key and value joined (2) and put in order
        # (2), two zeros, sums and running sums of the mask; backward: gradients of key and value joined, stacked with
        # the query's, put in order.
        attention_copies=7,
        attention_copy_kernels=(9, 3),
        keeps_ordered_heads=True,
        loss=NANOTRON_LOSS,
        starts_with_own_rows=True,
        communicators=(("tp",), ("cp",), ("dp",), ("pp",), ("tp", "pp")),  # parallel/context.py
        # Two with each tensor's shape and kind; the mask of the sequence goes with the output.
        small_messages=(5, 2),
        plain_host=False,  # tensor-parallel linear layers and loss are Megatron's autograd functions, in Python
        adds_gradients_late=True,
        all_reduces_at_zero_1=True,
        zeroes_gradients=True,  # optim/gradient_accumulator.py: zero_grad
    ),
)
FRAMEWORKS: dict[str, Framework] = {record.name: record for record in _RECORDS}


class Named(Protocol):
    """What names a framework: a scenario's `training`."""

    @property
    def framework(self) -> str:
        """The record's name."""

    @property
    def software_date(self) -> str | None:
        """A month or a day; None: today."""


def framework_of(training: Named) -> Framework:
    """The record that `training.framework` names, as it was on `training.software_date`."""
    return framework_at(training.framework, training.software_date)


def framework_at(name: str, date: str | None) -> Framework:
    """A record as it was in a month or on a day ("2024-12", "2024-12-23"); None: as it is.

    >>> framework_at("compiled", "2024-12-23").attention_kernel, framework_at("compiled", None).attention_kernel
    ('torch_2024', 'compiled')
    """
    record = FRAMEWORKS[name]
    for former in record.former:
        if date is not None and date < former.until:
            record = replace(record, **former.facts)  # type: ignore[arg-type]
    return record


def attention_picks() -> frozenset[str]:
    """Kernels that frameworks pick by themselves: where a profile has no such coefficients, the usual kernel's hold."""
    dates = [f.until for record in FRAMEWORKS.values() for f in record.former]
    found = {framework_at(name, date).attention_kernel for name in FRAMEWORKS for date in (None, "0000", *dates)}
    return frozenset(found) - {""}


def framework_table() -> str:
    """The records as a Markdown table: a fact a row, a framework a column."""
    rows = [["fact", *(f"`{name}`" for name in FRAMEWORKS), "meaning", "where it is to be seen"]]
    rows.append(["---"] * len(rows[0]))
    for each in fields(Framework)[1:-1]:
        values = [_shown(getattr(record, each.name)) for record in FRAMEWORKS.values()]
        rows.append([f"`{each.name}`", *values, each.metadata["meaning"], each.metadata["source"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(value: object) -> str:
    if isinstance(value, UnfusedLoss):
        return f"{value.forward_kernels} and {value.backward_kernels}, {value.forward_token_kernels} a token"
    if isinstance(value, RouterKernels):
        return f"{value.forward_kernels} and {value.backward_kernels}"
    if isinstance(value, bool):
        return "yes" if value else ""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join("·".join(each) if isinstance(each, tuple) else str(each) for each in value)
