"""Define the parts of a framework's record: what its loss, router, context parallelism and ZeRO launch and move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from sim.core.program import Phase

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb


class UnfusedLoss(NamedTuple):
    """Hold the kernels of a loss written in separate operators (`cross_entropy: unfused`), and the bytes they move.

    All bytes are for one logit; e are those of a logit as the output matrix writes it (2 in 16 bits). The forward moves
    e + 4 to copy 16-bit logits to fp32 (where `copies`), e for each of `reads`, and `forward_bytes`. The backward moves
    `backward_bytes`, e for each of `backward_reads`, and 4 + e to copy the gradient back to 16 bits, or e where its
    last kernel casts by itself (not `copies`).

    `keeps`: what of all logits the backward reads. softmax: their log-softmax in fp32; logits: themselves, with each
    row's maximum and sum, and the gradient is a second tensor of theirs.

    `overwrites`: which fp32 tensor of all logits the gradient is written over. nothing: it is a tensor of its own;
    softmax: over the softmax; logits: the softmax is written over the fp32 logits, and the gradient over that; copy:
    likewise, but the gradient is made in 16 bits from a copy of the softmax.
    `split_tensors`: where the vocabulary is split over ranks and nothing is overwritten, how many fp32 tensors of all
    logits the backward holds beside the log-softmax; the forward holds one less beside the 16-bit logits.
    """

    forward_kernels: int
    backward_kernels: int
    forward_bytes: float
    backward_bytes: float
    copies: bool = True
    reads: int = 0
    backward_reads: int = 0
    keeps: Literal["softmax", "logits"] = "softmax"
    overwrites: Literal["nothing", "softmax", "logits", "copy"] = "nothing"
    forward_token_kernels: int = 0  # beside those over all logits, on one number a token
    backward_token_kernels: int = 0
    split_tensors: int = 2
    reductions: int = 3  # messages over tensor-parallel ranks: maximum, target's logit, sum of exponentials
    log_softmax: bool = False  # a rank that has all logits runs torch's own loss (`sim.models.output.log_softmax`)


class RouterKernels(NamedTuple):
    """Hold the kernels of an expert layer's router besides its matmul: scores, choice, auxiliary loss, records of it.

    By token and expert: accesses of the layer's own dtype, and bytes of fp32 and less. `capacity_kernels`, forward:
    more where experts have a capacity. `group_kernels` and `group_bytes`, forward and backward: more where groups are
    chosen first. `torch_top_k`: torch's own kernels choose (`sim.models.torch_kernels.top_k`)."""

    forward_kernels: int
    backward_kernels: int
    forward_accesses: int
    forward_bytes: float
    backward_accesses: int
    backward_bytes: float
    capacity_kernels: int = 0
    group_kernels: tuple[int, int] = (0, 0)
    group_bytes: tuple[float, float] = (0.0, 0.0)
    torch_top_k: bool = True


