"""Record what SGLang's own scheduler puts into every iteration, for tests/sim/serve/test_real_schedulers.py.

    PYTHON tools/record_sglang.py --source FOLDER --out tests/sim/serve/data/sglang_VERSION.json

FOLDER has SGLang's Python sources (an unpacked source archive of PyPI), 0.5.3 or near it. PYTHON is an interpreter with
torch, transformers, triton, openai and fastapi; what else SGLang imports is replaced by empty modules. The overlap
scheduler's loop, its admission, retraction and radix cache are SGLang's; in place of the model a function returns a
token for each sequence. Requests, and when they come, are as in tools/record_vllm.py; tokens are sorted by request.
Blocks are of one token; those of a token too many (for a request that has just ended) are left out, and so is an
iteration of nothing but such requests, while nobody waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from recorded_requests import common, drawn, sharing, write
from stub_modules import import_with_stubs

Row = dict[str, Any]
LONGEST = 4096
SCHEDULER = "sglang.srt.managers.scheduler"


def cases() -> list[Row]:
    """Settings and requests of every run."""
    mixed, long, late, alike, shared, shared_at_once = common()
    many, first = drawn(8, 40, (20, 300), (40, 90), last=20), [[30, 800, 0, "", 0]]
    some, other = (
        [[a, b, at + 640, "", 0] for a, b, at, _, _ in drawn(i, 20, (30, 60), (60, 120), 20)] for i in (10, 12)
    )
    seldom = sharing(8, 24, 5, 160, (40, 120), last=60)
    kinds = [
        ("all at once", mixed, {"running": 8, "batch_tokens": 256, "blocks": 6400}),
        ("long prompts in chunks", long, {"running": 16, "batch_tokens": 512, "blocks": 32000}),
        ("arrivals over time", late, {"running": 6, "batch_tokens": 128, "blocks": 6400}),
        ("few blocks", mixed, {"running": 16, "batch_tokens": 512, "blocks": 1100}),
        ("long prompts, few blocks", long, {"running": 16, "batch_tokens": 512, "blocks": 3100}),
        ("many requests, few blocks", many, {"running": 64, "batch_tokens": 512, "blocks": 3000}),
        ("alike requests, few blocks", alike, {"running": 8, "batch_tokens": 1024, "blocks": 1000}),
        ("retracted", first + some, {"running": 20, "batch_tokens": 1024, "blocks": 2200}),
        ("shared prefixes", shared, {"running": 8, "batch_tokens": 256, "blocks": 6400}),
        ("shared prefixes, all at once", shared_at_once, {"running": 8, "batch_tokens": 1024, "blocks": 6400}),
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


class Ended(Exception):
    """No request is left."""


# What `Scheduler.__init__` would set, were there a model, workers and sockets.
NONE = ("cur_batch", "last_batch", "chunked_req", "forward_sleep_time", "truncation_align_size")
OFF = (
    "try_preemption",
    "is_hybrid",
    "enable_lora",
    "enable_hierarchical_cache",
    "enable_hicache_storage",
    "enable_metrics",
    "enable_priority_scheduling",
    "return_health_check_ct",
    "enable_trace",
)
ZERO = ("priority_scheduling_preemption_threshold", "num_generated_tokens", "forward_ct_decode", "forward_ct")


def bare_scheduler(case: Row) -> Any:
    """Return SGLang's scheduler with the settings of a case, its pools on the CPU, and no model."""
    import torch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers import schedule_batch, scheduler
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    defaults = {f.name: f.default for f in dataclasses.fields(ServerArgs)}
    args = SimpleNamespace(**defaults | {"attention_backend": "torch_native", "page_size": 1})
    settings = schedule_batch.global_server_args_dict
    settings |= {"attention_backend": "torch_native", "max_micro_batch_size": case["running"], "device": "cpu"}
    flags = len(inspect.signature(SchedulePolicy).parameters) - 2
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
        "is_mixed_chunk": case["chunked"],
        "model_config": SimpleNamespace(is_encoder_decoder=False, vocab_size=10, is_multimodal=False),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "disaggregation_mode": DisaggregationMode.NULL,
        "enable_overlap": True,
        "is_generation": True,
        "page_size": 1,
        "decode_mem_cache_buf_multiplier": 1,
        "pp_size": 1,
        "tp_worker": MagicMock(),
        "grammar_queue": [],
        **dict.fromkeys(NONE),
        **dict.fromkeys(OFF, False),
        **dict.fromkeys(ZERO, 0),
        **new_token_ratios(args.schedule_conservativeness),
    }
    made = scheduler.Scheduler.__new__(scheduler.Scheduler)
    for name, value in everything.items():
        setattr(made, name, value)
    made.tp_worker.worker.model_runner.is_hybrid_gdn = False
    without_sockets(made)
    return made


def new_token_ratios(conservativeness: float) -> dict[str, float]:
    """Return the share of tokens still to come for which a scheduler keeps room, with SGLang's default settings."""
    first, least = min(0.7 * conservativeness, 1.0), min(0.7 * conservativeness * 0.14, 1.0)
    decay = (first - least) / 600
    ratios = {"init_new_token_ratio": first, "new_token_ratio": first, "min_new_token_ratio": least}
    return ratios | {"new_token_ratio_decay": decay}


def without_sockets(scheduler: Any) -> None:
    """Replace the methods that would talk to clients, to metrics or to a cache elsewhere."""
    nothing = lambda *args: None  # noqa: E731
    for name in (
        "process_input_requests",
        "stream_output",
        "_prefetch_kvcache",
        "maybe_send_health_check_signal",
        "set_next_batch_sampling_info_done",
        "self_check_during_idle",
    ):
        setattr(scheduler, name, nothing)
    scheduler.current_scheduler_metrics_enabled = lambda: False
    scheduler._abort_on_queued_limit = lambda request: False


