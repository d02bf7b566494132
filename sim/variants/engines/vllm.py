"""vLLM as a serving engine: a record for each of its releases from which on it works otherwise."""

from __future__ import annotations

from dataclasses import replace

from sim.core.sampler import Sampler
from sim.variants.engines.admission import LoadScore, Routers
from sim.variants.engines.defaults import Case, Defaults
from sim.variants.engines.drafting import (
    VLLM_DRAFTS_08,
    VLLM_DRAFTS_09,
    VLLM_DRAFTS_20,
    VLLM_DRAFTS_28,
    VLLM_DRAFTS_31_MODEL,
    VLLM_TEXT,
)
from sim.variants.engines.graph_sizes import (
    AskedGraphs,
    vllm_014_drafting_tokens,
    vllm_014_sizes,
    vllm_029_drafting_tokens,
    vllm_031_sizes,
    vllm_08_sizes,
)
from sim.variants.engines.handing_over import VLLM as PROXIED
from sim.variants.engines.hosts import VLLM_V1, VLLM_V1_24, VLLM_V1_32, hosts
from sim.variants.engines.kernel_facts import LARGEST_BYTES, SharedExperts, TwoBatches
from sim.variants.engines.outside_memory import VLLM, VLLM_08, VLLM_11, VLLM_20
from sim.variants.engines.own_all_reduce import CUSTOM, CUSTOM_LESS, CUSTOM_LESS_19, CUSTOM_LESS_29, CUSTOM_LESS_33
from sim.variants.engines.record import Engine
from sim.variants.engines.sglang_memory import GIB
from sim.variants.engines.vllm_kernels import (
    BLOCKS_08,
    BLOCKS_09,
    BLOCKS_11,
    BLOCKS_14,
    BLOCKS_19,
    LATENTS_09,
    LATENTS_11,
    LATENTS_14,
    QUANTIZING,
    ROPE_09,
    ROPE_14,
    SUMMED_NORMS_19,
    SUMMED_NORMS_29,
)
from sim.variants.engines.vllm_v0 import SAMPLER_V0, V0_RECORDS, VOCAB_MULTIPLE

