"""vLLM before V1 as a serving engine: a record for each of its releases from which on it works otherwise."""

from __future__ import annotations

from dataclasses import replace

from sim.core.sampler import Sampler
from sim.variants.engines.defaults import Case, Defaults
from sim.variants.engines.handing_over import VLLM as PROXIED
from sim.variants.engines.hosts import V5, V6, VLLM_02, hosts
from sim.variants.engines.outside_memory import VLLM
from sim.variants.engines.own_all_reduce import CUSTOM
from sim.variants.engines.record import Engine
from sim.variants.engines.vllm_kernels import LATENTS_09, ROPE_EAGER

# Prompts first; with more than 32,768 positions chunked prefill (engine/arg_utils.py of 0.5.4 to 0.7), by 512 tokens
# before 0.6.5; else as many as the model has positions, at least 2,048 (config.py, SchedulerConfig).
_VLLM_V0 = Defaults(chunked_prefill=False, graphs_to=256)
_WATERMARK = 0.01  # core/block_manager.py
_LONG = Case({"chunked_prefill": True, "max_batch_tokens": 512}, positions=32769)
_DRAFTING_WHOLE = Case({"chunked_prefill": False}, drafting=True)  # use_spec_decode, in the same lines

VOCAB_MULTIPLE = 64  # model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
# model_executor/layers/sampler.py: `logits.to(torch.float32)`
SAMPLER_V0 = Sampler("always", "sort", "exponential", "bins", probabilities=True)
_FIRST_VLLM = Engine(
    "vllm-0.2",
    "vLLM",
    (0, 1),
    "2023-11",
    "host: fitted to splitwise_llama2_70b; no graphs before 0.2.7; csrc/attention/attention_kernels.cu has a block "
    "for each query head; max_num_batched_tokens 2,560 (engine/arg_utils.py); whole prompts first and alone "
    "(core/scheduler.py), entry: core/block_manager.py",
    host=VLLM_02,
    decode_attention="per_head",
    text=None,
    stages_drafting=False,  # nothing was read of releases before V1 about drafts beside stages, adapters or pools
    adapters_drafting=False,
    handing_over=PROXIED,
    whole_prompts=True,
    copies_blocks=True,  # csrc/cache_kernels.cu, swap_blocks: a cudaMemcpyAsync for each block; worker/cache_engine.py
    swaps=False,  # core/scheduler.py, _preempt: by swapping only requests of several sequences
    unseen_share=1.0,  # as V1 without its hybrid cache manager (v1/core/kv_cache_utils.py: unify_hybrid_kv_cache_specs)
    sized_tokens=2560,
    watermark=_WATERMARK,
    latents=LATENTS_09,
    rope_kernels=ROPE_EAGER,
    room_for="limits",  # worker/worker.py, profile_num_available_blocks: draws with top-p and top-k
    sampler=SAMPLER_V0,
    reads_checkpoint=True,
    splits_experts=True,
    vocab_multiple=VOCAB_MULTIPLE,
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
    host=hosts(V5),
    text=None,
    stages_drafting=False,  # as vllm-0.2
    adapters_drafting=False,
    handing_over=PROXIED,
    runs_by_stage=True,  # engine/llm_engine.py: a scheduler of max_num_seqs for each stage
    padded_experts=("alike", "alike"),
    whole_prompts=True,
    whole_prompt_tokens=2048,
    budget_for_all=True,
    room_for_longest=True,
    unseen_share=1.0,
    copies_blocks=True,
    own_all_reduces=CUSTOM,
    outside=VLLM,
    watermark=_WATERMARK,
    latents=LATENTS_09,
    rope_kernels=ROPE_EAGER,
    room_for="limits",
    sampler=SAMPLER_V0,
    reads_checkpoint=True,
    splits_experts=True,
    vocab_multiple=VOCAB_MULTIPLE,
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
    host=hosts(V6),
    token_more=True,
    defaults=_VLLM_V0._replace(graphs_to=8192),
)
V0_RECORDS = (
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
        budget_for_all=True,  # config.py, SchedulerConfig._verify_args
        room_for_longest=True,  # pull request 2163, engine/llm_engine.py
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
)