class Recording:
    """What a scheduler does with the requests of a case: it brings them when they arrive, and stands for the model."""

    def __init__(self, case: Row, scheduler: Any) -> None:
        self.case, self.asked, self.scheduler = case, case["requests"], scheduler
        self.prompts = tokens_of(self.asked)
        self.rows: list[Row] = []
        self.pending, self.made = list(range(len(self.asked))), [0] * len(self.asked)
        self.retracted: list[int] = []
        self.entered: set[Any] = set()
        self.launched: list[list[int]] = []
        self.tokens: list[list[int]] = []  # of iterations whose results were not taken yet
        self.now = self.begins = -1
        self.skipped = False
        scheduler.recv_requests, scheduler.run_batch = self.receive, self.launch
        scheduler.tp_worker.resolve_last_batch_result = lambda done: (MagicMock(), self.tokens.pop(0), False)

    def ended(self, requests: list[int]) -> list[int]:
        """Return the requests that have a token more than they asked for."""
        return [i for i in requests if self.made[i] > self.asked[i][1]]

    def receive(self) -> list[Any]:
        """Note the blocks in use, and queue the requests that have arrived."""
        s = self.scheduler
        under_way = s.last_batch is not None and not self.skipped
        if self.rows and not self.rows[-1]["blocks"]:
            free = s.token_to_kv_pool_allocator.available_size() + s.tree_cache.evictable_size()
            ended = self.ended(self.launched[-1]) if under_way else []
            self.rows[-1]["blocks"] = self.case["blocks"] - free - len(ended)
        self.now = self.begins if under_way else self.begins + 1
        if s.last_batch is None and not s.waiting_queue and s.running_batch.is_empty():
            if not self.pending:
                raise Ended
            self.now = max(self.now, self.asked[self.pending[0]][2])
            s.new_token_ratio = s.init_new_token_ratio
        while self.pending and self.asked[self.pending[0]][2] <= self.now:
            s.waiting_queue.append(self.request(self.pending.pop(0)))
        return []

    def request(self, i: int) -> Any:
        """Return a request as SGLang keeps it."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=self.asked[i][1], ignore_eos=True)
        params.normalize(None)
        return Req(str(i), "", self.prompts[i], params, vocab_size=10)

    def launch(self, batch: Any) -> Any:
        """Stand for the model: note the iteration, and make a token for each sequence."""
        import torch

        s, index = self.scheduler, [int(r.rid) for r in batch.reqs]
        prefill = batch.forward_mode.is_extend()
        for r, i in zip(batch.reqs, index, strict=True):
            self.made[i] += not prefill or (r.is_chunked <= 1 and r is not s.chunked_req)
        after = s.last_batch is not None and not self.skipped
        self.skipped = not prefill and not s.waiting_queue and len(self.ended(index)) == len(index)
        self.launched.append(index)
        if not self.skipped:
            self.begins = self.now + after
            self.note(batch, index, prefill)
        self.entered.clear()
        batch.output_ids = torch.full((len(index),), 7)
        self.tokens.append([7] * len(index))
        nothing = ("next_token_ids", "extend_input_len_per_req", "extend_logprob_start_len_per_req")
        return SimpleNamespace(logits_output=None, can_run_cuda_graph=False, **dict.fromkeys(nothing))

    def note(self, batch: Any, index: list[int], prefill: bool) -> None:
        """Add a row for an iteration; its blocks are known when the next one is made."""
        tokens = dict(zip(index, batch.extend_lens if prefill else [1] * len(index), strict=True))
        found = {r.rid: len(r.prefix_indices) for r in batch.reqs if prefill and r in self.entered}
        row = {
            "tokens": [i if n == 1 else [i, n] for i, n in sorted(tokens.items())],
            "blocks": 0,
            "found": {name: n for name, n in found.items() if n},
            "preempted": sorted(self.retracted),
        }
        self.rows.append({key: value for key, value in row.items() if value or key == "blocks"})
        self.retracted.clear()


def run(case: Row) -> list[Row]:
    """Every iteration: tokens by request, blocks in use, tokens found in the cache, who was retracted."""
    from sglang.srt.managers import schedule_batch, scheduler

    recording = Recording(case, bare_scheduler(case))
    take, release = scheduler.PrefillAdder.add_one_req, schedule_batch.ScheduleBatch.release_req

    def add(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        answer = take(self, req, *args, **kwargs)
        if req in self.can_run_list:
            recording.entered.add(req)
        return answer

    def put_out(self: Any, i: int, *args: Any) -> None:
        request = int(self.reqs[i].rid)
        recording.retracted.append(request)
        recording.made[request] = len(self.reqs[i].output_ids)
        release(self, i, *args)

    scheduler.PrefillAdder.add_one_req, schedule_batch.ScheduleBatch.release_req = add, put_out
    try:
        recording.scheduler.event_loop_overlap()
    except Ended:
        return [{k: v for k, v in row.items() if v} for row in recording.rows]
    finally:
        scheduler.PrefillAdder.add_one_req, schedule_batch.ScheduleBatch.release_req = take, release


def main() -> None:
    """Record all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import_with_stubs(str(args.source), SCHEDULER)
    stated = re.search(r'"(.+)"', (args.source / "sglang" / "version.py").read_text())
    found = cases()
    for case in found:
        case["iterations"] = run(case)
        print(f"{case['name']}{', chunked' * case['chunked']}: {len(case['iterations'])} iterations")
    write(args.out, "sglang", stated[1] if stated else "", 1, found)


if __name__ == "__main__":
    main()
