"""Define the parts of a framework's record: what its loss, router, attention and sequence messages launch and move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


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


# Over ranks: torch/distributed/tensor/parallel/loss.py. `_log_softmax` holds its fp32 input and what is shifted by its
# maximum; the backward, `(grad_input + torch.exp(x)) * grad_output`, the first, the sum and the product beside x.
TORCH_LOSS = UnfusedLoss(7, 4, 32.0, 16.0, split_tensors=3, log_softmax=True)
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


class AttentionCopies(NamedTuple):
    """Hold the copies with which a framework reorders or packs tokens around its fused attention kernel.

    `tensors`: how many copies, each as large as the queries. `kernels`: theirs, forward (with those that compute
    sequence lengths) and backward. `of_one_sequence`: a micro-batch of one sequence is copied, too; of it a transpose
    of sequences and tokens would copy nothing.
    """

    tensors: int = 0
    kernels: tuple[int, int] = (1, 1)
    of_one_sequence: bool = True


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