# Large GPUs but A100, which 0.8 does not except: engine/arg_utils.py (API server's; offline 16,384 and 8,192 tokens).
_LARGE = Case({"max_running_requests": 1024, "max_batch_tokens": 8192}, memory_bytes=70 * GIB, but=("ampere",))
# GPUs with memory of 160 GiB and more since 0.28; `graphs_to` for compute capability 10.x (config/vllm.py).
_LARGEST = Case({"max_batch_tokens": 16384}, memory_bytes=LARGEST_BYTES)
# model_executor/models/config.py, GptOssForCausalLMConfig (0.14.1, 0.24.0, 0.33.0; taken to be so from 0.11 on)
_GPT_OSS = Case({"graphs_to": 1024}, code="gpt_oss")
_BLACKWELL = Case({"graphs_to": 1024}, memory_bytes=LARGEST_BYTES, but=("hopper", "other"))
_VLLM_V1 = Defaults(max_batch_tokens=2048, prefix_cache="gpu", graphs_to=512)
# v1/sample/sampler.py: `logits.to(torch.float32)`, as before V1. V1 has FlashInfer's
# kernels until 0.11.0 where it is installed (here: it is not), and by default since 0.21 (envs.py,
# VLLM_USE_FLASHINFER_SAMPLER); Triton's since 0.17 (v1/sample/ops/topk_topp_triton.py). The second model runner's
# sampler (v1/worker/gpu/sample) is most models' since 0.25.
_SAMPLER_V1 = SAMPLER_V0._replace(probabilities=False, logprobs="all")
_SAMPLER_17 = _SAMPLER_V1._replace(filters="pivots")
_SAMPLER_21 = _SAMPLER_V1._replace(filters="rejection")
_SAMPLER_28 = Sampler("draws", "rejection", "gumbel", "counts", logprobs="few")
_ROUTERS = Routers("least_loaded", "least_loaded")
_VLLM_09 = Engine(
    "vllm-v1",
    "vLLM",
    (0, 9),
    "2025-05",
    "host: a 1B takes 2.7 ms a token alone, a millisecond of it the GPU's (vllm-project/vllm pull request 17866,"
    " May 2025); at 256 2 to 3 ms once the API server is a process of its own (issue 10634), as it is since 0.7,"
    " 5 to 6 before (pull request 11133); launches as vllm-0.2; API server: measured of 0.32;"
    " limits: engine/arg_utils.py (_set_default_args_v1; 0.11.0, 1548 to 1578, 1605 to 1625);"
    " graphs of all but attention, also for single tokens: config.py (full_cuda_graph false); padding: tokens of"
    " earlier iterations, which choose experts",
    host=hosts(VLLM_V1),
    # v1/engine/core_client.py, DPLBAsyncMPClient, get_core_engine_for_request: fewest requests (0.9)
    routers=_ROUTERS,
    shares_stages=False,  # v1/core/sched/scheduler.py: max_num_seqs for all; what is ready and fits goes along
    may_overlap=True,  # 0.10, pull request 19970: --async-scheduling; not with stages nor drafts
    overlaps_stages=False,
    overlaps_drafting=(False, False),
    text=VLLM_TEXT,
    adapters_drafting=False,  # 0.10.2, v1/worker/gpu_input_batch.py, make_lora_inputs: one adapter a sampled request
    handing_over=PROXIED,
    graph_sizes=vllm_08_sizes,
    asked_graphs=AskedGraphs(vllm_08_sizes),  # config/scheduler.py, cuda_graph_sizes
    draft_graphs=(VLLM_DRAFTS_09, VLLM_DRAFTS_09),
    drafts_on_prompts=True,  # v1/spec_decode/eagle.py, propose: batch_size is of all requests of the iteration
    looks_ahead=True,  # v1/core/sched/scheduler.py, num_lookahead_tokens, of 0.8.5, 0.20 and 0.33
    prompt_graphs=True,
    whole_graphs=False,
    whole_prompts=True,
    whole_prompt_tokens=1,  # engine/arg_utils.py: max_model_len where enable_chunked_prefill is off
    budget_for_all=True,  # config.py, SchedulerConfig, since 0.11 config/scheduler.py: max_num_batched_tokens
    fewer_in_budget=True,  # 0.10, engine/arg_utils.py: min(default_max_num_seqs, max_num_batched_tokens)
    room_for_longest=True,  # v1/core/kv_cache_utils.py: check_enough_kv_cache_memory
    prompts_beside=True,
    tiled_heads=("ampere", "ada", "blackwell"),  # FlashAttention 2, read of 0.8.5 to 0.33; on 10.x FlashInfer
    prompt_limit="all",  # v1/core/sched/scheduler.py of 0.10.2 to 0.24.0: long_prefill_token_threshold
    swaps=False,  # engine/arg_utils.py of 0.8 to 0.10, _is_v1_supported_oracle: --preemption-mode is V0's, later gone
    copies_blocks=True,  # v1/kv_offload/worker/cpu_gpu.py: swap_blocks of each layer's keys and values (0.11)
    shares_at_once=True,
    # Since 0.8.5 (pull request 17137): v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit, `use_eagle`.
    drops_last_hit=True,
    called="vLLM V1",
    latent_blocks=BLOCKS_09,
    latents=LATENTS_09,
    rope_kernels=ROPE_09,
    own_all_reduces=CUSTOM,
    outside=VLLM,
    pads_replicas="always",  # 0.9.1, pull request 18724; 0.10.2, v1/worker/gpu_model_runner.py, get_dp_padding
    eplb=True,  # since 0.9.2: config.py, enable_eplb
    all2all=("naive", "deepep"),  # envs.py, VLLM_ALL2ALL_BACKEND; DeepEP: pull request 18434
    layer_groups=True,  # v1/core/kv_cache_utils.py: _get_kv_cache_groups_uniform_page_size
    room_for="limits",  # v1/worker/gpu_model_runner.py, profile_run: _dummy_run, _dummy_sampler_run
    sampler=_SAMPLER_V1,
    masks="before",  # v1/core/sched/scheduler.py, schedule (0.10.2); 0.11 to 0.13 are taken as it
    mask_threads=8,  # v1/structured_output/__init__.py: half of the CPUs, at most eight
    reads_checkpoint=True,
    splits_experts=True,
    vocab_multiple=VOCAB_MULTIPLE,
    defaults=_VLLM_V1,
    cases=(_LARGE,),
)
_VLLM_11 = replace(
    _VLLM_09,
    name="vllm-0.11",
    # As gpt-oss is run on compute capability 10.x: VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 (vllm-project/recipes;
    # InferenceMAX's scripts). Without it inputs keep 16 bits (layers/quantization/mxfp4.py, get_mxfp4_backend).
    mxfp8_inputs=True,
    since=(0, 11),
    date="2025-10",
    source="as vllm-v1; whole graphs of single tokens (vllm-project/vllm pull request 25444, September 2025:"
    " cudagraph_mode FULL_AND_PIECEWISE); all-reduces: pull request 24111",
    called="",
    cases=(_LARGE, _GPT_OSS),
    routers=_ROUTERS._replace(score=LoadScore(waiting=4.0)),  # 0.10.2, 0.21.0, 0.24.0, 0.26.0: `waiting * 4 + running`
    latent_blocks=BLOCKS_11,
    latents=LATENTS_11,
    all2all=("allgather_reducescatter", "deepep", "naive"),  # envs.py, later config/parallel.py; pull request 23964
    whole_graphs=True,
    whole_to_running=True,  # v1/cudagraph_dispatcher.py, initialize_cudagraph_keys (until 0.30 pull request 57355)
    own_all_reduces=CUSTOM_LESS,
    outside=VLLM_11,
    # Since 0.10: layers/quantization/input_quant_fp8.py, QuantFP8 is torch's operators by default, which torch.compile
    # puts into the norm's and the activation's kernel (pull request 19830).
    quantizing=QUANTIZING,
)
_VLLM_14 = replace(
    _VLLM_11,
    name="vllm-0.14",
    since=(0, 14),
    date="2026-01",
    source="as vllm-0.11, with asynchronous scheduling, on by default since (vllm-project/vllm pull requests 19970,"
    " 27614, 31998; config/vllm.py: not with pipeline stages nor drafts by a model of its own)",
    latent_blocks=BLOCKS_14,
    latents=LATENTS_14,
    rope_kernels=ROPE_14,
    # Since 0.12: pull requests 26440 and 28406; envs.py, VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    shared_experts=SharedExperts(tokens=256, sent=True),
    masks="beside",  # v1/engine/core.py, step: get_grammar_bitmask behind execute_model
    overlaps=True,
    overlaps_stages=False,
    overlaps_drafting=(True, False),
    adapters_drafting=True,  # 0.14.1, v1/worker/gpu_input_batch.py, make_lora_inputs: an adapter for each sampled token
    graph_sizes=vllm_014_sizes,
    asked_graphs=AskedGraphs(vllm_014_sizes, whole=True),
    drafting_tokens=vllm_014_drafting_tokens,
    whole_prompt_tokens=0,  # engine/arg_utils.py: the larger of max_model_len and the default
    # Pull request 27883 (compilation/fusion.py, RMSNormQuantFusionPass: group shapes), on where `+quant_fp8` is:
    # config/vllm.py, enable_norm_fusion. Not beside DeepGEMM's packed scales (fp8_utils.py, _run_deepgemm).
    quantizing_blocks=("norms",),
    # utils/torch_utils.py, get_kv_cache_quant_algo_string (pull request 29980); Attention: kv_cache_scheme
    checkpoint_cache=True,
    two_batches=TwoBatches(32, 512),  # config/parallel.py: dbo_decode_token_threshold, dbo_prefill_token_threshold
)
_VLLM_19 = replace(
    _VLLM_14,
    name="vllm-0.19",
    since=(0, 19),
    date="2026-04",
    source="as vllm-0.14; scheduler_reserve_full_isl (config/scheduler.py; v1/core/kv_cache_manager.py, "
    "allocate_slots: full_sequence_must_fit); config/vllm.py (with pipeline stages since 0.16; with a draft model only"
    " where told to, until 0.28);"
    " 0.20 has gpu_memory_utilization and CUDA graphs' memory as 0.21",
    pads_replicas="graphed",
    host=hosts(VLLM_V1_24),
    sampler=_SAMPLER_17,
    latent_blocks=BLOCKS_19,
    overlaps_stages=True,
    may_overlap_drafting=True,
    whole_prompts_fit=True,
    slots_of_all=True,
    summed_norms=SUMMED_NORMS_19,
    own_all_reduces=CUSTOM_LESS_19,
    copies_blocks=False,  # pull request 38460 (April 2026, in 0.20): one cuMemcpyBatchAsync for all blocks and layers
    draft_graphs=(VLLM_DRAFTS_20, VLLM_DRAFTS_20),
    all2all=("allgather_reducescatter", "deepep"),  # naive: gone with pull request 33728 (February 2026)
    gathers_narrow=True,  # pull request 32567 (January 2026), prepare_finalize/naive_dp_ep.py: quantizes first
)
_VLLM_21 = replace(
    _VLLM_19,
    name="vllm-0.21",
    since=(0, 21),
    date="2026-05",
    source="as vllm-0.19; FlashInfer's sampling by default (envs.py, VLLM_USE_FLASHINFER_SAMPLER)",
    sampler=_SAMPLER_21,
    outside=VLLM_20,
    defaults=_VLLM_V1._replace(memory_fraction=0.92),  # config/cache.py, gpu_memory_utilization
)
_VLLM_28 = replace(
    _VLLM_21,
    name="vllm-0.28",
    since=(0, 28),
    date="2026-08",
    source="as vllm-0.19; limits of GPUs with 160 GiB and more"
    " (engine/arg_utils.py, get_batch_defaults) and graphs to 1,024 tokens on Blackwell (config/vllm.py,"
    " _set_cudagraph_sizes), neither in 0.27.1",
    host=hosts(VLLM_V1_32),
    # 0.27.1, 0.32.0: `waiting * 6.0 * max(0.0, kv_cache_usage - 0.5)`; eng_start_index moves on (0.26.0, 0.24.0 not)
    routers=_ROUTERS._replace(score=LoadScore(pressed=6.0, rotates=True)),
    sampler=_SAMPLER_28,
    overlaps_drafting=(True, True),
    draft_graphs=(VLLM_DRAFTS_28, VLLM_DRAFTS_20),
    slots_of_all=False,  # v1/core/sched/scheduler.py, draft_slots: of those in an iteration (not modelled)
    latents=LATENTS_14._replace(merged_index=True),
    summed_norms=SUMMED_NORMS_19._replace(alone=False),
    # config/vllm.py, enable_act_fusion (is_nvfp4_quantized); allreduce_rms_fusion.py, kARResidualRMSNormFP4Quant.
    quantizing=QUANTIZING | {"nvfp4": ("activations", "sums")},
    # compilation/passes/fusion/act_quant_fusion.py, SiluMulBlockQuantPattern; not in 0.19.
    quantizing_blocks=("norms", "activations"),
    cases=(_LARGE, _GPT_OSS, _LARGEST, _BLACKWELL),
)
_VLLM_29 = replace(
    _VLLM_28,
    name="vllm-0.29",
    since=(0, 29),
    date="2026-09",
    source="as vllm-0.28; FlashInfer's all-reduces by default (pull request 52998); of 8 ranks on compute capability"
    " 10.3 those to 4 MiB norm, too (allreduce_rms_fusion.py); DeepSeek V3.2 and GLM 5: models/deepseek_v32/nvidia,"
    " fused_allreduce_rms_norm, and config/vllm.py, DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES",
    own_all_reduces=CUSTOM_LESS_29,
    summed_norms=SUMMED_NORMS_29,
    own_selected=True,
    sparse_windows=True,  # config/cache.py: prefix_cache_retention_interval is 0
    drafting_tokens=vllm_029_drafting_tokens,
    # VLLM_MOE_SKIP_PADDING of the second model runner (v1/worker/gpu), which models with experts have since 0.29, few
    # of them in 0.28 (config/vllm.py, use_v2_model_runner); not in fused_moe/router/grouped_topk_router.py.
    padded_experts=("none", "none"),
    padded_grouped="own",
)
_VLLM_31 = replace(
    _VLLM_29,
    name="vllm-0.31",
    since=(0, 31),
    date="2026-10",
    source="as vllm-0.29, as is 0.30; a graph for max_num_seqs (config/vllm.py, _set_cudagraph_sizes)",
    graph_sizes=vllm_031_sizes,
    draft_graphs=(VLLM_DRAFTS_28, VLLM_DRAFTS_31_MODEL),
    prompt_limit="others",  # v1/core/sched/scheduler.py of 0.32.0: num_eligible_reqs > 1
)
_VLLM_33 = replace(
    _VLLM_31,
    name="vllm-0.33",
    since=(0, 33),
    date="2026-11",
    source="as vllm-0.31, as is 0.32; FlashInfer's all-reduces of 8 ranks to 128 MiB on compute capability"
    " 10.x; hashes of blocks cover the token behind them (config/vllm.py, num_hash_lookahead_tokens: with EAGLE and the"
    " model's own layer, not with kv_transfer_config)",
    own_all_reduces=CUSTOM_LESS_33,
    hashes_ahead=True,
)
RECORDS = (
    *V0_RECORDS,
    replace(
        _VLLM_09,
        name="vllm-0.8",
        since=(0, 8),
        date="2025-03",
        source="as vllm-v1; limits of large GPUs for A100, too (0.8.5, engine/arg_utils.py, 1569 to 1609)",
        called="",
        latent_blocks=BLOCKS_08,
        outside=VLLM_08,
        pads_replicas="never",
        draft_graphs=(VLLM_DRAFTS_08, VLLM_DRAFTS_08),
        may_overlap=False,
        fewer_in_budget=False,
        unseen_share=1.0,
        # platforms/cuda.py of 0.8.5, get_attn_backend_cls: FlashInfer is no default before pull request 19118 (0.9.1)
        tiled_heads=(*_VLLM_09.tiled_heads, "datacenter_blackwell"),
        layer_groups=False,
        eplb=False,
        all2all=("naive",),  # model_executor/layers/fused_moe/layer.py: naive_multicast, dp_group.all_reduce
        cases=(_LARGE._replace(but=()),),
    ),
    _VLLM_09,
    _VLLM_11,
    _VLLM_14,
    replace(
        _VLLM_14,
        name="vllm-0.17",
        since=(0, 17),
        date="2026-03",
        source="as vllm-0.14; a Triton kernel applies top-k and top-p (v1/sample/ops/topk_topp_triton.py)",
        pads_replicas="graphed",  # pull request 34102 (February 2026), v1/worker/dp_utils.py of 0.17.1
        slots_of_all=True,  # config/vllm.py, _set_max_num_scheduled_tokens; not in 0.14.1
        sampler=_SAMPLER_17,
    ),
    *(_VLLM_19, _VLLM_21, _VLLM_28, _VLLM_29, _VLLM_31, _VLLM_33),
)