TORCH_LOSS = UnfusedLoss(7, 4, 32.0, 16.0, log_softmax=True)
# The choice of groups, of fp32 scores: each group's best two (4 bytes), sorted, and their sum; top-k of groups; zeros
# and ones of them; ones copied to experts (4), as booleans (5), inverted (2); scores copied (8) and masked (9). Where
# the masked scores themselves go on, backward copies (8) and masks (9) their gradient. The code is the same in
# transformers/models/deepseek_v3/modeling_deepseek_v3.py (DeepseekV3TopkRouter) and in Megatron-Core's
# transformer/moe/moe_utils.py (group_limited_topk).
GROUP_KERNELS, GROUP_BYTES = (11, 2), (32.0, 17.0)
# 16-bit logits, scores in fp32: softmax forward (3), backward (2). Of the masked scores only indices go on, so that
# nothing goes backward.
PLAIN_ROUTER = RouterKernels(
    3, 2, 1, 8.0, 1, 8.0, group_kernels=(GROUP_KERNELS[0], 0), group_bytes=(GROUP_BYTES[0], 0.0)
)
# A compiler copies, converts, inverts and masks in one kernel (8 bytes).
COMPILED_ROUTER = PLAIN_ROUTER._replace(group_kernels=(7, 0), group_bytes=(12.0, 0.0))
# transformers/models/mixtral/modeling_mixtral.py (MixtralTopKRouter), as torch dispatches it. Forward: logits to fp32
# (e + 4), softmax (8), top-k in two kernels (4), the chosen weights' sum, copy and quotient. Backward: seven kernels on
# the chosen weights, zeros of all (4) that they are put into, the softmax's (12), to 16 bits (4 + e).
TRANSFORMERS_ROUTER = PLAIN_ROUTER._replace(
    forward_kernels=7, backward_kernels=11, forward_bytes=16.0, backward_bytes=20.0
)
# transformers/models/qwen2_moe/modeling_qwen2_moe.py (Qwen2MoeTopKRouter): likewise, and the chosen weights are cast to
# the logits' dtype, their gradient back.
CASTING_ROUTER = TRANSFORMERS_ROUTER._replace(forward_kernels=8, backward_kernels=12)
# The same without `norm_topk_prob`: the chosen weights are not divided by their sum. Of OLMoE and FlexOlmo as released,
# and Jamba (jamba/modeling_jamba.py: JambaTopKRouter).
AS_CHOSEN_ROUTER = CASTING_ROUTER._replace(forward_kernels=5, backward_kernels=5)
# Of fp32 logits. hunyuan_v1_moe/modeling_hunyuan_v1_moe.py (HunYuanMoEV1Gate): softmax (8), top-k (4), the chosen
# weights' sum, copy and quotient; backward seven kernels on them, zeros (4) that they are put into, the softmax's (12).
# deepseek_v2/modeling_deepseek_v2.py (DeepseekV2TopkRouter): the chosen weights are multiplied by a number alone.
WIDE_ROUTER = TRANSFORMERS_ROUTER._replace(
    forward_kernels=6,
    backward_kernels=10,
    forward_accesses=0,
    forward_bytes=12.0,
    backward_accesses=0,
    backward_bytes=16.0,
)
# flint/modeling_flint.py (FlintTopKRouter): HunYuan's with a sigmoid, whose sum is not copied to all chosen weights.
PLAIN_SIGMOID_ROUTER = WIDE_ROUTER._replace(forward_kernels=5)
WIDE_AS_CHOSEN_ROUTER = WIDE_ROUTER._replace(forward_kernels=4, backward_kernels=4)
# ernie4_5_moe/modeling_ernie4_5_moe.py (Ernie4_5_MoeTopKRouter): softmax (8), the experts' biases added (8), top-k in
# two kernels (4), the chosen experts' probabilities looked up, their sum, its lower limit, quotient and cast. Backward:
# eleven kernels on the chosen ones, zeros (4) with their gradients added in, the softmax's (12).
ERNIE_ROUTER = WIDE_ROUTER._replace(forward_kernels=9, backward_kernels=14, forward_bytes=20.0)
# granitemoe/modeling_granitemoe.py (GraniteMoeTopKRouter): logits to fp32 (e + 4), top-k (4); of the chosen ones the
# softmax and a cast. Backward: zeros (4) that the chosen ones' gradients are put into, to 16 bits (4 + e).
GRANITE_ROUTER = PLAIN_ROUTER._replace(forward_kernels=5, backward_kernels=5)
# gpt_oss/modeling_gpt_oss.py (GptOssTopKRouter): likewise without casts; the biases' gradient is summed (e).
GPT_OSS_ROUTER = PLAIN_ROUTER._replace(
    forward_kernels=3, backward_kernels=4, forward_bytes=0.0, backward_accesses=2, backward_bytes=0.0
)
# cohere2_moe/modeling_cohere2_moe.py (Cohere2MoeTopKRouter): as gpt-oss's without biases, with casts around the
# softmax, which is in fp32. Or a sigmoid of the chosen ones, divided by their sum: top-k, sigmoid, sum and
# quotient; backward seven kernels on the chosen ones, the sigmoid's, zeros with the gradients put in.
COHERE_ROUTER = GPT_OSS_ROUTER._replace(forward_kernels=5, backward_kernels=5, backward_accesses=1)
COHERE_SIGMOID_ROUTER = COHERE_ROUTER._replace(backward_kernels=10)
# Routers with sigmoids, as torch dispatches them (transformers/models/hy_v3/modeling_hy_v3.py: HYV3TopKRouter.forward).
# Forward: sigmoid (8), the experts' biases added (8), top-k in two kernels (4), the chosen experts' scores looked up;
# then on those scores the sum, a small number added to it, the quotient and the scale. Backward: eight kernels on the
# chosen scores, zeros for all experts (4) with the chosen ones' gradients added in, the sigmoid's (12).
SIGMOID_ROUTER = PLAIN_ROUTER._replace(forward_kernels=9, backward_kernels=11, forward_bytes=20.0, backward_bytes=16.0)
# afmoe/modeling_afmoe.py (AfmoeTokenChoiceRouter): likewise, and 16-bit logits are cast first, their gradient back.
# minimax_m2/modeling_minimax_m2.py (MiniMaxM2TopKRouter): that without the small number and the scale, and a copy of
# the chosen scores, which are divided in place.
CAST_SIGMOID_ROUTER = SIGMOID_ROUTER._replace(
    forward_kernels=10,
    backward_kernels=12,
    forward_accesses=1,
    forward_bytes=24.0,
    backward_accesses=1,
    backward_bytes=20.0,
)
UNSCALED_SIGMOID_ROUTER = CAST_SIGMOID_ROUTER._replace(forward_kernels=9, backward_kernels=11)
# lfm2_moe/modeling_lfm2_moe.py (Lfm2MoeTopKRouter): as HYV3's, of 16-bit logits throughout but for the sum with the
# experts' fp32 biases (e + 4) and the top-k of it (4).
NARROW_SIGMOID_ROUTER = SIGMOID_ROUTER._replace(
    forward_accesses=3, forward_bytes=8.0, backward_accesses=4, backward_bytes=0.0
)
# DeepSeek V3's also chooses groups, even if there is one (deepseek_v3/modeling_deepseek_v3.py:
# DeepseekV3TopkRouter.forward), and copies the scores before it divides them. With several groups one kernel more
# copies the groups' mask to all experts.
GROUPED_SIGMOID_ROUTER = SIGMOID_ROUTER._replace(
    forward_kernels=20, forward_bytes=48.0, group_kernels=(1, 0), group_bytes=(4.0, 0.0)
)
# mistral4/modeling_mistral4.py (Mistral4TopkRouter.forward): the same choice of groups and the same quotient, of a
# softmax, all in 16 bits. Forward: softmax (2e), each group's best two (e), scores copied (2e) and masked (2e, 1),
# top-k (e). Backward: eight kernels on the chosen ones, zeros (e) that they are added into, the softmax's (3e).
GROUPED_SOFTMAX_ROUTER = GROUPED_SIGMOID_ROUTER._replace(
    forward_accesses=8, forward_bytes=1.0, backward_kernels=11, backward_accesses=4, backward_bytes=0.0
)
# phimoe/modeling_phimoe.py (sparsemixer), of 16-bit logits. Each of two choices: the maximum, a mask of scores far from
# it (nine kernels), noise (exponential, logarithm, difference), the maximum again, softmax, look-up, and in training
# nine kernels of the chosen scores; the first expert is masked for the second choice. Both are joined (two). Backward
# each multiplies three times and is put into zeros that all share (MultiplierProcessor).
SPARSE_MIXER_ROUTER = PLAIN_ROUTER._replace(
    forward_kernels=49,
    backward_kernels=9,
    forward_accesses=0,
    forward_bytes=138.0,
    backward_accesses=0,
    backward_bytes=20.5,
    torch_top_k=False,
)
TRANSFORMER_ENGINE = "transformer_engine"  # its fused kernels, in profiles
# cuBLAS of CUDA 11.8, the first for Hopper.
MATMUL_LIBRARIES = ("cuda_11",)
AttentionKernel = Literal["flash1", "flash2", "flash3", "cudnn", "triton"]  # those that a scenario may name


