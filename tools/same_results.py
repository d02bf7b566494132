"""Checks whether all results of two versions of the project are equal to the last digit.

    python tools/same_results.py record FILE            in the first checkout (at its root)
    python tools/same_results.py compare FILE [NAME …]  in the second: prints differences

It runs every shipped scenario, variants of some, a search, sweeps, a replay, comparisons and all published tables
through the commands, and keeps their JSON without wall times and dates. `NAME`: only cases whose name contains one of
these. Keys that were renamed on purpose are in `RENAMED`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMES = {"wall_s", "cpu_s", "rates", "cores"}  # how long the simulator itself took
STOPPED = (130, 143)  # exit codes of a run that a signal ended: no result of the command
RENAMED: dict[str, str] = {"elementwise": "framework"}  # key of a result: before -> now
SEARCH_PARTS = ("format", "best", "pareto")  # how many layouts are pruned by which bound may change
SETS = {
    "gpt3-175b": ["cluster=dgx-a100", "training.global_batch_size=48", "parallelism={tp: 8, pp: 8, dp: 2}"],
    "llama3-8b": ["cluster=dgx-h100", "training.global_batch_size=32", "parallelism={tp: 2, dp: 4, pp: 2}"],
    "mixtral-8x7b": ["cluster=dgx-h100", "training.global_batch_size=32", "parallelism={dp: 8, ep: 8, pp: 2}"],
    "deepseek-v3": ["cluster=dgx-h100", "training.global_batch_size=512", "parallelism={dp: 32, ep: 32, pp: 8}"],
}
VARIANTS = [
    "training.elementwise=eager",
    "training.elementwise=megatron",
    "training.elementwise=compiled",
    "training.precision=fp16",
    "training.precision=fp32",
    "training.precision=fp8",
    "training.precision=fp8 training.elementwise=megatron",
    "training.precision=fp8 training.elementwise=compiled",
    "training.precision=mxfp8 cluster=dgx-b200",
    "training.precision=nvfp4 cluster=dgx-b200 training.elementwise=megatron",
    "training.attention=unfused",
    "training.attention=unfused training.elementwise=megatron",
    "training.attention=unfused model.dropout=0.1",
    "training.recompute=selective",
    "training.recompute=selective_op",
    "training.recompute=full",
    "training.recompute=full training.elementwise=megatron",
    "training.recompute=full parallelism.zero=3",
    "training.cross_entropy=fused",
    "training.cross_entropy=chunked parallelism.tp=1",
    "training.optimizer=sgd",
    "training.param_dtype=fp32",
    "training.param_dtype=fp32 parallelism.zero=3",
    "training.grad_dtype=bf16",
    "training.lora={rank: 16} parallelism.tp=1",
    "training.lora={rank: 16} parallelism.tp=1 training.elementwise=compiled",
    "training.lora={rank: 16} parallelism.tp=1 training.recompute=full parallelism.zero=3",
    "training.activation_offload=true",
    "parallelism.zero=1",
    "parallelism.zero=2",
    "parallelism.zero=2 parallelism.accumulate_unsharded=true",
    "parallelism.zero=3",
    "parallelism.zero=3 parallelism.reshard_after_forward=false",
    "parallelism.zero=3 parallelism.shard_size=2",
    "parallelism.dp_sync=per_parameter",
    "parallelism.dp_sync=after_backward parallelism.zero=1",
    "parallelism.tp=4 parallelism.sp=true",
    "parallelism.tp=4 parallelism.sp=true parallelism.tp_overlap=full",
    "parallelism.tp=4 parallelism.sp=true parallelism.tp_overlap=wgrad training.precision=fp8",
    "parallelism.cp=2 training.elementwise=megatron",
    "parallelism.cp=2 parallelism.cp_split=contiguous",
    "parallelism.cp=2 parallelism.cp_split=striped",
    "parallelism.cp=2 parallelism.cp_method=all_gather",
    "parallelism.cp=2 parallelism.cp_method=all_to_all",
    "parallelism.schedule=gpipe",
    "parallelism.schedule=naive",
    "parallelism.schedule=interleaved_1f1b",
    "parallelism.schedule=zb_h1",
    "parallelism.schedule=zb_h2 training.recompute=full",
    "parallelism.schedule=zb_v",
    "parallelism.schedule=zb_search",
    "parallelism.schedule=dualpipe",
    "parallelism.schedule=dualpipe_v parallelism.ep_overlap=true",
    "parallelism.p2p_overlap=true parallelism.p2p_scatter=true",
    "faults.stragglers=[{rank: 3, compute_scale: 1.3}]",
    "faults.jitter={sigma: 0.05, seed: 1}",
    "cluster=dgx-b200",
    "cluster=gb200-nvl72",
    "cluster=dgx-v100 training.precision=fp16",
    "calibration=roofline",
    "model.tied_embeddings=true",
    "model.vocab=50257 parallelism.tp=1",
    "model.norm=layernorm model.bias=true model.mlp=gelu",
    "model.mlp=relu2",
]
SERVED = [
    "inference.quantization=fp8",
    "inference.quantization=int4_weight_only",
    "inference.quantization=llm_int8",
    "inference.batching=static inference.requests.rate_per_s=null",
    "inference.prefix_cache=gpu",
    "parallelism.pp=2",
    "cluster=dgx-a100",
    "calibration=roofline",
]
COMMANDS = {
    "search 8b": ["sim.search", "scenarios/search_llama3_8b.yaml", "--workers", "1"],
    "search 8b one gpu count": ["sim.search", "scenarios/search_llama3_8b.yaml", "--gpus", "16", "--workers", "1"],
    "sweep jitter": ["sim.sweep", "scenarios/dp8.yaml", "--vary", "faults.jitter.sigma=0,0.05,0.1"],
    "sweep tp": ["sim.sweep", "scenarios/tp8.yaml", "--vary", "training.seq_len=2048,4096"],
    "days": ["sim.run", "scenarios/goodput_llama3_405b.yaml", "--days", "7", "--runs", "20"],
    "plan batch": ["sim.run", "scenarios/dp8.yaml", "--plan-batch", "--critical-batch", "100"],
}


def cases(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every case's name and the command whose JSON is kept; `folder` holds files between commands."""
    for path in sorted(Path("scenarios").rglob("*.yaml")):
        if "published" not in path.parts and "measured" not in path.parts:
            yield f"run {path}", ["sim.run", str(path)]
    base = folder / "base.yaml"
    for model, sets in SETS.items():
        base.write_text(f"model: {model}\ncluster: dgx-h100\ntraining: {{seq_len: 2048, global_batch_size: 32}}\n")
        for variant in VARIANTS:
            own = _split(variant)
            yield f"{model} {variant}", ["sim.run", str(base), *(x for s in (*sets, *own) for x in ("--set", s))]
    serving = folder / "serving.yaml"
    for model in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"):
        requests = "{prompt_len: 500, output_len: 50, count: 40, rate_per_s: 20}"
        serving.write_text(
            f"model: {model}\ncluster: dgx-h100\nparallelism: {{tp: 8}}\ninference: {{requests: {requests}}}\n"
        )
        for variant in ("parallelism.sp=false", *SERVED):
            own = _split(variant)
            yield f"served {model} {variant}", ["sim.run", str(serving), *(x for s in own for x in ("--set", s))]
    yield from COMMANDS.items()
    for path in sorted(Path("scenarios/published").glob("*.json")):
        yield f"table {path.stem}", ["sim.validate", str(path)]
    for path in sorted(Path("scenarios/measured").rglob("*.json")):
        scenario = Path("scenarios") / "cpu" / f"{path.stem}.yaml"
        if scenario.exists():
            yield f"compare {path}", ["sim.compare", str(scenario), str(path), "--tolerance", "9"]
    yield "chakra", ["sim.run", "scenarios/tp8.yaml", "--chakra", str(folder / "tp8")]
    yield "replay", ["sim.replay", str(folder / "tp8.0.et"), "--cluster", "dgx-b200"]


