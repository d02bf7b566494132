"""Record what SGLang's own scheduler puts into every iteration, for tests/sim/serve/test_real_schedulers.py.

    PYTHON tools/record_sglang.py --source FOLDER --out tests/sim/serve/data/sglang_VERSION.json

FOLDER has SGLang's Python sources (an unpacked source archive of PyPI), 0.5.3 or near it. PYTHON is an interpreter with
torch, transformers and what SGLang imports; compiled parts are replaced by empty modules. The overlap scheduler's loop,
its admission, retraction and radix cache are SGLang's; in place of the model a function returns a token for each
sequence. Requests, and when they come, are as in tools/record_vllm.py; tokens are sorted by request. Blocks are of one
token; those of a token too many (for a request that has just ended) are left out, and so is an iteration of nothing but
such requests, while nobody waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

from recorded_requests import drawn, sharing, write

Row = dict[str, Any]
LONGEST = 4096


class Stub(types.ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return getattr(self, name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for packages that are not installed."""

    packages: ClassVar[set[str]] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Stub:
        made = Stub(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def import_sglang() -> None:
    """Import the scheduler, with stubs in place of what it lacks."""
    sys.meta_path.append(Stubs())
    while True:
        try:
            import sglang.srt.managers.scheduler  # noqa: F401
        except ModuleNotFoundError as missing:
            package = str(missing.name).split(".")[0]
            if package == "sglang" or package in Stubs.packages:
                raise
            Stubs.packages.add(package)
            for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
                del sys.modules[name]
        else:
            return


def cases() -> list[Row]:
    """Settings and requests of every run."""
    mixed, long = drawn(1, 24, (20, 300), (2, 40)), drawn(2, 16, (500, 1500), (2, 24))
    late, few = drawn(3, 30, (10, 200), (2, 30), last=60), drawn(6, 8, (100, 110), (30, 60))
    many, first = drawn(8, 40, (20, 300), (40, 90), last=20), [[30, 800, 0, "", 0]]
    some, other = (
        [[a, b, at + 640, "", 0] for a, b, at, _, _ in drawn(i, 20, (30, 60), (60, 120), 20)] for i in (10, 12)
    )
    shared, together = sharing(4, 20, 3, 160, (5, 60), last=30), sharing(5, 20, 2, 165, (5, 60))
    seldom = sharing(8, 24, 5, 160, (40, 120), last=60)
    kinds = [
        ("all at once", mixed, {"running": 8, "batch_tokens": 256, "blocks": 6400}),
        ("long prompts in chunks", long, {"running": 16, "batch_tokens": 512, "blocks": 32000}),
        ("arrivals over time", late, {"running": 6, "batch_tokens": 128, "blocks": 6400}),
        ("few blocks", mixed, {"running": 16, "batch_tokens": 512, "blocks": 1100}),
        ("long prompts, few blocks", long, {"running": 16, "batch_tokens": 512, "blocks": 3100}),
        ("many requests, few blocks", many, {"running": 64, "batch_tokens": 512, "blocks": 3000}),
        ("alike requests, few blocks", few, {"running": 8, "batch_tokens": 1024, "blocks": 1000}),
        ("retracted", first + some, {"running": 20, "batch_tokens": 1024, "blocks": 2200}),
        ("shared prefixes", shared, {"running": 8, "batch_tokens": 256, "blocks": 6400}),
        ("shared prefixes, all at once", together, {"running": 8, "batch_tokens": 1024, "blocks": 6400}),
        ("shared prefixes, few blocks", seldom, {"running": 3, "batch_tokens": 256, "blocks": 1000}),
    ]
    chunked = [*(kinds[i] for i in (0, 2, 3, 4, 10)), ("retracted", first + other, kinds[7][2])]
    return [
        {"name": name, "chunked": mixes, **settings, "requests": requests}
        for mixes, rows in ((False, kinds), (True, chunked))
        for name, requests, settings in rows
    ]


def tokens_of(requests: list[list[Any]]) -> list[list[int]]:
    """Every request's prompt; what has the same prefix begins with the same tokens, nothing else is alike."""
    starts: dict[str, int] = {}
    found = []
    for i, (prompt, _, _, prefix, shared) in enumerate(requests):
        start = starts.setdefault(prefix, 10**6 * (1 + len(starts)))
        own = 10**9 + 10**5 * i
        kept = shared if prefix else 0
        found.append([*range(start, start + kept), *range(own, own + prompt - kept)])
    return found


def run(case: Row) -> list[Row]:
    """Every iteration: tokens by request, blocks in use, tokens found in the cache, who was retracted."""
    import torch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers import schedule_batch, scheduler
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    class Ended(Exception):
        pass

    defaults = {f.name: f.default for f in dataclasses.fields(ServerArgs)}
    args = SimpleNamespace(**defaults | {"attention_backend": "torch_native", "page_size": 1})
    settings = schedule_batch.global_server_args_dict
    settings |= {"attention_backend": "torch_native", "max_micro_batch_size": case["running"], "device": "cpu"}
    flags = len(inspect.signature(SchedulePolicy).parameters) - 2
    s = scheduler.Scheduler.__new__(scheduler.Scheduler)
    pool = ReqToTokenPool(case["running"] + 8, LONGEST, "cpu", False)
    slots = TokenToKVPoolAllocator(case["blocks"], torch.float16, "cpu", MagicMock(), False)
    tree = RadixCache(pool, slots, page_size=1, disable=False)
    everything = {
        "server_args": args,
        "req_to_token_pool": pool,
        "token_to_kv_pool_allocator": slots,
        "tree_cache": tree,
        "policy": SchedulePolicy(args.schedule_policy, tree, *[False] * flags),
        "waiting_queue": [],
        "running_batch": schedule_batch.ScheduleBatch(reqs=[], batch_is_full=False),
        "max_prefill_tokens": args.max_prefill_tokens,
        "chunked_prefill_size": case["batch_tokens"],
        "model_config": SimpleNamespace(is_encoder_decoder=False, vocab_size=10, is_multimodal=False),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "disaggregation_mode": DisaggregationMode.NULL,
        "enable_overlap": True,
        "is_generation": True,
        "page_size": 1,
        "decode_mem_cache_buf_multiplier": 1,
        "pp_size": 1,
        "tp_worker": MagicMock(),
        "process_input_requests": lambda requests: None,
        "stream_output": lambda *args: None,
        "current_scheduler_metrics_enabled": lambda: False,
        "grammar_queue": [],
    }
    for name, value in everything.items():
        setattr(s, name, value)
    for name in ("cur_batch", "last_batch", "chunked_req", "forward_sleep_time", "truncation_align_size"):
        setattr(s, name, None)
    for name in ("try_preemption", "is_hybrid", "enable_lora", "enable_hierarchical_cache"):
        setattr(s, name, False)
    s.is_mixed_chunk = case["chunked"]
    for name in ("enable_hicache_storage", "enable_metrics", "enable_priority_scheduling", "return_health_check_ct"):
        setattr(s, name, False)
    s.priority_scheduling_preemption_threshold = s.num_generated_tokens = s.forward_ct_decode = s.forward_ct = 0
    s.tp_worker.worker.model_runner.is_hybrid_gdn = False
    s.enable_trace = False
    first = 0.7 * args.schedule_conservativeness
    s.init_new_token_ratio = s.new_token_ratio = min(first, 1.0)
    s.min_new_token_ratio = min(first * 0.14, 1.0)
    s.new_token_ratio_decay = (s.init_new_token_ratio - s.min_new_token_ratio) / 600
    s._abort_on_queued_limit, s._prefetch_kvcache = lambda request: False, lambda request: None
    s.maybe_send_health_check_signal = s.set_next_batch_sampling_info_done = lambda *args: None

    asked, prompts = case["requests"], tokens_of(case["requests"])
    rows: list[Row] = []
    pending, now, made = list(range(len(asked))), -1, [0] * len(asked)
    retracted: list[int] = []
    launched: list[list[int]] = []
    begins, skipped = -1, False

    def receive() -> list[Any]:
        nonlocal now
        busy = s.last_batch is not None
        if rows and not rows[-1]["blocks"]:
            free = slots.available_size() + tree.evictable_size()
            ended = [i for i in launched[-1] if made[i] > asked[i][1]] if busy and not skipped else []
            rows[-1]["blocks"] = case["blocks"] - free - len(ended)
        now = begins if busy and not skipped else begins + 1
        if not busy and not s.waiting_queue and s.running_batch.is_empty():
            if not pending:
                raise Ended
            now = max(now, asked[pending[0]][2])
            s.new_token_ratio = s.init_new_token_ratio
        while pending and asked[pending[0]][2] <= now:
            i = pending.pop(0)
            params = SamplingParams(max_new_tokens=asked[i][1], ignore_eos=True)
            params.normalize(None)
            s.waiting_queue.append(schedule_batch.Req(str(i), "", prompts[i], params, vocab_size=10))
        return []

    def launch(batch: Any) -> Any:
        nonlocal begins, skipped
        index = [int(r.rid) for r in batch.reqs]
        prefill = batch.forward_mode.is_extend()
        tokens = dict(zip(index, batch.extend_lens if prefill else [1] * len(index), strict=True))
        found = {}
        for r in batch.reqs:
            i = int(r.rid)
            if (prefill and r.is_chunked <= 1 and r is not s.chunked_req) or not prefill:
                made[i] += 1
            if prefill and r in entered:
                found[r.rid] = len(r.prefix_indices)
        after = s.last_batch is not None and not skipped
        skipped = not prefill and not s.waiting_queue and all(made[i] > asked[i][1] for i in index)
        launched.append(index)
        if not skipped:
            begins = now + after
            row = {
                "tokens": [i if n == 1 else [i, n] for i, n in sorted(tokens.items())],
                "blocks": 0,
                "found": {name: n for name, n in found.items() if n},
                "preempted": sorted(retracted),
            }
            rows.append({key: value for key, value in row.items() if value or key == "blocks"})
            retracted.clear()
        entered.clear()
        batch.output_ids = torch.full((len(index),), 7)
        queue.append([7] * len(index))
        nothing = ("next_token_ids", "extend_input_len_per_req", "extend_logprob_start_len_per_req")
        return SimpleNamespace(logits_output=None, can_run_cuda_graph=False, **dict.fromkeys(nothing))

    queue: list[list[int]] = []
    entered: set[Any] = set()
    take = scheduler.PrefillAdder.add_one_req

    def add(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        answer = take(self, req, *args, **kwargs)
        if req in self.can_run_list:
            entered.add(req)
        return answer

    release = schedule_batch.ScheduleBatch.release_req

    def put_out(self: Any, i: int, *args: Any) -> None:
        retracted.append(int(self.reqs[i].rid))
        made[retracted[-1]] = len(self.reqs[i].output_ids)
        release(self, i, *args)

    s.recv_requests, s.run_batch = receive, launch
    s.tp_worker.resolve_last_batch_result = lambda done: (MagicMock(), queue.pop(0), False)
    s.self_check_during_idle = lambda: None
    scheduler.PrefillAdder.add_one_req, schedule_batch.ScheduleBatch.release_req = add, put_out
    try:
        s.event_loop_overlap()
    except Ended:
        return [{k: v for k, v in row.items() if v} for row in rows]
    finally:
        scheduler.PrefillAdder.add_one_req, schedule_batch.ScheduleBatch.release_req = take, release


def main() -> None:
    """Record all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(args.source))
    import_sglang()
    stated = re.search(r'"(.+)"', (args.source / "sglang" / "version.py").read_text())
    found = cases()
    for case in found:
        case["iterations"] = run(case)
        print(f"{case['name']}{', chunked' * case['chunked']}: {len(case['iterations'])} iterations")
    write(args.out, "sglang", stated[1] if stated else "", 1, found)


if __name__ == "__main__":
    main()
