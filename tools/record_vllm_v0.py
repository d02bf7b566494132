"""Record what the schedulers of vLLM before V1 put into every iteration, for tests/sim/serve/test_real_schedulers.py.

    PYTHON tools/record_vllm_v0.py --source FOLDER --model MODEL --out tests/sim/serve/data/vllm_VERSION.json

FOLDER has vLLM's Python sources (an unpacked source archive or wheel of PyPI, without its compiled parts): 0.2.7, or
one of 0.6. PYTHON is an interpreter with torch, transformers and what vLLM imports. MODEL is a folder with the config
of any small model: nothing is computed. The rest is as in tools/record_vllm.py. With 0.6 all of vLLM's engine runs: it
learns of a request's end one iteration late (asynchronous output processing), and computes a token too many for it. An
iteration of nothing but such requests, while nobody waits, is left out. Tokens are sorted by request.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from recorded_requests import common, drawn, write

BLOCK = 16
Row = dict[str, Any]


def cases(padded: bool) -> list[Row]:
    """Settings and requests of every run; `padded`: of a release that cannot compute prompts in chunks."""
    mixed, long, late, alike = common()[:4]
    many, alike_prompts = drawn(8, 60, (20, 300), (2, 60), last=20), drawn(9, 40, (200, 230), (1, 12), last=30)
    kinds = [
        ("all at once", mixed, {"running": 8, "batch_tokens": 512, "blocks": 400}, 256),
        ("long prompts", long, {"running": 16, "batch_tokens": 2048, "blocks": 2000}, 512),
        ("arrivals over time", late, {"running": 6, "batch_tokens": 512, "blocks": 400}, 128),
        ("few blocks", mixed, {"running": 16, "batch_tokens": 512, "blocks": 110}, 256),
        ("many requests, few blocks", many, {"running": 64, "batch_tokens": 1024, "blocks": 420}, 512),
        ("preempted", alike, {"running": 8, "batch_tokens": 1024, "blocks": 62}, 1024),
        ("alike prompts", alike_prompts, {"running": 12, "batch_tokens": 1024, "blocks": 130}, 512),
    ]
    return [
        {"name": name, "chunked": chunked, **settings, "batch_tokens": n, "requests": requests}
        for name, requests, settings, chunk in kinds
        for chunked, n in ((False, settings["batch_tokens"]), (True, chunk))
        if not chunked or not padded
    ]


class Run:
    """One run: rows of its iterations, and which requests have come."""

    def __init__(self, case: Row) -> None:
        self.case = case
        self.rows: list[Row] = []
        self.pending = list(range(len(case["requests"])))

    def arrived(self, now: int) -> list[int]:
        """Requests that come now."""
        found = []
        while self.pending and self.case["requests"][self.pending[0]][2] <= now:
            found.append(self.pending.pop(0))
        return found

    def row(self, tokens: dict[int, int], free_blocks: int, preempted: list[int]) -> None:
        """An iteration that begins."""
        row = {
            "tokens": [i if n == 1 else [i, n] for i, n in sorted(tokens.items())],
            "blocks": self.case["blocks"] - free_blocks,
            "preempted": sorted(preempted),
        }
        self.rows.append({key: value for key, value in row.items() if value})


def watched(scheduler: Any) -> list[int]:
    """The list to which the scheduler now adds each request that it preempts."""
    preempted: list[int] = []
    put_out = scheduler._preempt

    def preempt(group: Any, *rest: Any) -> Any:
        preempted.append(int(group.request_id))
        return put_out(group, *rest)

    scheduler._preempt = preempt
    return preempted


def run_02(case: Row, model: str) -> list[Row]:
    """The scheduler of 0.2.7, as its engine calls it: each iteration's tokens are known before the next."""
    package = types.ModuleType("vllm")  # whose own module would import compiled parts
    package.__path__ = [str(Path(sys.path[0]) / "vllm")]
    sys.modules.setdefault("vllm", package)
    sys.modules.setdefault("vllm._C", MagicMock())
    from vllm.config import CacheConfig, SchedulerConfig
    from vllm.core.scheduler import Scheduler
    from vllm.sampling_params import SamplingParams
    from vllm.sequence import Sequence, SequenceGroup, SequenceStatus

    cache = CacheConfig(BLOCK, 0.9, 0)
    cache.num_gpu_blocks, cache.num_cpu_blocks = case["blocks"], 0
    limit = case["batch_tokens"]
    scheduler = Scheduler(SchedulerConfig(limit, case["running"], limit, 256), cache)
    preempted = watched(scheduler)
    run, asked, ended = Run(case), case["requests"], 0
    while True:
        for i in run.arrived(ended):
            params = SamplingParams(max_tokens=asked[i][1], ignore_eos=True)
            scheduler.add_seq_group(SequenceGroup(str(i), [Sequence(i, "", [5] * asked[i][0], BLOCK)], params, i))
        if not scheduler.has_unfinished_seqs():
            if not run.pending:
                return run.rows
            ended = asked[run.pending[0]][2]
            continue
        _, out = scheduler.schedule()
        groups = list(out.scheduled_seq_groups)
        tokens = {int(g.request_id): g.get_seqs()[0].get_len() if out.prompt_run else 1 for g in groups}
        run.row(tokens, scheduler.block_manager.get_num_free_gpu_blocks(), preempted)
        preempted.clear()
        for group in groups:
            seq = group.get_seqs()[0]
            seq.append_token_id(7, {7: 0.0})
            if seq.get_output_len() == asked[int(group.request_id)][1]:
                seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
                scheduler.free_seq(seq)
        scheduler.free_finished_seq_groups()
        ended += 1