def _split(variant: str) -> list[str]:
    """Split `a=1 b={c: 2}` into its assignments."""
    out: list[str] = []
    for word in variant.split(" "):
        if "=" in word.split(":")[0]:
            out.append(word)
        else:
            out[-1] += " " + word
    return out


def run(command: list[str]) -> Any:
    """Run a command and return the JSON that it prints, or its exit code."""
    out, err = io.StringIO(), io.StringIO()
    before, hook = sys.argv, sys.excepthook
    sys.argv = [*command, "--json", "-"]
    sys.modules.pop(command[0], None)
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
            if code in STOPPED:
                raise
        except Exception as error:
            code = repr(error)
        finally:
            sys.argv, sys.excepthook = before, hook
    try:
        found = json.loads(out.getvalue())
    except ValueError:
        found = {"code": code}  # messages may be reworded
    return {k: found.get(k) for k in SEARCH_PARTS} if command[0] == "sim.search" and "best" in found else found


def plain(data: Any) -> Any:
    """Remove the simulator's own times, and rename keys to their present names."""
    if isinstance(data, dict):
        return {RENAMED.get(k, k): plain(v) for k, v in data.items() if k not in TIMES}
    if isinstance(data, list):
        return [plain(v) for v in data]
    return data


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield the differences key by key. Keys that only `now` has do not count, as results may have new keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            if key not in now:
                yield f"{where}.{key}: is gone"
            else:
                yield from differences(value, now[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            yield from differences(a, b, f"{where}[{i}]")
    elif before != now:
        yield f"{where}: {str(before)[:160]} -> {str(now)[:160]}"


def main() -> int:
    """Record or compare; return the exit code."""
    sys.path.insert(0, str(Path.cwd()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE", help="results, compressed: FILE.json.gz")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    recorded: dict[str, Any] = {}
    if given.verb == "compare":
        try:
            recorded = json.loads(gzip.decompress(given.file.read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            parser.error(f"{given.file} is no file that `record` wrote: {error}")
    results: dict[str, Any] = {}
    unequal = 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for case, command in cases(Path(name)):
            if given.names and not any(n in case for n in given.names) and case != "chakra":
                continue
            text = json.dumps(plain(run(command))).replace(name, "FOLDER")
            results[case] = json.loads(text)
            if case in recorded:
                found = list(differences(plain(recorded[case]), results[case]))
                unequal += bool(found)
                for line in found[:6]:
                    print(f"{case}: {line}", flush=True)
    if given.verb == "record":
        given.file.write_bytes(gzip.compress(json.dumps(results).encode()))
    print(f"{len(results)} cases, {unequal} differ, {time.perf_counter() - start:.0f} s")
    return min(unequal, 1)


if __name__ == "__main__":
    raise SystemExit(main())