class ContextKernels(NamedTuple):
    """Hold what a framework's context parallelism does around its attention kernels and messages.

    `copies`: tensors are copied before and after messages, and sums have 16 bits. `own_last`: the backward of a ring
    begins with the keys that arrived last, so that gradients come home before the rank's own block has ended.
    `joins_gradients`: a block's dK and dV are joined in one tensor before their sum. `exchanges_output`: with cp_method
    all_to_all the backward exchanges the output, too; else the core keeps it as it was before its exchange. `blocks`:
    gathered keys and values are used one rank's block after the other, as in a ring, and their gradients go round.
    `fp32_sums`: outputs and gradients of blocks are added up in fp32, each time over all of a rank's tokens, and
    gradients are sent so. `waits`: attention waits for each message.
    """

    copies: bool = False
    own_last: bool = False
    joins_gradients: bool = False
    exchanges_output: bool = False
    blocks: bool = False
    fp32_sums: bool = False
    waits: bool = False


class SequenceMessages(NamedTuple):
    """Hold what a framework does around messages of sequence parallelism, which cut [batch, seq, hidden] along seq.

    `orders`: a kernel puts what was gathered into order, and another one the result of a single matmul before its
    reduce-scatter; a sum of several is written in order (torch/distributed/_functional_collectives.py:
    `all_gather_tensor`, `reduce_scatter_tensor`, whose torch.cat Inductor does not join with matmuls). `views_one`: of
    one sequence what was gathered is in order already (`_maybe_view_chunk_cat`). `sums_apart`: with `tp_overlap`, the
    reduce-scatter of an input gradient that several matmuls add up runs after them
    (torch/_inductor/fx_passes/micro_pipeline_tp.py: `_find_producer_matmul`). `copied_chunks`: with `tp_overlap: full`
    copy engines move a matmul's chunks (`sim.models.copied_chunks`).
    """

    orders: bool = False
    views_one: bool = False
    sums_apart: bool = False
    copied_chunks: bool = False


