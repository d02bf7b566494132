"""What a serving engine does its own way: its host's time, its CUDA graphs, its kernels, its limits.

`inference.engine` names one of `ENGINES`, or a file (`sim.serve.engine_file`). Adding an engine is one more record
there: the key's allowed values and the JSON Schema follow from the dict, and nothing else in the simulator asks for an
engine's name.

Seconds called "fitted" are printed by `python tools/fit_engines.py`: least squares on every second row of one table in
`scenarios/published`; docs/accuracy_causes.md has the errors on the other rows, and those of the table left out.
"""

from __future__ import annotations

from dataclasses import replace

from sim.serve.engine_record import Case, Defaults, Engine, HostTimes, TwoBatches
from sim.serve.graph_sizes import (
    by_eights_to,
    sglang_046_drafting_sizes,
    sglang_05_drafting_sizes,
    sglang_05_sizes,
    sglang_drafting_sizes,
    sglang_older_drafting_sizes,
    sglang_sizes,
    trtllm_sizes,
    vllm_sizes,
)
from sim.serve.own_all_reduce import CUSTOM, CUSTOM_LESS, MIN_LATENCY
from sim.serve.sglang_memory import (
    GIB,
    sglang_046_fraction,
    sglang_047_fraction,
    sglang_fraction,
    sglang_older_fraction,
)

# Fitted, each number once: other records take theirs from these.
_VLLM_02 = {
    "ampere": HostTimes(
        iteration_s=0.206e-3,
        rank_s=0.628e-3,
        sequence_s=0.345e-3,
        prompt_s=14.1e-3,
        oversize_s=16.6e-6,
        launch_s=44.4e-6,
        uncertainty=0.072,
    ),
    "hopper": HostTimes(
        iteration_s=6.42e-3,
        rank_s=0.983e-3,
        sequence_s=0.226e-3,
        prompt_s=10.1e-3,
        oversize_s=6.38e-6,
        launch_s=17.4e-6,
        uncertainty=0.063,
    ),
}
_TRTLLM_06 = HostTimes(launch_s=19.5e-6, uncertainty=0.056)
_TRTLLM = {
    "ampere": HostTimes(collective_s=68.3e-6, uncertainty=0.05),
    "hopper": HostTimes(sequence_s=2.33e-6, collective_s=19.1e-6, launch_s=_TRTLLM_06.launch_s, uncertainty=0.059),
}
_TRITON = HostTimes(
    iteration_s=0.359e-3,
    sequence_s=16.3e-6,
    prompt_s=5.82e-3,
    collective_s=_TRTLLM["hopper"].collective_s,
    request_s=1.11e-3,
    uncertainty=0.16,
)
_FP8_EXPERTS = 0.759  # fitted with `_TRTLLM`
# Hosts of A100 are older. Only vLLM of 2023 was measured beside both GPUs.
A100_BY_H100 = _VLLM_02["ampere"].sequence_s / _VLLM_02["hopper"].sequence_s

# Host seconds that no table here judges, from what authors wrote; the spread of what they wrote is the uncertainty.
_LAUNCH_S, _HTTP_S = _VLLM_02["hopper"].launch_s, _TRITON.request_s
_V5 = HostTimes(5e-3, sequence_s=31e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)
_V6 = HostTimes(2.5e-3, sequence_s=15.6e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)
_V1 = HostTimes(1.5e-3, sequence_s=8e-6, launch_s=_LAUNCH_S, request_s=_HTTP_S, uncertainty=0.4)


def _hosts(hopper: HostTimes) -> dict[str, HostTimes]:
    """Those of an H100, and beside an A100 with the launches that were measured there."""
    older = hopper.slower(A100_BY_H100)
    return {"ampere": older._replace(launch_s=_VLLM_02["ampere"].launch_s), "hopper": hopper}


