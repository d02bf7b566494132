"""TensorRT-LLM as a serving engine: a record for each of its releases from which on it works otherwise."""

from __future__ import annotations

from dataclasses import replace

from sim.core.quantization import Quantizing
from sim.core.sampler import Sampler
from sim.variants.engines.admission import Admission, Routers
from sim.variants.engines.defaults import Defaults
from sim.variants.engines.graph_sizes import AskedGraphs, of_sequences, trtllm_10_sizes, trtllm_13_sizes
from sim.variants.engines.handing_over import TRTLLM as HANDING_OVER
from sim.variants.engines.hosts import A100_BY_H100, FP8_EXPERTS, TRITON, TRTLLM, TRTLLM_06, TRTLLM_1, hosts
from sim.variants.engines.kernel_facts import LatentBlocks, LatentKernels, RopeKernels, SharedExperts, SummedNorms
from sim.variants.engines.outside_memory import TRTLLM as OUTSIDE
from sim.variants.engines.own_all_reduce import FROM_TABLES, MIN_LATENCY, NCCL_FOR_LLAMA
from sim.variants.engines.record import Engine

# The cache has 0.9 of what weights and activations leave free: 0.8, batch_manager/kvCacheConfig.h
# (kDefaultGpuMemFraction, 0.85 until 0.7); 1.0, _torch/pyexecutor/_util.py (_cal_max_memory), llmapi/llm_args.py.
_TRTLLM_FREE = Defaults(memory_fraction=1.0, free_fraction=0.9, block_tokens=64, chunked_prefill=False)
_TRTLLM_LIMITS = _TRTLLM_FREE._replace(max_running_requests=2048)

# `sampler`: its logits, models/modeling_utils.py, logits_dtype float32; 1.0, _torch/modules/logits_processor.py.
_VOCAB_MULTIPLE = 1  # tensorrt_llm/_utils.py, pad_vocab_size: to a multiple of the ranks

# _torch/models/modeling_deepseekv3.py, modeling_gpt_oss.py, modeling_qwen3_moe.py: AllReduceFusionOp.RESIDUAL_RMS_NORM
# behind attention and behind experts, without attention dp; in the kernels of strategy MIN_LATENCY, below whose sizes
# they are (thop/allreduceOp.cpp); Qwen3-Next's not (modeling_qwen3_next.py). Llama's models wider than 4,096
# (modeling_llama.py, LlamaDecoderLayer: enable_fusion) do, too, unlike Qwen3's dense ones and Mistral's
# (modeling_mistral.py, MistralDecoderLayer, since pull request 3845 of April 2025). The kernel writes fp8 and nvfp4
# (RESIDUAL_RMS_NORM_QUANT_FP8, _NVFP4), in 1.0 and 1.1 up to the workspace's size (allreduceOp.cpp,
# selectImplementation; customAllReduceUtils.h, getMaxRequiredWorkspaceSize). Assumption: it takes as long as the
# all-reduce.
_SIZES = MIN_LATENCY["hopper"].below
_SUMMED_NORMS = SummedNorms(
    _SIZES,
    _SIZES,
    codes=("deepseek_v3", "gpt_oss", "qwen2_moe"),
    experts=True,
    llama_above=4096,
    llama_writes=("fp8", "nvfp4"),
    llama_below={2: 16e6, 4: 8e6, 8: 8e6},
)
# fp8: attention writes it (_torch/modules/attention.py: out_scale where o_proj.has_fp8_qdq), the activation, too
# (gated_mlp.py of 1.1.0rc6, _apply_activation; not in 0.20), neither beside LoRA.
_QUANTIZING: dict[str, tuple[Quantizing, ...]] = {"fp8": ("attention", "activations")}

# _torch/modules/attention.py, MLA: kv_a_proj_with_mqa is one matmul for both latents; torch.concat of a latent and its
# rope key (latent_cache); forward_absorption_generation writes into one tensor of queries; fp8_block_scaling_bmm_out
# multiplies blocks in fp8, dequantized ones on compute capability 10.x (k_b_proj_trans_dequant). What is cached before
# a prompt and the prompt itself are attended to at once (forward_context_with_cached_kv); not modelled: in chunks on
# 10.x part by part (forward_context_with_chunked_prefill); norms and rope on a stream beside. Blocks of 64 tokens for
# FlashMLA on Hopper (_torch/pyexecutor/py_executor_creator.py, enable_flash_mla), on others kv_cache_config's 32.
_LATENTS = LatentKernels(joins_latents=True, narrow_absorbed=("hopper",))
_LATENT_BLOCKS = LatentBlocks(64, 64)