class ZeroEngine(NamedTuple):
    """Hold how a framework reduces gradients and gathers parameters. Tuples list ZeRO stages.

    `all_reduced_at`: whole gradients are all-reduced, and each rank goes on with its shard. `all_reduces_for_matrices`:
    so they are at stage 1 with an optimizer that updates whole matrices. `reduces_to_owners`: instead each part of a
    bucket is reduced to the rank that updates it, one part after the other. `at_once_at`: in one message after the last
    backward, whatever `parallelism.dp_sync` says. Defaults of keys of `parallelism`: `alone_at`: `dp_sync` is
    after_backward; `gathers_ahead`: `param_gather_overlap`; `bucket_bytes`; `gather_bucket_elements`, of
    `gather_bucket_bytes`. `bucket_elements`: in place of `bucket_bytes`, gradients of a bucket: at least so many, and
    so many for each of the dp ranks. `first_stage_alone`: with ZeRO-0 and -1 the first rank's first stage alone fills
    buckets, every other stage has one. `gathers_when_used`: without virtual stages ZeRO-1 starts the gather of such a
    stage behind the arrival of its first input, so that nothing hides it. `aligns_stages`: with virtual stages a
    stage's buckets are all sent when its last backward has ended. `buckets_shards`: with ZeRO-3 a layer's gradients are
    reduced in such buckets, too. `closes_before`: a bucket is sent before a tensor would make it larger than
    `bucket_bytes`, not after. `mixes_experts`: gradients of experts fill the same buckets as the others', in place of
    buckets of their own.

    `joining_accesses`: memory accesses of each reduced element in copies and the division before it is sent, in the
    dtype of the reduction; `views_accesses`: in the layers' dtype, where gradients of views are joined to one of the
    flat parameter. `joining_kernels`: of these, for each tensor and for each message.
    `copies_replicas`: with ZeRO-0, torch's DDP: each gradient is divided into its bucket (2 accesses) and copied back
    when all are reduced (2), in place of these copies, and all buckets stay beside the gradients
    (torch/csrc/distributed/c10d/reducer.cpp: `mark_variable_ready_dense`, `copy_bucket_to_grad`, unless
    `gradient_as_bucket_view`).
    `buffers`: tensors of a bucket's size that stay; there is one more where reductions overlap with ZeRO-1 or -2, and
    one more while a bucket is reduced. `shard_bytes`: moved for each element of a rank's shard of the gradients before
    the optimizer reads an fp32 copy of it. `updated_elements`: with ZeRO-3 a rank updates so many parameters at a time,
    and has that copy of them alone. `on_host_at`: with `training.optimizer_offload: cpu` a shard of the
    gradients lies in host memory. `live_elements`: with ZeRO-3 so many parameters may be gathered at once; the last of
    the forward stay for the backward. `scaled_elements`: parameters may be gathered as 8-bit integers
    (`parallelism.param_gather_dtype`), so many with one fp32 scale; 0: they cannot. `kept_last`: with ZeRO-3 so many
    units at the end of the model stay gathered from the forward to the backward, which begins with them.
    `ends_together`: embedding, last norm and output are one unit, torch's root: gathered as a forward begins, kept
    until its backward has ended, and reduced then (torch/distributed/ fsdp/_fully_shard/_fsdp_state.py: `_lazy_init`,
    `_root_post_backward_final_callback`). `root_again`: it is freed behind the forward, and gathered as the backward
    begins. `gathers_tied`: with ZeRO-3 a matrix that embedding and output share is a unit of its own, gathered for
    either and freed behind it; the backward begins with it and keeps it to its end, when its one gradient is whole
    (llm-foundry models/mpt/modeling_mpt.py: `child._fsdp_wrap`; torch/distributed/fsdp: `_post_backward_hook`).
    `ends_stay`: embedding, last norm and output, which are in no unit, are gathered once a step and stay to its
    end. `fills_buckets`: where every micro-batch's gradients are reduced, each is copied into a bucket even if it has
    that dtype, unless its matmul wrote it there, and the shard that comes back is added to the rank's, to zeros in the
    first micro-batch. `ahead_elements`: units are gathered ahead until they have so many parameters; a backward begins
    with such a run, of which its own unit arrives last. `queued_elements`: buckets of gradients that are reduced stay
    until more than so many gradients wait behind the oldest. `replicas_once`: the default of
    `parallelism.all_reduce_once`. `sums_shared`: with ZeRO-3, before a unit is reduced, the gradient of each of its
    tensors that all ranks of tp hold whole (`Block.shared`) is all-reduced over them, and the computation waits
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `_get_grad_inner_tensor`). `sums_shared_once`: all these
    gradients of a rank are joined in one tensor once a step, behind their reduction over data-parallel ranks,
    all-reduced over tp, and copied back one by one (megatron/core/distributed/ finalize_model_grads.py:
    `_allreduce_non_tensor_model_parallel_grads`); of routers, biases and matrices that are not split, too.

    `input_first`: the phases in which ZeRO-3's gathers wait for the input of a pipeline's action; torch's FSDP: for the
    stream that computes, which has waited for the message, at the root's forward (torch/distributed/fsdp/_fully_shard/
    _fsdp_state.py: `_root_pre_forward`; _runtime_utils.py: `_root_pre_forward`). With several stages a rank, torch's
    schedules gather them with the step (pipelining/schedules.py: `_add_unshard_reshard`).

    `reduces_stages`: in a pipeline, FSDP2's reductions of a stage's sums of gradients begin when its last backward has
    ended (torch/distributed/pipelining/stage.py: `perform_reduce_grad`, formerly in `backward_maybe_with_nosync`). Left
    out: that with several stages a rank its next computation waits for them (`finalize_backward` in
    _fsdp_param_group.py).

    `copies_gathered`: with ZeRO-3 a block's parameters are copied out of the buffer that they arrive in. torch's
    allocator gives memory back to the stream that it was allocated on: `gathers_apart` says that these buffers are
    allocated on a stream of their own, `shards_apart` that a gradient's shards are (torch/distributed/fsdp/
    _fully_shard/_fsdp_collectives.py: `foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).

    `adds_up_as_sent`: whole gradients that ZeRO-2 or -3 adds up before it reduces them have the dtype of the reduction,
    and a shard comes to `training.grad_dtype` behind it (torch/distributed/fsdp/_fully_shard/_fsdp_param.py:
    `to_accumulated_grad_if_needed`; _fsdp_collectives.py: `foreach_reduce`). `sends_in_precision`: with ZeRO-2 and -3
    gradients are reduced in the precision's 16-bit dtype, the default of `training.grad_reduce_dtype`
    (accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin.set_mixed_precision). `keeps_unreduced`: with
    ZeRO-3 without `reshard_after_forward` a backward that reduces nothing leaves its parameters gathered
    (torch/distributed/fsdp/_runtime_utils.py: `_should_free_in_backward`; not FSDP2's `post_backward`).

    `fsdp_version`: of torch's FSDP, which ZeRO-2 and -3 are; 0 where it is another's. `or_torch`: torch's FSDP2 can
    take that one's place (megatron/core/distributed/torch_fully_sharded_data_parallel.py, which makes units of layers,
    embedding and output, too). `flat_at`: the values of `parallelism.zero` with which the optimizer has a rank's shards
    as vectors, not as rows of matrices. `one_tensor_a_unit`: such a vector is one parameter to it, else it has the
    parts of the unit's tensors that lie there (torch/distributed/fsdp: `use_orig_params`). `clips_tensors_at`: values
    with which clipping loops over tensors; `clips_whole_at`: with which each rank clips whole gradients, not its shard.
    """

    fsdp_version: int = 2
    or_torch: bool = False
    one_tensor_a_unit: bool = False
    clips_tensors_at: tuple[int, ...] = ()
    clips_whole_at: tuple[int, ...] = ()
    flat_at: tuple[int, ...] = ()

    all_reduced_at: tuple[int, ...] = ()
    all_reduces_for_matrices: bool = False
    reduces_to_owners: bool = False
    at_once_at: tuple[int, ...] = ()
    alone_at: tuple[int, ...] = ()
    gathers_ahead: bool = True
    bucket_bytes: int = DDP_BUCKET_BYTES
    gather_bucket_elements: int | None = None
    bucket_elements: tuple[int, int] | None = None
    first_stage_alone: bool = False
    gathers_when_used: bool = False
    aligns_stages: bool = False
    buckets_shards: bool = False
    closes_before: bool = False
    mixes_experts: bool = False
    joining_accesses: int = 0
    views_accesses: int = 0
    joining_kernels: tuple[int, int] = (0, 0)
    copies_replicas: bool = False
    buffers: int = 0
    shard_bytes: float = 0.0
    updated_elements: int = 0
    on_host_at: tuple[int, ...] = ()
    live_elements: int = 0
    scaled_elements: int = 0
    kept_last: int = 0
    ends_together: bool = False
    root_again: bool = False
    gathers_tied: bool = False
    ends_stay: bool = False
    fills_buckets: bool = False
    ahead_elements: int = 0
    queued_elements: int = 0
    replicas_once: bool = False
    sums_shared: bool = False
    sums_shared_once: bool = False
    input_first: tuple[Phase, ...] = (Phase.FORWARD,)
    reduces_stages: bool = False
    copies_gathered: bool = True
    gathers_apart: bool = True
    shards_apart: bool = True
    adds_up_as_sent: bool = True
    sends_in_precision: bool = False
    keeps_unreduced: bool = False

    @property
    def as_first_fsdp(self) -> ZeroEngine:
        """This engine's record with torch's first FSDP (torch/distributed/fsdp) in place of FSDP2.

        _flat_param.py, `_get_unflat_views_unaligned`: parameters are views of what is gathered, and the backward of
        torch.split joins their gradients (2 accesses). _runtime_utils.py, `_reduce_grad`: these are divided (2). Layers
        alone are wrapped; `_post_forward_reshard`: the root's parameters stay.
        """
        return self._replace(
            fsdp_version=1,
            flat_at=(2, 3),  # `FlatParameter`
            clips_tensors_at=(2, 3),  # fully_sharded_data_parallel.py: `_get_grad_norm`, `clip_grad_norm_`
            copies_gathered=False,
            gathers_apart=False,
            joining_accesses=2,
            views_accesses=2,
            joining_kernels=(0, 2),
            ends_together=True,
            kept_last=0,
            root_again=False,
            sums_shared=False,
            reduces_stages=False,
            keeps_unreduced=True,
        )

    def bucket_bytes_of(self, dp: int, element_bytes: float) -> int:
        """Return the size of a bucket of gradients of `element_bytes` each, among `dp` ranks."""
        if self.bucket_elements is None:
            return self.bucket_bytes
        least, each = self.bucket_elements
        return round(max(least, each * dp) * element_bytes)


class TensorLoop(NamedTuple):
    """Hold how an optimizer's loop over tensors runs AdamW: its `kernels` for each tensor (0: AdamW is no such loop).

    `reads_steps`: the number of a tensor's steps lies on the device, where a kernel counts it up. Before the tensor's
    kernels the host reads it, and waits for those of the tensor before.
    """

    kernels: int = 0
    reads_steps: bool = False


class Former(NamedTuple):
    """Hold facts of releases before the month `until` ("2025-02"), by name, and their source."""

    until: str
    facts: Mapping[str, object]
    source: str