# Large GPUs but A100, which 0.8 does not except: vLLM, engine/arg_utils.py (the API server's; offline 16,384 and 8,192
# tokens).
_LARGE = Case({"max_running_requests": 1024, "max_batch_tokens": 8192}, memory_bytes=70 * GIB, but=("ampere",))
_VLLM_V1 = Defaults(max_batch_tokens=2048, prefix_cache="gpu", graphs_to=512)
# Prompts first; with more than 32,768 positions chunked prefill (engine/arg_utils.py of 0.5.4 to 0.7), by 512 tokens
# before 0.6.5; else as many as the model has positions, at least 2,048 (config.py, SchedulerConfig).
_VLLM_V0 = Defaults(chunked_prefill=False, graphs_to=256)
_WATERMARK = 0.01  # core/block_manager.py
_LONG = Case({"chunked_prefill": True, "max_batch_tokens": 512}, positions=32769)
_DRAFTING_WHOLE = Case({"chunked_prefill": False}, drafting=True)  # use_spec_decode, in the same lines
# The cache has 0.9 of what weights and activations leave free: 0.8, batch_manager/kvCacheConfig.h
# (kDefaultGpuMemFraction, 0.85 until 0.7); 1.0, _torch/pyexecutor/_util.py (_cal_max_memory), llmapi/llm_args.py.
_TRTLLM_FREE = Defaults(memory_fraction=1.0, free_fraction=0.9, block_tokens=64, chunked_prefill=False)
_TRTLLM_LIMITS = _TRTLLM_FREE._replace(max_running_requests=2048)
_DRAFTING = Case({"max_running_requests": 48}, drafting=True)  # srt/server_args.py, _handle_speculative_decoding
# Of GPUs with little memory.
_SGLANG = Defaults(4096, 2048, 1, 0.88, prefix_cache="gpu", chunked_prefill=False, graphs_to=8)


def _sized(gib: int, tokens: int, graphs_to: int, tp: int = 1) -> Case:
    """Chunks and graphs from so much memory on."""
    return Case({"max_batch_tokens": tokens, "graphs_to": graphs_to}, memory_bytes=gib * GIB, tp=tp)


