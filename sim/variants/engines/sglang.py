"""SGLang as a serving engine: a record for each of its releases from which on it works otherwise."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from sim.core.sampler import Sampler
from sim.variants.engines.defaults import Case, Defaults
from sim.variants.engines.drafting import SGLANG_DRAFTS, SGLANG_TEXT_03, SGLANG_TEXT_14
from sim.variants.engines.graph_sizes import (
    AskedGraphs,
    of_sequences,
    sglang_04_drafting_sizes,
    sglang_04_sizes,
    sglang_046_drafting_sizes,
    sglang_047_drafting_sizes,
    sglang_05_drafting_sizes,
    sglang_05_sizes,
    sglang_0510_prompt_sizes,
    sglang_0523_prompt_sizes,
)
from sim.variants.engines.handing_over import SGLANG as AHEAD
from sim.variants.engines.hosts import SGLANG, SGLANG_10, hosts
from sim.variants.engines.kernel_facts import (
    LARGEST_BYTES,
    LatentBlocks,
    LatentKernels,
    PromptGraphs,
    RopeKernels,
    SharedExperts,
    SummedNorms,
    TwoBatches,
)
from sim.variants.engines.outside_memory import SGLANG as OUTSIDE
from sim.variants.engines.own_all_reduce import CUSTOM
from sim.variants.engines.record import Engine
from sim.variants.engines.sglang_memory import (
    GIB,
    sglang_046_fraction,
    sglang_047_fraction,
    sglang_048_fraction,
    sglang_05_fraction,
    sglang_0510_fraction,
    sglang_0514_fraction,
    sglang_0515_fraction,
    sglang_0522_fraction,
)

_DRAFTING = Case({"max_running_requests": 48}, drafting=True)  # srt/server_args.py, _handle_speculative_decoding
# Of GPUs with little memory.
_SGLANG = Defaults(4096, 2048, 1, 0.88, prefix_cache="gpu", chunked_prefill=False, graphs_to=8)


def _sized(gib: int, tokens: int, graphs_to: int, tp: int = 1) -> Case:
    """Chunks and graphs from so much memory on."""
    return Case({"max_batch_tokens": tokens, "graphs_to": graphs_to}, memory_bytes=gib * GIB, tp=tp)


# srt/models/deepseek_v2.py: fused_qkv_a_proj_with_mqa since 0.4.6. How prompts attend (`no_absorb` of 0.4.5, later
# models/deepseek_common/attention_backend_handler.py): without cached tokens over keys of every head. Behind some, with
# FlashAttention 3 (Hopper's) so from chunked_prefix_cache_threshold on, 8,192 tokens of an iteration; with trtllm_mla
# (compute capability 10.x's since 0.5.10) always, with Triton's (Ampere's) never. In graphs of prompts, since 0.5.10,
# never (is_in_piecewise_cuda_graph). FORWARD_ABSORB_CORE_ATTENTION_BACKENDS take a query's parts apart, Triton's kernel
# does not.
# On AMD's GPUs `w_kc.to(torch.bfloat16) * self.w_scale` stands before each product (forward_absorb_prepare). Left out:
# since 0.5.6 not on an MI355X (pull request 13617).
# Rope is the model's; the cache is written by layers/attention's set_kv_buffer, later set_mla_kv_buffer.
_LATENTS = LatentKernels(
    False,
    ("ampere",),
    absorbed_context=dict.fromkeys(("ampere", "hopper", "blackwell"), math.inf),
    cache_apart=True,
    widened_absorbed=("other",),
)
_LATENTS_046 = _LATENTS._replace(
    merged_down=True, absorbed_context={"ampere": math.inf, "hopper": 8192, "blackwell": 8192}
)
_LATENTS_0510 = _LATENTS_046._replace(absorbed_context={"ampere": math.inf, "hopper": 8192}, absorbed_graphs=True)
# srt/models/qwen3.py and others, _apply_qk_norm: a kernel for each norm; in graphs the keys' on a second stream, here
# as one (0.4.9); since 0.5.10 one for both (models/utils.py, fused_inplace_qknorm). The rope is one of both tensors.
_ROPE_04, _ROPE_05 = RopeKernels(1, 3, writes=True), RopeKernels(1, 2, writes=True)
# srt/models/deepseek_v2.py, determine_n_share_experts_fusion, later shared_experts_fusion_disable_reason (256 experts,
# not with ep nor DeepEP; flashinfer_trtllm, the default on compute capability 10.x, disables it: server_args.py), and
# glm4_moe.py (GLM 4.5, in 0.5.3); else forward_normal_dual_stream, up to DUAL_STREAM_TOKEN_THRESHOLD or in graphs
# (read of DeepSeek V3's code, taken for all).
_SHARED_046, _SHARED_047 = SharedExperts(fused=(256,)), SharedExperts(1024, fused=(256,))
_SHARED_05 = SharedExperts(1024, graphed=True, fused=(256, 160, 128))
_SHARED_0510 = _SHARED_05._replace(sent=True)  # forward_deepep: alt_stream, in 0.5.10, not in 0.5.3
_SGLANG_TWO = TwoBatches(attention_apart=True)  # srt/two_batch_overlap.py, since 0.4.7: compute_split_seq_index
_SGLANG_04 = Engine(
    "sglang",
    "SGLang",
    (0, 4),
    "2024-12",
    "host: as vllm-v1's but for a sequence, beside the GPU (lmsys.org/blog/2024-12-04-sglang-v0-4: no idle time "
    "between decoding batches); launches as vllm-0.2; detokenizer and HTTP: measured of 0.5.23; "
    "limits: srt/server_args.py (small GPUs: less than 25,000 MiB); prompts first, in chunks: "
    "srt/managers/scheduler.py (enable_mixed_chunk is off); entry: SGLANG_INIT_NEW_TOKEN_RATIO 0.7, "
    "which falls to that times SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR 0.14; retraction: srt/managers/schedule_batch.py; "
    "memory: weights and cache fill mem_fraction_static (srt/model_executor/model_runner.py, profile_max_num_token); "
    "requests: model_runner.py, max_num_reqs (not modelled: down to 2,048 where the cache holds less than eight of the "
    "model's lengths); drafts: without overlap, in graphs of sequences (_handle_speculative_decoding; "
    "model_executor/cuda_graph_runner.py)",
    host=hosts(SGLANG),
    overlaps=True,
    graph_sizes=sglang_04_sizes,
    draft_graphs=SGLANG_DRAFTS["0.4"],
    trees=True,  # srt/server_args.py, speculative_eagle_topk, speculative_num_draft_tokens
    reserved_output=0.098,
    reserved_at_first=0.7,
    token_more=True,
    prompts_lead=True,
    swaps=False,  # srt/managers/schedule_batch.py, release_req
    retract_room_tokens=20,  # retract_decode_steps, as `sim.serve.scheduling.reserved_output`
    merges_prefixes=True,
    request_margin_tokens=1,  # srt/managers/tokenizer_manager.py: fewer than context_len
    activations_outside=True,
    unseen_share=1.0,  # hybrid_kvcache_ratio is off
    fp32_states=True,  # srt/configs/mamba_utils.py, mamba2_state_dtype: SGLANG_MAMBA_SSM_DTYPE is float32
    overlaps_stages=False,
    shares_stages=True,  # srt/managers/scheduler.py: pp_max_micro_batch_size, max_running_requests // pp_size
    overlaps_drafting=(False, False),
    drafts_as_told=True,  # srt/server_args.py, later arg_groups/serving_hook.py: speculative_draft_model_quantization
    handing_over=AHEAD,
    stages_drafting=False,  # srt/server_args.py (0.5.6, 3977 to 3982): refused
    text=None,
    adapters_drafting=False,  # srt/server_args.py (0.5.6, 4141 to 4146): refused with a draft model or layer
    drafting_tokens=of_sequences(sglang_04_drafting_sizes),
    asked_graphs=AskedGraphs(sglang_04_sizes, sglang_04_drafting_sizes, sequences=True, extends=False),
    outside=OUTSIDE,
    own_all_reduces=CUSTOM,
    latents=_LATENTS,
    rope_kernels=_ROPE_04,
    # srt/layers/logits_processor.py: `logits.float()`; srt/layers/sampler.py, srt/sampling/penaltylib (its penalties)
    sampler=Sampler("always", "rejection_at_once", "multinomial", "matrix", logprobs="probabilities", masks_copy=True),
    interval_skips_text=True,
    sent_together=16,  # srt/server_args.py: batch_notify_size (0.5.23, taken for all)
    # 0.5.3 and 0.5.23, srt/model_executor/model_runner.py: update_regex_vocab_mask behind the forward pass
    masks="beside",
    reads_checkpoint=True,
    splits_experts=True,
    vocab_multiple=64,  # srt/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
    defaults=_SGLANG,
    cases=(
        Case({"memory_fraction": 0.87}, tp=2),
        Case({"memory_fraction": 0.85}, tp=4),
        Case({"memory_fraction": 0.81}, tp=8),
        Case({"memory_fraction": 0.79}, tp=16),
        Case({"graphs_to": 80}, tp=4),
        _DRAFTING,
        Case({"max_batch_tokens": 8192, "graphs_to": 160}, memory_bytes=25_000 * 2.0**20),
    ),
)
_OVER_80 = Case({"graphs_to": 256}, memory_bytes=(80 * 1024 + 1) * 2.0**20)
_SGLANG_046 = replace(
    _SGLANG_04,
    name="sglang-0.4.6",
    since=(0, 4, 6),
    date="2025-04",
    source="as sglang; on GPUs of more than 80 GiB more memory and graphs (srt/server_args.py, the lines after "
    "get_device_memory_capacity; model_executor/cuda_graph_runner.py, get_batch_sizes_to_capture: without dp); "
    "DeepEP: enable_deepep_moe, later moe_a2a_backend",
    all2all=("allgather_reducescatter", "deepep"),
    dp_attention=True,  # srt/server_args.py, the lines of enable_dp_attention
    latents=_LATENTS_046,
    shared_experts=_SHARED_046,
    drafting_tokens=of_sequences(sglang_046_drafting_sizes),
    asked_graphs=AskedGraphs(sglang_04_sizes, sglang_046_drafting_sizes, sequences=True, extends=False),
    fraction=sglang_046_fraction,
    cases=(*_SGLANG_04.cases, _OVER_80),
)
_SGLANG_047 = replace(
    _SGLANG_046,
    name="sglang-0.4.7",
    since=(0, 4, 7),
    date="2025-06",
    source="as sglang-0.4.6; other sizes of memory (the same lines of srt/server_args.py and "
    "model_executor/cuda_graph_runner.py)",
    two_batches=_SGLANG_TWO,
    shared_experts=_SHARED_047,
    eplb=True,  # srt/server_args.py: enable_eplb
    draft_graphs=SGLANG_DRAFTS["0.4.7"],
    drafting_tokens=of_sequences(sglang_047_drafting_sizes),
    asked_graphs=AskedGraphs(sglang_04_sizes, sglang_047_drafting_sizes, sequences=True),
    fraction=sglang_047_fraction,
    cases=(
        *_SGLANG_04.cases,
        Case({"graphs_to": 256}, memory_bytes=(96 * 1024 + 1) * 2.0**20),
        Case({"max_batch_tokens": 16384, "graphs_to": 512}, memory_bytes=180_001 * 2.0**20),
    ),
)
_SGLANG_048 = replace(
    _SGLANG_047,
    name="sglang-0.4.8",
    since=(0, 4, 8),
    date="2025-06",
    source="as sglang-0.4.7; chunks, graphs and memory by the GPU's memory (srt/server_args.py and "
    "model_executor/cuda_graph_runner.py of 0.4.8 to 0.5.2); decode servers copy what they retract to the host "
    "(sgl-project/sglang pull request 7196; srt/disaggregation/decode.py, resume_retracted_reqs)",
    handing_over=AHEAD._replace(swaps=True),
    fraction=sglang_048_fraction,
    cases=(
        Case({"graphs_to": 80}, tp=4),
        _DRAFTING,
        _sized(35, 8192, 160),
        _sized(90, 8192, 256),
        _sized(160, 16384, 512),
    ),
)
_SGLANG_05 = replace(
    _SGLANG_048,
    name="sglang-0.5",
    text=SGLANG_TEXT_03,
    since=(0, 5, 3),
    date="2025-10",
    source="as sglang-0.4.8; chunks, graphs and memory by the GPU's memory (srt/server_args.py of 0.5.3, "
    "_handle_gpu_memory_settings; with 20 to 35 GiB and less than 4 ranks graphs to 24 since 0.5.5); padding: "
    "layers/moe/topk.py, _mask_topk_ids_padded_region, with expert parallelism alone (forward_batch_info.py, "
    "enable_num_token_non_padded; pull request 25852)",
    # srt/server_args.py: flashinfer_mxfp4 for gpt-oss on compute capability 10.x; its precision is "default"
    # (layers/quantization/mxfp4.py: mxfp8_quantize)
    mxfp8_inputs=True,
    # srt/layers/dp_attention.py, DpPaddingMode.get_dp_padding_mode: SUM_LEN with prompts (pull request 8280)
    sums_prompts=(True, True),
    # get_default_mode_in_cuda_graph: MAX_LEN; model_executor/cuda_graph_runner.py, can_run: max(global_num_tokens_cpu)
    pads_replicas="graphed",
    graph_sizes=sglang_05_sizes,
    drafting_tokens=of_sequences(sglang_05_drafting_sizes),
    asked_graphs=AskedGraphs(sglang_05_sizes, sglang_05_drafting_sizes, sequences=True),
    padded_experts=("own", "none"),
    rope_kernels=_ROPE_05,
    shared_experts=_SHARED_05,
    unseen_share=0.8,  # srt/server_args.py, swa_full_tokens_ratio
    retract_room_tokens=1,
    # srt/server_args.py, the lines of is_deepseek_nsa; 0.5.10, _set_default_nsa_kv_cache_dtype
    fp8_selected=True,
    latent_blocks=LatentBlocks(selected=64),
    fraction=sglang_05_fraction,
    cases=(
        _sized(20, 2048, 16),
        _sized(20, 2048, 80, tp=4),
        _sized(35, 4096, 32),
        _sized(35, 4096, 160, tp=4),
        _sized(60, 8192, 256),
        _sized(60, 8192, 512, tp=4),
        _sized(160, 16384, 512),
        _DRAFTING,
    ),
)
# srt/server_args.py, _get_default_attn_backend: trtllm_mha on compute capability 10.x, whose pages have 64 tokens
# (_handle_attention_backend_compatibility).
_TRTLLM_MHA = Case({"block_tokens": 64}, memory_bytes=LARGEST_BYTES, but=("hopper", "other"))
# srt/server_args.py, the list of architectures that sets enable_flashinfer_allreduce_fusion on compute capability 9.0
# and 10.x (0.5.10: DeepSeek V3, GLM 4.5, gpt-oss, Qwen3's experts; 0.5.11: DeepSeek V3.2, Qwen3-Next; not with dp
# attention, DeepEP, several nodes, nor, to 0.5.12, on H20; 0.5.20: arg_groups/overrides.py). Of each layer's code, so
# also without CUDA graphs. Not modelled: several nodes of B200 and later with NVLink between them (0.5.14);
# srt/layers/communicator.py, FUSE_ALLREDUCE_MAX_BATCH_SIZE, should_fuse_mlp_allreduce_with_next_layer. Assumption: the
# kernel takes as long as the all-reduce that it replaces.
_ANY_SIZE = dict.fromkeys((2, 4, 8), math.inf)
_SUMMED_NORMS = SummedNorms(
    _ANY_SIZE,
    _ANY_SIZE,
    2048,
    codes=("deepseek_v3", "gpt_oss", "qwen2_moe"),
    experts=True,
    selected=False,
    but=("h20",),
)
# Graphs of prompts. torch.compile cuts them out to 0.5.14: srt/server_args.py, _handle_piecewise_cuda_graph, later
# _disable_tc_piecewise_cudagraph_if_incompatible (drafts: not in 0.5.10), and _handle_moe_kernel_config to 0.5.12
# (flashinfer_trtllm, on compute capability 10.x the experts of DeepSeek V3 and Qwen3); configs/model_config.py,
# piecewise_cuda_graph_disabled_model_archs (DeepSeek V3.2 to 0.5.12, Qwen3-Next). Since 0.5.15 a capture that is broken
# at attention (model_executor/cuda_graph_config.py, default_prefill_backend; server_args.py, later
# arg_groups/cuda_graph_hook.py, disable_breakable_cudagraph_if_incompatible): not with latent attention before 0.5.18,
# save over selected keys since 0.5.17; beside LoRA and replicas that share experts since 0.5.17; beside stages to
# 0.5.19. Of DeepSeek V3's code not with trtllm_mla, the default on 10.x
# (disable_prefill_cuda_graph_for_deepseek_trtllm_mla). Not modelled: with DeepEP since 0.5.17, where experts break the
# capture, too (here: none), models that read pictures and Kimi Linear (none), NemotronH with 0.5.17 (none).
_GRAPHS_0510 = PromptGraphs(sglang_0510_prompt_sizes)
_GRAPHS_0511 = _GRAPHS_0510._replace(drafts=True)
_GRAPHS_0514 = _GRAPHS_0511._replace(latent_blackwell=True, selected=True, experts_blackwell=True)
_GRAPHS_0515 = PromptGraphs(
    sglang_0510_prompt_sizes,
    drafts=True,
    stages=True,
    pools=True,
    offload=True,
    latent=False,
    states=True,
    experts_blackwell=True,
)
_GRAPHS_0517 = _GRAPHS_0515._replace(adapters=True, replicas=True, selected=True)
_GRAPHS_0518 = _GRAPHS_0517._replace(latent=True)
_GRAPHS_0520 = _GRAPHS_0518._replace(stages=False)
_SGLANG_0510 = replace(
    _SGLANG_05,
    name="sglang-0.5.10",
    host=hosts(SGLANG_10),
    since=(0, 5, 10),
    date="2026-04",
    source="as sglang-0.5; piecewise CUDA graphs of prompts by default (sgl-project/sglang pull request 16331)",
    # srt/server_args.py, _handle_mamba_radix_cache: no_buffer, the default (0.5.10 to 0.5.12; 0.5.14: extra_buffer)
    overlaps_states=False,
    sums_prompts=(True, False),  # srt/layers/moe/utils.py: should_use_dp_reduce_scatterv (pull request 22642)
    summed_norms=_SUMMED_NORMS,
    own_prompt_graphs=_GRAPHS_0510,
    latents=_LATENTS_0510,
    shared_experts=_SHARED_0510,
    fraction=partial(sglang_0510_fraction, graphs=_GRAPHS_0510),
    cases=(_sized(20, 2048, 24), *_SGLANG_05.cases[1:], _TRTLLM_MHA),
)
_SGLANG_0511 = replace(
    _SGLANG_0510,
    name="sglang-0.5.11",
    since=(0, 5, 11),
    date="2026-05",
    source="as sglang-0.5.10; the host works beside the GPU with drafts, too, one after another (srt/environ.py, "
    "SGLANG_ENABLE_SPEC_V2, true since; srt/server_args.py, _handle_speculative_decoding: not with "
    "speculative_eagle_topk above 1)",
    overlaps_drafting=(True, True),
    own_prompt_graphs=_GRAPHS_0511,
    draft_graphs=SGLANG_DRAFTS["0.5.11"],
    fraction=partial(sglang_0510_fraction, graphs=_GRAPHS_0511),
    summed_norms=_SUMMED_NORMS._replace(states=True, selected=True),
)
_SGLANG_0514 = replace(
    _SGLANG_0511,
    name="sglang-0.5.14",
    since=(0, 5, 14),
    date="2026-06",
    source="as sglang-0.5.11; drafts' weights and cache in mem_fraction_static, which keeps nothing free for them "
    "(srt/managers/scheduler.py, init_model_worker; srt/model_executor/pool_configurator.py, EAGLE/STANDALONE; "
    "srt/server_args.py, _handle_gpu_memory_settings)",
    drafts_inside=True,
    text=SGLANG_TEXT_14,
    overlaps_states=True,
    caps_chunks=False,  # srt/managers/schedule_policy.py, add_one_req (0.5.14, 0.5.23; not in 0.5.11)
    own_prompt_graphs=_GRAPHS_0514,
    draft_graphs=SGLANG_DRAFTS["0.5.14"],
    overlaps_trees=True,  # srt/speculative: eagle_worker.py is gone; 0.5.11: "v2 currently only supports topk = 1"
    summed_norms=_SUMMED_NORMS._replace(states=True, selected=True, but=()),
    fraction=partial(sglang_0514_fraction, graphs=_GRAPHS_0514),
)
_SGLANG_0515 = replace(
    _SGLANG_0514,
    name="sglang-0.5.15",
    since=(0, 5, 15),
    date="2026-07",
    source="as sglang-0.5.14; graphs of prompts without torch.compile, not with latent attention; memory by pool",
    own_prompt_graphs=_GRAPHS_0515,
    draft_graphs=SGLANG_DRAFTS["0.5.15"],
    fraction=partial(sglang_0515_fraction, graphs=_GRAPHS_0515),
)
_SGLANG_0517 = replace(
    _SGLANG_0515,
    name="sglang-0.5.17",
    since=(0, 5, 17),
    date="2026-08",
    source="as sglang-0.5.15; graphs of prompts beside LoRA and replicas that share experts",
    own_prompt_graphs=_GRAPHS_0517,
    fraction=partial(sglang_0515_fraction, graphs=_GRAPHS_0517),
)
_SGLANG_0518 = replace(
    _SGLANG_0517,
    name="sglang-0.5.18",
    since=(0, 5, 18),
    date="2026-08",
    source="as sglang-0.5.17; graphs of prompts with latent attention, too",
    own_prompt_graphs=_GRAPHS_0518,
    fraction=partial(sglang_0515_fraction, graphs=_GRAPHS_0518),
)
_SGLANG_0520 = replace(
    _SGLANG_0518,
    name="sglang-0.5.20",
    since=(0, 5, 20),
    date="2026-09",
    source="as sglang-0.5.18; chunks and graphs of GPUs with 20 to 35 GiB (srt/arg_groups/memory_hook.py)",
    own_prompt_graphs=_GRAPHS_0520,
    fraction=partial(sglang_0515_fraction, graphs=_GRAPHS_0520),
    asked_graphs=AskedGraphs(sglang_05_sizes, sglang_05_drafting_sizes, sequences=True, keeps_largest=True),
    cases=(_sized(20, 4096, 48), _sized(20, 4096, 160, tp=4), *_SGLANG_0510.cases[2:]),
)
_GRAPHS_0523 = _GRAPHS_0520._replace(sizes=sglang_0523_prompt_sizes)
_SGLANG_0523 = replace(
    _SGLANG_0520,
    name="sglang-0.5.23",
    since=(0, 5, 23),
    date="2026-10",
    source="as sglang-0.5.20, as are 0.5.21 and 0.5.22; memory by max_running_requests where these are stated, since "
    "0.5.22; with latent attention graphs of prompts to 8,192 tokens (srt/arg_groups/memory_hook.py), in which these "
    "attend in the latent's width "
    "(models/deepseek_common/attention_backend_handler.py)",
    own_prompt_graphs=_GRAPHS_0523,
    draft_graphs=SGLANG_DRAFTS["0.5.23"],
    fraction=partial(sglang_0522_fraction, graphs=_GRAPHS_0523),
)
RECORDS = (
    *(_SGLANG_04, _SGLANG_046, _SGLANG_047, _SGLANG_048, _SGLANG_05),
    *(_SGLANG_0510, _SGLANG_0511, _SGLANG_0514, _SGLANG_0515, _SGLANG_0517, _SGLANG_0518, _SGLANG_0520),
    _SGLANG_0523,
)
