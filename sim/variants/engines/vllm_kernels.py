"""What kernels vLLM computes attention, rope and norms with, by release."""

from __future__ import annotations

from sim.core.quantization import Quantizing
from sim.variants.engines.kernel_facts import LatentBlocks, LatentKernels, RopeKernels, SummedNorms
from sim.variants.engines.own_all_reduce import MIB

# platforms/cuda.py, check_and_update_config: FlashMLA (Hopper) takes blocks of 64, CUTLASS MLA 128, FlashInfer MLA 64.
# Since pull request 35122 (March 2026) the kernel that is chosen takes 16 or the least that it can
# (platforms/interface.py, update_block_size_for_backend; v1/attention/backends/mla): FlashAttention's 16, of 8 bits
# FlashMLA's 64, FlashInfer's 32; over selected keys 64.
BLOCKS_08, BLOCKS_09 = LatentBlocks(64, 64), LatentBlocks(64, 64, 128)
BLOCKS_11, BLOCKS_14 = LatentBlocks(64, 64, 128, 64), LatentBlocks(64, 64, 64, 64)
BLOCKS_19 = LatentBlocks(16, 64, 32, 64)
# model_executor/models/deepseek_v2.py, DeepseekV2MLAAttention: fused_qkv_a_proj, one matmul for both latents (0.10).
# v1/attention/backends/mla: `torch.cat` of queries in flashmla.py, triton_mla.py and flashinfer_mla.py, none in
# flashattn_mla.py, which Hopper has since 0.14 (platforms/cuda.py). Attention to what is cached before a chunk, and the
# merge: mla/common.py, later model_executor/layers/attention/mla_attention.py, forward_mha. Rope is the model's, and
# concat_and_cache_mla a kernel of its own (fuse_rope_kvcache_cat_mla asks for use_inductor_graph_partition, which is
# off: config/vllm.py).
LATENTS_09 = LatentKernels(False, ("ampere", "hopper", "blackwell", "other"), merges_context=True, cache_apart=True)
LATENTS_11 = LATENTS_09._replace(merged_down=True)
# deepseek_v2.py, Indexer: wk_weights_proj, without quantization, in 0.24 and later, not in 0.19.
LATENTS_14 = LATENTS_11._replace(joins_queries=("ampere", "blackwell", "other"))
# compilation/passes/fusion/allreduce_rms_fusion.py, FI_ALLREDUCE_FUSION_MAX_SIZE_MB (FlashInfer's kernel); on by
# default with tp above 1: config/vllm.py, OPTIMIZATION_LEVEL_02 and enable_allreduce_rms_fusion. With pipeline stages
# and replicas since pull request 41458 (May 2026). Assumption: the kernel takes as long as the all-reduce that it
# replaces.
SUMMED_NORMS = SummedNorms(
    {2: 64 * MIB, 4: 2 * MIB, 8: 0.5 * MIB}, {2: 64 * MIB, 4: 32 * MIB, 8: MIB}, alone=True, compiled=True
)
SUMMED_NORMS_19 = SUMMED_NORMS._replace(ultra={2: 64 * MIB, 4: 64 * MIB, 8: 2 * MIB})  # compute capability 10.3
SUMMED_NORMS_29 = SUMMED_NORMS_19._replace(alone=False, ultra={2: 64 * MIB, 4: 64 * MIB, 8: 4 * MIB})
QUANTIZING: dict[str, tuple[Quantizing, ...]] = {"fp8": ("norms", "activations")}
# Without torch.compile a kernel for both ropes (layers/rotary_embedding, forward_cuda) and one for each norm. Inductor
# makes two of both ropes, and five with norms; since pull request 26682 (October 2025, in 0.12), whose traces show it,
# its combo_kernels join those of queries and keys: one for norms, one for ropes (config/compilation.py).
# enable_qk_norm_rope_fusion is off (config/vllm.py, OPTIMIZATION_LEVEL_02).
ROPE_EAGER = RopeKernels(1, 3, writes=True)
ROPE_09, ROPE_14 = RopeKernels(2, 5, eager=ROPE_EAGER), RopeKernels(1, 2, eager=ROPE_EAGER)