# cpp/tensorrt_llm/batch_manager: capacityScheduler.cpp (MaxUtilizationScheduler, GuaranteedNoEvictScheduler);
# kvCacheManager.cpp (getNeededBlocksOneStep: blocks of the whole prompt at its first chunk; releaseBlocks keeps those
# of a request that ends or is paused); microBatchScheduler.cpp (setCtxRequestsChunkSize: chunks of whole units, which
# are blocks: _torch/pyexecutor/py_executor_creator.py, chunk_unit_size; left out: 256 tokens where
# max_attention_window is given; getNumTokens, getContextRemainingLength: with all that is found, until pull requests
# 11490 and 11637 of 2026).
_WHOLE = Admission(policies=True, whole_blocks=True, block_chunks=True)
_FOUND_COUNTS = Admission(True, True, True, True, keeps_ended=True, waits=True)
_FOUND_IS_FREE = _FOUND_COUNTS._replace(counts_found=False)

_TRTLLM_08 = Engine(
    "trtllm",
    "TensorRT-LLM",
    (0, 8),
    "2025-01",
    "fitted to trtllm_017_throughput; launches and policy as trtllm-0.6; prompts in chunks as trtllm-bench runs it "
    "(tensorrt_llm/bench/dataclasses/configuration.py: ExecutorSettingsConfig.chunking true; its MAX_UTILIZATION is "
    "replaced by NO_EVICT in bench/benchmark/throughput.py); not modelled: dynamic_max_batch_size",
    host=TRTLLM,
    text=None,
    stages_drafting=False,  # of this engine nothing was read about drafts beside stages or adapters
    adapters_drafting=False,
    reserved_output=1.0,
    admission=_WHOLE,
    swaps=False,
    runs_by_stage=True,  # _torch/pyexecutor/_util.py: max_num_sequences = max_batch_size * pp_size
    whole_prompts=True,
    prompts_beside=True,
    fp8_cache=True,
    experts_speed=FP8_EXPERTS,
    any_group=False,  # whose kernels were measured: none of XQA's beyond
    sampler=Sampler("always"),
    room_for="limits",  # of an engine that TensorRT has built
    splits_experts=True,
    vocab_multiple=_VOCAB_MULTIPLE,
    defaults=_TRTLLM_LIMITS._replace(chunked_prefill=True),
)
_TRTLLM_1 = Engine(
    "trtllm-1.0",
    "TensorRT-LLM",
    (1, 0),
    "2025-09",
    "the PyTorch backend, default since 1.0, with overlap scheduler and CUDA graphs (llmapi/llm_args.py: "
    "disable_overlap_scheduler false; enable_chunked_prefill false; GUARANTEED_NO_EVICT); with pipeline stages the "
    "host works beside other micro batches (_torch/pyexecutor/py_executor.py, _executor_loop_pp); graphs of padded "
    "batches to max_batch_size, as trtllm-bench keeps them (bench/benchmark/utils/general.py) and the examples "
    "for servers ask for them (examples/configs): without any configuration batches are not padded, and those "
    "above 128 have no graph; host, launches and trtllm-serve's process as vllm-v1's; padding: one request again and "
    "again (_torch/pyexecutor/cuda_graph_runner.py); drafts: _torch/speculative/interface.py, "
    "support_overlap_scheduler",
    host=hosts(TRTLLM_1),
    handing_over=HANDING_OVER,
    # _torch/pyexecutor/executor_request_queue.py: _get_from_waiting_queue, _balance_requests_across_ranks, later
    # scheduler/adp_router.py, DefaultADPRouter; replicas that share nothing are servers of their own
    routers=Routers(sharing="one_queue"),
    interval_skips_text=True,
    sent_together=1,  # executor/result.py, _aresult_step: a request makes its text when its own piece is due
    joins_pieces=False,  # likewise: one response of its queue after another
    defers_shared=True,  # cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp, beneficialToSkip
    overlaps=True,
    token_more=True,  # _torch/pyexecutor/py_executor.py, _update_request_states_tp: tokens' state stays as it is
    graph_sizes=trtllm_10_sizes,
    drafting_tokens=of_sequences(trtllm_10_sizes),
    asked_graphs=AskedGraphs(trtllm_10_sizes, sequences=True, keeps_largest=True),
    overlaps_drafting=(True, False),
    text=None,
    drafts_on_prompts=True,  # _torch/speculative/mtp.py, MTPEagleWorker.forward: batch_size has contexts
    padded_experts=("alike", "alike"),
    # _torch/pyexecutor/cuda_graph_runner.py, _get_padded_batch: the largest of all ranks' batches, if all only decode
    pads_replicas="graphed",
    reserved_output=1.0,
    admission=_FOUND_COUNTS,
    swaps=False,
    runs_by_stage=True,  # _torch/pyexecutor/_util.py: max_num_sequences = max_batch_size * pp_size
    whole_prompts=True,
    prompts_beside=True,
    fp8_cache=True,
    latent_blocks=_LATENT_BLOCKS,
    latents=_LATENTS,
    # _torch/modules/qk_norm_attention.py: fused_qk_norm_rope; else attention's own kernels rope
    rope_kernels=RopeKernels(0, 1, writes=True),
    # modeling_deepseekv3.py, Deepseekv3MoE: maybe_execute_in_parallel, whose second stream is for CUDA graphs alone
    # (modules/multi_stream_utils.py)
    shared_experts=SharedExperts(2048, graphed=True, sent=True),
    own_all_reduces=MIN_LATENCY,
    outside=OUTSIDE,
    summed_norms=_SUMMED_NORMS,
    quantizing=_QUANTIZING,
    quantizing_compiled=False,
    eplb=True,  # llmapi/llm_args.py: MoeLoadBalancerConfig
    # Without NVLink between nodes all-to-alls need TRTLLM_CAN_USE_DEEP_EP, which is 0 (fused_moe_wide_ep.py,
    # select_alltoall_method_type).
    all2all=("allgather_reducescatter", "deepep"),
    reads_checkpoint=True,
    any_group=False,
    sampler=Sampler("always"),
    room_for="tokens",  # _torch/pyexecutor/_util.py, _create_dummy_context_requests: prompts as long as can be
    splits_experts=True,
    vocab_multiple=_VOCAB_MULTIPLE,
    defaults=_TRTLLM_LIMITS._replace(block_tokens=32, prefix_cache="gpu", graphs_to=2048),
)
_TRTLLM_11 = replace(
    _TRTLLM_1,
    name="trtllm-1.1",
    since=(1, 1),
    date="2025-12",
    source="as trtllm-1.0; overlaps also with a draft model (pull request 7651, September 2025)",
    overlaps_drafting=(True, True),
    own_all_reduces=NCCL_FOR_LLAMA,
    mxfp8_inputs=True,  # _torch/model_config.py, get_mxfp4_quant_algo: W4A8_MXFP4_MXFP8 from compute capability 10 on
)
_TRTLLM_12 = replace(
    _TRTLLM_11,
    name="trtllm-1.2",
    since=(1, 2),
    date="2026-01",  # of 1.2.0rc8, the last candidate
    source="as trtllm-1.1; FlashInfer's sampling is the default (docs/source/release-notes.md, 1.2, Breaking Changes): "
    "sampler_type auto is TorchSampler without beams, with FlashInfer's kernels and without penalties "
    "(docs/source/features/sampling.md; _torch/pyexecutor/sampling_utils_flashinfer.py, the ones named SampleOnly)",
    sampler=Sampler("always", "rejection", "gumbel", None, checks_nan=True),
    own_all_reduces=FROM_TABLES,
    summed_norms=_SUMMED_NORMS._replace(
        hopper=FROM_TABLES["hopper"].below, blackwell=FROM_TABLES["blackwell"].below, llama_below=None
    ),
    token_more=False,  # likewise, 1.2's notes: early exit with overlap scheduler (will_complete_next_iteration)
)
RECORDS = (
    Engine(
        "trtllm-0.6",
        "TensorRT-LLM",
        (0, 5),
        "2023-12",
        "launches and group_reads: fitted to trtllm_static_h100; no kernel reads a KV head once for a group before 0.8 "
        "(XQA blog); the capacity scheduler's default policy is GUARANTEED_NO_EVICT, and chunked context is off "
        "(useful-runtime-flags.md)",
        text=None,
        host={"hopper": TRTLLM_06},
        stages_drafting=False,
        adapters_drafting=False,
        decode_attention="per_head",
        group_reads=0.768,
        reserved_output=1.0,
        admission=_WHOLE,
        swaps=False,
        runs_by_stage=True,  # _torch/pyexecutor/_util.py: max_num_sequences = max_batch_size * pp_size
        whole_prompts=True,
        prompts_beside=True,
        fp8_cache=True,
        sampler=Sampler("always"),
        room_for="limits",
        splits_experts=True,
        vocab_multiple=_VOCAB_MULTIPLE,
        defaults=_TRTLLM_FREE._replace(free_fraction=0.85),
    ),
    replace(
        _TRTLLM_08,
        name="trtllm-triton",
        product="TensorRT-LLM Triton",
        date="2024-11",
        source="host: fitted to trtllm_014_online; all-reduces, experts and policy: as trtllm; 2,048 requests: release"
        " notes of 0.14.0 (default max_batch_size of trtllm-build)",
        host={
            "ampere": TRITON.slower(A100_BY_H100)._replace(collective_s=TRTLLM["ampere"].collective_s),
            "hopper": TRITON,
        },
        defaults=_TRTLLM_LIMITS,
    ),
    _TRTLLM_08,
    _TRTLLM_1,
    _TRTLLM_11,
    _TRTLLM_12,
    replace(
        _TRTLLM_12,
        name="trtllm-1.3",
        since=(1, 3),
        date="2026-04",
        source="as trtllm-1.2; graphs of padded batches by 64 (NVIDIA/TensorRT-LLM pull request 12895, April 2026); "
        "defaults read again of a commit behind it, 0004396 of 2026: the same (llmapi/llm_args.py)",
        admission=_FOUND_IS_FREE,
        all2all=("deepep", "allgather_reducescatter"),  # fused_moe/communication/communication_factory.py: it is 1
        graph_sizes=trtllm_13_sizes,
        drafting_tokens=of_sequences(trtllm_13_sizes),
        asked_graphs=AskedGraphs(trtllm_13_sizes, sequences=True, keeps_largest=True),
    ),
)