_FIRST_VLLM = Engine(
    "vllm-0.2",
    "vLLM",
    (0, 1),
    "2023-11",
    "host: fitted to splitwise_llama2_70b; no graphs before 0.2.7; csrc/attention/attention_kernels.cu has a block "
    "for each query head; max_num_batched_tokens 2,560 (engine/arg_utils.py); whole prompts first and alone "
    "(core/scheduler.py), entry: core/block_manager.py",
    host=_VLLM_02,
    decode_attention="per_head",
    whole_prompts=True,
    sized_tokens=2560,
    watermark=_WATERMARK,
    reads_checkpoint=True,
    splits_experts=True,
    defaults=Defaults(max_batch_tokens=2560, chunked_prefill=False),
)
_VLLM_05 = Engine(
    "vllm-0.5",
    "vLLM",
    (0, 3),
    "2024-07",
    "host: 5 to 13 ms without a kernel between two iterations (vllm-project/vllm issue 6854, July 2024), read as"
    " one sequence and 256, others 20 at 200 (issue 6801); launches as vllm-0.2, HTTP as trtllm-triton;"
    " whole prompts first: core/scheduler.py; 0.5.4, engine/arg_utils.py: 256 requests (63), no prefix cache (56),"
    " chunks (747 to 773); max_num_batched_tokens: the model's length (config.py, 804 to 818);"
    " padding: token 0 (worker/model_runner.py)",
    host=_hosts(_V5),
    padded_experts=("alike", "alike"),
    whole_prompts=True,
    whole_prompt_tokens=2048,
    own_all_reduces=CUSTOM,
    watermark=_WATERMARK,
    reads_checkpoint=True,
    splits_experts=True,
    defaults=_VLLM_V0,
    cases=(_LONG, _DRAFTING_WHOLE),
)
_VLLM_06 = replace(
    _VLLM_05,
    name="vllm-0.6",
    since=(0, 6),
    date="2024-09",
    source="host: a half of vllm-0.5's, whose time a token at 32 requests a second fell to a fifth on an 8B and to a"
    " half on a 70B (blog.vllm.ai, 5 September 2024: asynchronous output, several steps to a schedule); 5 to 6 ms"
    " at 256 (vllm-project/vllm issue 10634, November 2024); graphs to max_num_seqs (pull request 7894); a token more:"
    " engine/llm_engine.py (async_output_proc); the rest as vllm-0.5 (0.6.4, engine/arg_utils.py, 116 to 123, 996 to"
    " 1020; config.py, 1104 to 1118); not modelled: num_scheduler_steps above 1 (default 1)",
    host=_hosts(_V6),
    token_more=True,
    defaults=_VLLM_V0._replace(graphs_to=8192),
)
_VLLM_09 = Engine(
    "vllm-v1",
    "vLLM",
    (0, 9),
    "2025-05",
    "host: a 1B takes 2.7 ms a token alone, a millisecond of it the GPU's (vllm-project/vllm pull request 17866,"
    " May 2025); at 256 2 to 3 ms once the API server is a process of its own (issue 10634), as it is since 0.7,"
    " 5 to 6 before (pull request 11133); launches as vllm-0.2, HTTP as trtllm-triton;"
    " limits: engine/arg_utils.py (_set_default_args_v1; 0.11.0, 1548 to 1578, 1605 to 1625);"
    " piecewise graphs: config.py; padding: tokens of earlier iterations, which choose"
    " experts until VLLM_MOE_SKIP_PADDING (pull request 46428, June 2026)",
    host=_hosts(_V1),
    graph_sizes=by_eights_to,
    prompt_graphs=True,
    whole_prompts=True,
    prompts_beside=True,
    shares_at_once=True,
    called="vLLM V1",
    own_all_reduces=CUSTOM,
    eplb=True,  # since 0.9.2: config.py, enable_eplb
    deep_ep=True,
    reads_checkpoint=True,
    splits_experts=True,
    defaults=_VLLM_V1,
    cases=(_LARGE,),
)
_VLLM_14 = replace(
    _VLLM_09,
    name="vllm-0.14",
    since=(0, 14),
    date="2026-01",
    source="as vllm-v1, with asynchronous scheduling, on by default since (vllm-project/vllm pull requests 19970,"
    " 27614, 31998; config/vllm.py: not with pipeline stages nor drafts by a model of its own)",
    called="",
    overlaps=True,
    overlaps_stages=False,
    overlaps_drafting=(True, False),
    graph_sizes=vllm_sizes,
    own_all_reduces=CUSTOM_LESS,
    two_batches=TwoBatches(32, 512),  # config/parallel.py: dbo_decode_token_threshold, dbo_prefill_token_threshold
)
_SGLANG_TWO = TwoBatches(attention_apart=True)  # srt/two_batch_overlap.py, since 0.4.7: compute_split_seq_index
_SGLANG_04 = Engine(
    "sglang",
    "SGLang",
    (0, 4),
    "2024-12",
    "host: as vllm-v1's, beside the GPU (lmsys.org/blog/2024-12-04-sglang-v0-4: no idle time between decoding "
    "batches); launches as vllm-0.2, HTTP as trtllm-triton; "
    "limits: srt/server_args.py (small GPUs: less than 25,000 MiB); prompts first, in chunks: "
    "srt/managers/scheduler.py (enable_mixed_chunk is off); entry: SGLANG_INIT_NEW_TOKEN_RATIO 0.7, "
    "which falls to that times SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR 0.14; retraction: srt/managers/schedule_batch.py; "
    "memory: weights and cache fill mem_fraction_static (srt/model_executor/model_runner.py, profile_max_num_token); "
    "requests: model_runner.py, max_num_reqs (not modelled: down to 2,048 where the cache holds less than eight of the "
    "model's lengths); drafts: without overlap, in graphs of sequences (_handle_speculative_decoding; "
    "model_executor/cuda_graph_runner.py)",
    host=_hosts(_V1),
    overlaps=True,
    graph_sizes=sglang_sizes,
    reserved_output=0.098,
    reserved_at_first=0.7,
    token_more=True,
    prompts_lead=True,
    retract_room_tokens=20,  # retract_decode_steps, as `sim.serve.reserved_output`
    merges_prefixes=True,
    activations_outside=True,
    overlaps_stages=False,
    overlaps_drafting=(False, False),
    drafting_sizes=sglang_drafting_sizes,
    own_all_reduces=CUSTOM,
    reads_checkpoint=True,
    splits_experts=True,
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
_TRTLLM_08 = Engine(
    "trtllm",
    "TensorRT-LLM",
    (0, 8),
    "2025-01",
    "fitted to trtllm_017_throughput; launches and policy as trtllm-0.6; prompts in chunks as trtllm-bench runs it "
    "(tensorrt_llm/bench/dataclasses/configuration.py: ExecutorSettingsConfig.chunking true; its MAX_UTILIZATION is "
    "replaced by NO_EVICT in bench/benchmark/throughput.py); not modelled: dynamic_max_batch_size",
    host=_TRTLLM,
    reserved_output=1.0,
    whole_prompts=True,
    prompts_beside=True,
    fp8_cache=True,
    experts_speed=_FP8_EXPERTS,
    splits_experts=True,
    defaults=_TRTLLM_LIMITS._replace(chunked_prefill=True),
)
_RECORDS = (
    Engine(
        "bundled",
        "bundled",
        (),
        "2026-11",
        "this project's: one kernel after another, a host of no time",
        two_batches=TwoBatches(),
        eplb=True,
    ),
    _FIRST_VLLM,
    replace(
        _FIRST_VLLM,
        name="vllm-0.2.7",
        since=(0, 2, 7),
        date="2024-01",
        source="as vllm-0.2; prompts padded, max_paddings 256 (core/scheduler.py of 0.2.2 to 0.3.3); graphs to 256,"
        " padding: token 0 (worker/model_runner.py); max_num_batched_tokens: the model's length, which also sizes the"
        " memory (config.py, SchedulerConfig)",
        padded_experts=("alike", "alike"),
        whole_prompt_tokens=2048,
        sized_tokens=None,
        paddings=256,
        defaults=_VLLM_V0,
    ),
    _VLLM_05,
    _VLLM_06,
    replace(
        _VLLM_06,
        name="vllm-0.6.5",
        since=(0, 6, 5),
        date="2024-12",
        source="as vllm-0.6; chunks of 2,048 tokens (0.6.5, config.py, 1333 to 1348), none on AMD's GPUs "
        "(engine/arg_utils.py, 1063 to 1093; 204 to 210: 256 requests, no prefix cache); until 0.7.3",
        cases=(
            Case({"chunked_prefill": True, "max_batch_tokens": 2048}, positions=32769, but=("other",)),
            _DRAFTING_WHOLE,
        ),
    ),
    replace(
        _VLLM_09,
        name="vllm-0.8",
        since=(0, 8),
        date="2025-03",
        source="as vllm-v1; limits of large GPUs for A100, too (0.8.5, engine/arg_utils.py, 1569 to 1609)",
        called="",
        eplb=False,
        deep_ep=False,
        cases=(_LARGE._replace(but=()),),
    ),
    _VLLM_09,
    _VLLM_14,
    replace(
        _VLLM_14,
        name="vllm-0.19",
        since=(0, 19),
        date="2026-04",
        source="as vllm-0.14; scheduler_reserve_full_isl (config/scheduler.py; v1/core/kv_cache_manager.py, "
        "allocate_slots: full_sequence_must_fit); config/vllm.py (with pipeline stages since 0.16; drafts as in 0.32)",
        overlaps_stages=True,
        overlaps_drafting=(True, True),
        whole_prompts_fit=True,
    ),
    _SGLANG_04,
    replace(
        _SGLANG_04,
        name="sglang-0.4.6",
        since=(0, 4, 6),
        date="2025-04",
        source="as sglang; on GPUs of more than 80 GiB more memory and graphs (srt/server_args.py, the lines after "
        "get_device_memory_capacity; model_executor/cuda_graph_runner.py, get_batch_sizes_to_capture: without dp); "
        "DeepEP: enable_deepep_moe",
        deep_ep=True,
        drafting_sizes=sglang_046_drafting_sizes,
        fraction=sglang_046_fraction,
        cases=(*_SGLANG_04.cases, _OVER_80),
    ),
    replace(
        _SGLANG_04,
        name="sglang-0.4.7",
        since=(0, 4, 7),
        date="2025-06",
        source="as sglang-0.4.6; other sizes of memory (the same lines of srt/server_args.py and "
        "model_executor/cuda_graph_runner.py)",
        two_batches=_SGLANG_TWO,
        deep_ep=True,
        drafting_sizes=sglang_older_drafting_sizes,
        fraction=sglang_047_fraction,
        cases=(
            *_SGLANG_04.cases,
            Case({"graphs_to": 256}, memory_bytes=(96 * 1024 + 1) * 2.0**20),
            Case({"max_batch_tokens": 16384, "graphs_to": 512}, memory_bytes=180_001 * 2.0**20),
        ),
    ),
    replace(
        _SGLANG_04,
        name="sglang-0.4.8",
        since=(0, 4, 8),
        date="2025-06",
        source="as sglang; chunks, graphs and memory by the GPU's memory (srt/server_args.py and "
        "model_executor/cuda_graph_runner.py of 0.4.8 to 0.5.2)",
        two_batches=_SGLANG_TWO,
        eplb=True,  # srt/server_args.py: enable_eplb
        deep_ep=True,
        drafting_sizes=sglang_older_drafting_sizes,
        fraction=sglang_older_fraction,
        cases=(
            Case({"graphs_to": 80}, tp=4),
            _DRAFTING,
            _sized(35, 8192, 160),
            _sized(90, 8192, 256),
            _sized(160, 16384, 512),
        ),
    ),
    replace(
        _SGLANG_04,
        name="sglang-0.5",
        since=(0, 5, 3),
        date="2025-10",
        source="as sglang; chunks, graphs and memory by the GPU's memory (srt/server_args.py of 0.5.3, "
        "_handle_gpu_memory_settings; with 20 to 35 GiB and less than 4 ranks graphs to 24 since 0.5.5); padding: "
        "layers/moe/topk.py, _mask_topk_ids_padded_region, with expert parallelism alone (forward_batch_info.py, "
        "enable_num_token_non_padded; pull request 25852)",
        graph_sizes=sglang_05_sizes,
        drafting_sizes=sglang_05_drafting_sizes,
        padded_experts=("own", "none"),
        retract_room_tokens=1,
        fraction=sglang_fraction,
        two_batches=_SGLANG_TWO,
        eplb=True,  # srt/server_args.py: enable_eplb
        deep_ep=True,
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
    ),
    Engine(
        "trtllm-0.6",
        "TensorRT-LLM",
        (0, 5),
        "2023-12",
        "launches and group_reads: fitted to trtllm_static_h100; no kernel reads a KV head once for a group before 0.8 "
        "(XQA blog); the capacity scheduler's default policy is GUARANTEED_NO_EVICT, and chunked context is off "
        "(useful-runtime-flags.md)",
        host={"hopper": _TRTLLM_06},
        decode_attention="per_head",
        group_reads=0.768,
        reserved_output=1.0,
        whole_prompts=True,
        prompts_beside=True,
        fp8_cache=True,
        splits_experts=True,
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
            "ampere": _TRITON.slower(A100_BY_H100)._replace(collective_s=_TRTLLM["ampere"].collective_s),
            "hopper": _TRITON,
        },
        defaults=_TRTLLM_LIMITS,
    ),
    _TRTLLM_08,
    Engine(
        "trtllm-1.0",
        "TensorRT-LLM",
        (1, 0),
        "2025-09",
        "the PyTorch backend, default since 1.0, with overlap scheduler and CUDA graphs (llmapi/llm_args.py: "
        "disable_overlap_scheduler false; enable_chunked_prefill false; GUARANTEED_NO_EVICT); with pipeline stages the "
        "host works beside other micro batches (_torch/pyexecutor/py_executor.py, _executor_loop_pp); graphs of padded "
        "batches to max_batch_size, as trtllm-bench keeps them (bench/benchmark/utils/general.py) and the examples "
        "for servers ask for them (examples/configs): without any configuration batches are not padded, and those "
        "above 128 have no graph; host, launches and HTTP as vllm-v1's; padding: one request again and again "
        "(_torch/pyexecutor/cuda_graph_runner.py); drafts: _torch/speculative/interface.py, support_overlap_scheduler",
        host=_hosts(_V1),
        overlaps=True,
        graph_sizes=trtllm_sizes,
        drafting_sizes=trtllm_sizes,
        overlaps_drafting=(True, False),
        padded_experts=("alike", "alike"),
        reserved_output=1.0,
        whole_prompts=True,
        prompts_beside=True,
        fp8_cache=True,
        own_all_reduces=MIN_LATENCY,
        eplb=True,  # llmapi/llm_args.py: MoeLoadBalancerConfig
        deep_ep=True,
        reads_checkpoint=True,
        splits_experts=True,
        defaults=_TRTLLM_LIMITS._replace(block_tokens=32, prefix_cache="gpu", graphs_to=2048),
    ),
)
ENGINES: dict[str, Engine] = {record.name: record for record in _RECORDS}
ENGINE_FILES = ".json"  # how the names of files end that `sim.serve.engine_file` reads