def executor_06(blocks: int, begin: Callable[[list[Any]], None]) -> type:
    """An executor of 0.6 that returns a token for every sequence, and first calls `begin` with the iteration's."""
    from vllm.executor.executor_base import ExecutorBase
    from vllm.model_executor.layers.sampler import SamplerOutput
    from vllm.sequence import CompletionSequenceGroupOutput, Logprob, SequenceOutput

    class Executor(ExecutorBase):
        uses_ray = False

        def _init_executor(self) -> None:
            pass

        def determine_num_available_blocks(self) -> tuple[int, int]:
            return blocks, 0

        def execute_model(self, execute_model_req: Any) -> list[Any]:
            if execute_model_req.async_callback:
                execute_model_req.async_callback()
            found = execute_model_req.seq_group_metadata_list
            begin(found)
            made = [SequenceOutput(next(iter(m.seq_data)), 7, {7: Logprob(0.0)}) for m in found]
            return [SamplerOutput([CompletionSequenceGroupOutput([one], None) for one in made])]

    for name in ExecutorBase.__abstractmethods__ - vars(Executor).keys():
        setattr(Executor, name, lambda self, *args, **kwargs: None)
    Executor.__abstractmethods__ = frozenset()
    return Executor


def engine_06(case: Row, model: str, begin: Callable[[list[Any]], None]) -> Any:
    """An engine of 0.6 with the case's settings, which takes prompts as they are."""
    import vllm.platforms
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.llm_engine import LLMEngine

    type(vllm.platforms.current_platform).is_async_output_supported = lambda self, eager: True  # as on CUDA
    config = EngineArgs(
        model=model,
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=4096 if case["chunked"] else case["batch_tokens"],
        max_num_seqs=case["running"],
        max_num_batched_tokens=case["batch_tokens"],
        enable_chunked_prefill=case["chunked"],
        block_size=BLOCK,
    ).create_engine_config()
    engine = LLMEngine(config, executor_06(case["blocks"], begin), False)
    assert config.model_config.use_async_output_proc
    engine.input_processor = lambda inputs: inputs
    return engine


def run_06(case: Row, model: str) -> list[Row]:
    """The engine of 0.6, without a model."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    def begin(found: list[Any]) -> None:
        tokens = {int(m.request_id): m.token_chunk_size for m in found}
        if scheduler.waiting or {m.request_id for m in found} & {g.request_id for g in scheduler.running}:
            run.row(tokens, scheduler.block_manager.get_num_free_gpu_blocks(), preempted)
            preempted.clear()

    engine = engine_06(case, model, begin)
    scheduler = engine.scheduler[0]
    run, preempted, asked, ended = Run(case), watched(scheduler), case["requests"], 0
    while True:
        for i in run.arrived(ended):
            params = SamplingParams(max_tokens=asked[i][1], ignore_eos=True, detokenize=False)
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=[5] * asked[i][0]), params)
        if not engine.has_unfinished_requests():
            if not run.pending:
                return run.rows
            ended = asked[run.pending[0]][2]
            continue
        before = len(run.rows)
        engine.step()
        ended += len(run.rows) - before


def main() -> None:
    """Record all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.path.insert(0, str(args.source))
    versions = [d.version for d in importlib.metadata.distributions(path=[str(args.source)]) if d.name == "vllm"]
    first = args.source / "vllm" / "__init__.py"
    stated = re.search(r'__version__ = "(.+)"', first.read_text())
    version = stated[1] if stated else versions[0]
    old = version.startswith("0.2")
    found = cases(old)
    for case in found:
        case["iterations"] = (run_02 if old else run_06)(case, args.model)
        print(f"{case['name']}{', chunked' * case['chunked']}: {len(case['iterations'])} iterations")
    write(args.out, "vllm", version, BLOCK, found)


if __name__ == "__main__":
    main()
