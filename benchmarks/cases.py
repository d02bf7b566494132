"""What is timed: each function returns rows of a table, as plain data."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measure import child_seconds, shortest_s, slope
from sim.core.executors import local_workers
from sim.engine import run as engine
from sim.engine.on_simpy import run_simpy
from sim.engine.run import run_static
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.search.best_first import BestFirst
from sim.search.space_of_scenario import make_space
from sim.simulation import simulate

LLAMA_405B: dict[str, Any] = {
    "model": "llama3-405b",
    "cluster": "dgx-h100",
    "training": {"seq_len": 8192, "global_batch_size": 2048},
    "parallelism": {"tp": 8, "sp": True, "pp": 16, "dp": 128, "zero": 1},
}
LLAMA_70B: dict[str, Any] = {
    "model": "llama3-70b",
    "cluster": "dgx-h100",
    "training": {"seq_len": 8192, "global_batch_size": 64},
    "parallelism": {"tp": 4, "sp": True, "pp": 4, "dp": 4, "zero": 1},
}
LLAMA_8B: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "training": {"seq_len": 4096, "global_batch_size": 64},
    "parallelism": {"dp": 32},
}
LARGE = Path(__file__).parent.parent / "scenarios" / "llama3_405b_16k.yaml"
VERY_LARGE = (
    "parallelism.pp=64",
    "parallelism.dp=196",
    "training.global_batch_size=100352",
    "model.layers=128",
    "parallelism.virtual_stages=1",
    "parallelism.layers_per_stage=null",
    "parallelism.schedule=1f1b",
)
BenchmarkRow = dict[str, Any]


def scenario(base: dict[str, Any], changes: dict[str, Any]) -> Scenario:
    """A scenario with changes merged over it."""
    return parse_scenario(merge(base, changes), "benchmark")


def engines(repeats: int) -> list[BenchmarkRow]:
    """Tasks a second of the two engines on one graph: every operator and message of a 16-stage pipeline's step."""
    graph = simulate(scenario(LLAMA_405B, {"training": {"global_batch_size": 16384}})).built.graph
    best = shortest_s({"simpy": lambda: run_simpy(graph), "static": lambda: run_static(graph)}, repeats)
    rows = [
        {"what": f"{name} engine", "tasks": len(graph), "seconds": s, "per_s": len(graph) / s, "unit": "tasks"}
        for name, s in best.items()
    ]
    rows[1]["ratio"] = best["simpy"] / best["static"]
    return rows


def large(repeats: int) -> list[BenchmarkRow]:
    """From plan to metrics: Llama 3 405B on 16,384 GPUs, and 100,352 GPUs; ratio: to the same with shared links. Also
    as where no compiler was found."""
    steps = {"16,384 GPUs": load_scenario(LARGE), "100,352 GPUs": load_scenario(LARGE, VERY_LARGE)}
    profile = load_profile(next(iter(steps.values())).calibration)
    rows: list[BenchmarkRow] = []
    for name, s in steps.items():
        runs = {share: partial(_whole, s, profile, share_links=share) for share in (True, False)}
        best = shortest_s(runs, repeats)
        rows += [
            {"what": f"{name}, links {word}", "seconds": best[share], "per_s": 1 / best[share], "unit": "steps"}
            for share, word in ((True, "shared"), (False, "to themselves"))
        ]
        rows[-1]["ratio"] = best[True] / best[False]
        with patch.object(engine, "_events", None):
            best = shortest_s(runs, repeats)
        rows += [
            {
                "what": f"the same in Python, links {word}",
                "seconds": best[share],
                "per_s": 1 / best[share],
                "unit": "steps",
            }
            for share, word in ((True, "shared"), (False, "to themselves"))
        ]
    return rows


def processes(repeats: int) -> list[BenchmarkRow]:
    """CPU seconds of whole processes."""
    rows = []
    for name, arguments in {"sim.run --help": ["--help"], "sim.run, 16,384 GPUs": [str(LARGE), "--json", "-"]}.items():
        command = [sys.executable, "-m", "sim.run", *arguments]
        best = min(child_seconds(command) for _ in range(repeats))
        rows.append({"what": name, "seconds": best, "per_s": 1 / best, "unit": "processes"})
    return rows


def folding(repeats: int) -> list[BenchmarkRow]:
    """A whole simulation of 64 ranks, equal ones folded or every one by itself."""
    s = scenario(LLAMA_70B, {})
    profile = load_profile(s.calibration)
    best = shortest_s(
        {"unfolded": lambda: simulate(s, profile, fold=False), "folded": lambda: simulate(s, profile)}, repeats
    )
    ranks = s.parallelism.ranks
    rows = [
        {"what": f"{ranks} ranks {name}", "seconds": x, "per_s": 1 / x, "unit": "steps"} for name, x in best.items()
    ]
    rows[1]["ratio"] = best["unfolded"] / best["folded"]
    return rows


def contended(replicas: int) -> list[BenchmarkRow]:
    """One step of Llama 3 70B, every rank by itself, gradients and messages sharing NICs: 32 ranks a replica."""
    changes = {"parallelism": {"tp": 8, "pp": 4, "dp": replicas}, "training": {"global_batch_size": 16 * replicas}}
    s = scenario(LLAMA_70B, changes)
    profile = load_profile(s.calibration)
    begin = time.process_time()
    graph = simulate(s, profile, fold=False).built.graph
    seconds = time.process_time() - begin
    return [
        {
            "what": f"{s.parallelism.ranks:,} ranks unfolded, links shared",
            "tasks": len(graph),
            "seconds": seconds,
            "per_s": len(graph) / seconds,
            "unit": "tasks",
        }
    ]


def search(gpus: int) -> list[BenchmarkRow]:
    """Layouts a second on one core: all of Llama 3 8B on `gpus` GPUs, and those evaluated one by one."""
    space = make_space(Source("benchmark", LLAMA_8B), gpus, "benchmark")
    begin = time.process_time()
    with local_workers(1) as pool:
        found = BestFirst(space, None, 10, False, pool).run()
    seconds, c = time.process_time() - begin, found.counts
    looked_at, each_s = c["pruned_by_bound"] + c["evaluated"], sum(found.cpu_s.values()) - found.cpu_s["bounding"]
    sorts = (
        (f"search, {gpus} GPUs: legal layouts", c["legal"], seconds),
        ("of these pruned by the bound or evaluated", looked_at, seconds),
        (f"of these evaluated, {c['simulated']} simulated in full", c["evaluated"], each_s),
    )
    return [{"what": what, "tasks": n, "seconds": s, "per_s": n / s, "unit": "layouts"} for what, n, s in sorts]


def growth(repeats: int) -> list[BenchmarkRow]:
    """CPU seconds of a whole simulation as one size grows, and the exponent."""
    series: dict[str, tuple[tuple[int, ...], Callable[[int], dict[str, Any]]]] = {
        "GPUs": (
            (1024, 4096, 16384, 65536),
            lambda n: {"parallelism": {"dp": n // 128}, "training": {"global_batch_size": n // 128 * 16}},
        ),
        "layers": ((32, 64, 128, 256), lambda n: {"model": {"preset": "llama3-405b", "layers": n}}),
        "micro-batches": ((16, 32, 64, 128), lambda n: {"training": {"global_batch_size": n * 128}}),
        "pipeline stages": (
            (8, 16, 32, 64),
            lambda n: {"parallelism": {"pp": n, "dp": 2048 // n}, "training": {"global_batch_size": 2048 // n * 64}},
        ),
    }
    rows = []
    for name, (sizes, change) in series.items():
        cases = {f"{n}": scenario(LLAMA_405B, change(n)) for n in sizes}
        profile = load_profile(next(iter(cases.values())).calibration)
        best = shortest_s({n: partial(_whole, s, profile) for n, s in cases.items()}, repeats)
        seconds = list(best.values())
        rows.append({"what": name, "sizes": list(sizes), "seconds": seconds, "slope": slope(sizes, seconds)})
    return rows


def _whole(s: Scenario, profile: Profile, share_links: bool = True) -> dict[str, Any]:
    """From plan to metrics."""
    return simulate(s, profile, share_links=share_links).result
