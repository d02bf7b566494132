"""`python -m sim.search SCENARIO.yaml`: the best layouts of its GPUs that fit in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.commands.command import Command
from sim.commands.options import (
    dask_option,
    json_option,
    overrides_option,
    page_option,
    processes_option,
    scenario_argument,
    write_page,
)
from sim.core.errors import InputError
from sim.core.files import write_json

if TYPE_CHECKING:
    from sim.search.best_first import BestFirst, Found
    from sim.search.evaluation import Outcome
    from sim.search.space import Layout, Space
    from sim.studies.executors import Workers

OBJECTIVES = ("step_time", "tokens_per_s_per_gpu")
REFUSALS_SHOWN = 3  # the most frequent; --json has all
PIPE_WIDTH = 240  # columns where nobody watches: a table in a file is never cut
POOL_FROM_MESHES = 24  # fewer are done before other processes have started


@click.command("search", cls=Command)
@scenario_argument
@click.option(
    "--gpus",
    type=click.IntRange(1),
    metavar="N",
    help="GPUs to lay out; default: the scenario's ranks, without parallelism its cluster's GPUs",
)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default=OBJECTIVES[0],
    help="what is best; of one number of GPUs both rank alike",
)
@click.option(
    "--memory-limit", metavar="BYTES", help="bytes a GPU may use, such as 70GiB; by default all it has"
)
@click.option("--top", type=click.IntRange(1, 10_000), default=10, help="best layouts to list")
@click.option("--only", multiple=True, metavar="KEY=VALUE,…", help="search these values of a key alone, repeatable")
@click.option(
    "--whole-front",
    is_flag=True,
    help="simulate all that may lie on the Pareto line of time and memory, not just near its fast end",
)
@click.option(
    "--slo",
    metavar="NAME=SECONDS,…",
    help="of a serving workload: the highest rate of requests within these latencies, such as "
    "ttft_p99=0.25,tpot_p99=0.035 (ttft, tpot, itl, latency; p50, p90, p99, mean)",
)
@click.option("--price", type=click.FloatRange(0), metavar="PER_GPU_HOUR", help="with --slo: cost of a million tokens")
@processes_option
@dask_option
@json_option
@page_option
@overrides_option
def main(
    scenario: Path,
    gpus: int | None,
    objective: str,
    memory_limit: str | None,
    top: int,
    only: tuple[str, ...],
    whole_front: bool,
    slo: str | None,
    price: float | None,
    workers: int | None,
    dask: str | None,
    json: str | None,
    html: Path | None,
    overrides: tuple[str, ...],
) -> int:
    """Search all layouts of SCENARIO's GPUs over tp, sp, cp, pp, dp, ep, zero, schedule, virtual stages,
    micro-batch size and recomputation; with --slo, of a serving SCENARIO over tp, pp and replicas."""
    if slo is not None:
        return _serving(scenario, overrides, gpus, slo, price, top, json, html)
    if price is not None:
        raise InputError("--price: goes with --slo; a step's layouts all cost the same an hour")
    result = run_search(
        scenario, overrides, gpus, memory_limit, top, only, whole_front, workers, dask, objective
    )
    if json is not None:
        write_json(json, result, indent=1)
    if html is not None:
        from sim.views.search_page import search_page

        write_page(html, search_page(result))
    if json != "-":
        print_result(result)
    return 0 if result["best"] else 1


def _serving(
    path: Path, overrides: Sequence[str], gpus: int | None, slo: str, price: float | None, top: int,
    json: str | None, html: Path | None,
) -> int:  # fmt: skip
    """Rates of a serving workload's layouts; exit code 1 where none keeps the latencies."""
    from sim.commands.serving_search import print_serving_search
    from sim.inputs.scenario import name_of, read_source
    from sim.search.serving import search_serving
    from sim.search.slo import parse_slo

    if html is not None:
        raise InputError("--html: --slo has no page; --json has the curve")
    result = search_serving(read_source(path, overrides), name_of(path), parse_slo(slo), gpus, price)
    if json is not None:
        write_json(json, result, indent=1)
    if json != "-":
        print_serving_search(result, top)
    return 0 if any(row["rate_per_s"] for row in result["best"]) else 1


def run_search(
    path: Path,
    overrides: Sequence[str],
    gpus: int | None,
    memory_limit: str | None,
    top: int,
    only: Sequence[str],
    whole_front: bool,
    workers: int | None,
    dask: str | None,
    objective: str = "step_time",
) -> dict[str, Any]:
    """Search, and return the result in the form of `--json`.

    Raises:
        InputError: for a scenario or an option that is wrong, or a Dask cluster that does not answer.
    """
    from sim.search.space import grid_is_legal, grids
    from sim.studies.executors import available_cores, dask_workers, local_workers

    space, limit = space_of(path, overrides, gpus, memory_limit, only)
    meshes = sum(grid_is_legal(space, g) for g in grids(space))
    count = workers or (available_cores() if meshes >= POOL_FROM_MESHES else 1)
    with dask_workers(dask) if dask else local_workers(count) as pool, progress() as report:
        return search_space(space, limit, top, whole_front, pool, report, objective)


def space_of(
    path: Path, overrides: Sequence[str], gpus: int | None, memory_limit: str | None, only: Sequence[str]
) -> tuple[Space, float]:
    """Where a search looks, and the bytes that a GPU may use.

    Raises:
        InputError: for a scenario or an option that is wrong.
    """
    from sim.inputs.scenario import name_of, read_source
    from sim.search.space import make_space

    space = make_space(read_source(path, overrides), gpus, name_of(path), parse_only(only))
    return space, _limit_bytes(memory_limit) or float(space.base.cluster.gpu.memory_bytes)


def search_space(
    space: Space,
    limit_bytes: float,
    top: int,
    whole_front: bool,
    pool: Workers,
    report: Callable[[BestFirst], None] = lambda _: None,
    objective: str = OBJECTIVES[0],
) -> dict[str, Any]:
    """Search with these workers, and return the result in the form of `--json`."""
    from sim.search.best_first import BestFirst
    from sim.search.evaluation import detail, pack
    from sim.studies.executors import results

    found = BestFirst(space, limit_bytes, top, whole_front, pool, report).run()
    packed = pack(space)
    details = list(results(pool, detail, ((packed, o.layout) for o in found.best)))
    return make_result(space, found, limit_bytes, objective, details)


def parse_only(options: Sequence[str]) -> dict[str, list[Any]]:
    """`KEY=VALUE,…` options as values of fields of Layout.

    >>> parse_only(["tp=4,8", "schedule=1f1b"])
    {'tp': [4, 8], 'schedule': ['1f1b']}

    Raises:
        InputError: for another key, or a value that the key never has.
    """
    from sim.inputs.input_source import nearest
    from sim.inputs.yaml_input import parse_yaml
    from sim.schedules import FORMS
    from sim.search.space import RECOMPUTE, Layout

    words = {"schedule": tuple(FORMS), "recompute": RECOMPUTE}

    out: dict[str, list[Any]] = {}
    for option in options:
        key, sign, text = option.partition("=")
        key = key.strip().removeprefix("parallelism.").removeprefix("training.")
        if not sign or key not in Layout._fields:
            raise InputError(f"--only {option}: must be KEY=VALUE,… with KEY one of {', '.join(Layout._fields)}")
        values = [v.strip() if key in words else parse_yaml(v, f"--only {option}")[0] for v in text.split(",")]
        for value in values:
            if key in words and value not in words[key]:
                hint = nearest(value, words[key])
                raise InputError(f"--only {option}: found '{value}'; must be one of {', '.join(words[key])}{hint}")
            if key not in words and type(value) is not (bool if key == "sp" else int):
                kind = "true or false" if key == "sp" else "integers"
                raise InputError(f"--only {option}: found {value!r}; must be {kind}")
        out[key] = values
    return out


def _limit_bytes(text: str | None) -> float | None:
    from sim.inputs.cluster_input import LEAST_MEMORY_BYTES
    from sim.inputs.parallelism import parse_size

    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise InputError(f"--memory-limit: found {text!r}; {error}") from None
    if size < LEAST_MEMORY_BYTES:
        hint = f"; {size} bytes? write {size}GiB" if size > 0 else "; must be above 0"
        raise InputError(f"--memory-limit: found {text!r}{hint}")
    return float(size)


def make_result(
    space: Space, found: Found, limit_bytes: float, objective: str, details: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """The result as plain data: format sim-search/1. `details`: what `evaluation.detail` says of each of the best."""
    from sim.search.why_none import why_none_legal

    c, cpu_s, per_core = found.counts, found.cpu_s, found.wall_s * found.cores
    evaluating_s = sum(cpu_s.values()) - cpu_s["bounding"]
    return {
        "format": "sim-search/1",
        "name": space.base.name,
        "gpus": space.gpus,
        "objective": objective,
        "memory_limit_bytes": limit_bytes,
        "only": {k: list(v) for k, v in space.only.items()},
        "best": [
            _row(space, o) | more | {"scenario": _scenario(space, o.layout)}
            for o, more in zip(found.best, details, strict=True)
        ],
        "pareto": [_row(space, o) for o in found.pareto],
        "evaluated": [_row(space, o) for o in found.fitting],
        "counts": c,
        "why_none_legal": "" if c["legal"] else why_none_legal(space),
        "refusals": [{"reason": reason, "count": n} for reason, n in found.refusals.items()],
        "wall_s": found.wall_s,
        "cores": found.cores,
        "cpu_s": cpu_s,
        "rates": {
            "pruned_by_bound_or_evaluated_per_s_per_core": (c["pruned_by_bound"] + c["evaluated"]) / per_core,
            "legal_per_s_per_core": c["legal"] / per_core,
            "evaluated_per_s_per_core": c["evaluated"] / evaluating_s if evaluating_s else 0.0,
            "simulated_per_s_per_core": c["simulated"] / cpu_s["simulated"] if cpu_s["simulated"] else 0.0,
        },
    }


def _row(space: Space, outcome: Outcome) -> dict[str, Any]:
    t = space.training
    tokens = t.global_batch_size * t.seq_len
    return {
        "step_time_s": outcome.step_time_s,
        "tokens_per_s_per_gpu": tokens / outcome.step_time_s / space.gpus if outcome.step_time_s else 0.0,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "layout": outcome.layout._asdict(),
        "parallelism": {
            k: v for k, v in outcome.layout._asdict().items() if k not in ("micro_batch_size", "recompute")
        },
    }


def _scenario(space: Space, layout: Layout) -> dict[str, Any]:
    from sim.search.space import scenario_of

    return scenario_of(space, layout).model_dump(mode="json")


@contextmanager
def progress() -> Iterator[Callable[[BestFirst], None]]:
    """A bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(search: BestFirst) -> None:
            c = search.counts
            best = min((o.step_time_s for o in search.fitting), default=None)
            text = f"{c['legal']:,} layouts, {c['evaluated']:,} evaluated" + (
                f", best {best:.4g} s" if best is not None else ""
            )
            done = (search.meshes - len(search.meshes_left)) / max(1, search.meshes)
            bar.update(task, completed=done, description=text)

        yield report


def print_result(result: dict[str, Any]) -> None:
    """A table of the best layouts, and what was looked at."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from sim.views.headline import layout_words
    from sim.views.units import seconds

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    c = result["counts"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("step", "tok/s/GPU", "MFU", "exposed", "bubble", "GiB", "layout", "schedule", "b", "recompute"):
        words = name in ("layout", "schedule", "recompute")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in result["best"]:
        x = row["layout"]
        schedule = x["schedule"] + (f" x{x['virtual_stages']}" if x["virtual_stages"] > 1 else "")
        table.add_row(
            seconds(row["step_time_s"]),
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['exposed_comm_s'] / row['step_time_s']:.1%}" if row["step_time_s"] else "-",
            f"{row['bubble_fraction']:.1%}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            " ".join(layout_words(x, short=True)),
            schedule if x["pp"] > 1 else "-",
            str(x["micro_batch_size"]),
            x["recompute"],
        )
    limit, gpus = result["memory_limit_bytes"], f"{result['gpus']:,} GPU" + "s" * (result["gpus"] != 1)
    console.print(f"{result['name']}: {gpus}, at most {limit / 2**30:.4g} GiB each", highlight=False)
    if not c["legal"]:
        with_only = " with these values of --only" * bool(result["only"])
        console.print(f"No layout is legal{with_only}: {result['why_none_legal']}", highlight=False, markup=False)
        return
    if result["best"]:
        console.print(table)
    else:
        fits = "No legal layout fits in memory" + (" and can be simulated." if c["refused"] else ".")
        console.print(fits, highlight=False)
    took = f"{result['wall_s']:.1f} s on {result['cores']} core" + "s" * (result["cores"] != 1)
    console.print(f"{_counts_words(c)}; {took}", highlight=False)
    for refusal in result["refusals"][:REFUSALS_SHOWN]:
        console.print(f"refused: {refusal['reason']}", highlight=False, markup=False)


def _counts_words(c: dict[str, int]) -> str:
    """What became of all legal layouts."""
    fates = [
        f"{c['too_large']:,} did not fit",
        f"{c['beaten']:,} were too slow before links were shared",
        *([f"{c['refused']:,} were refused"] if c["refused"] else []),
        f"{c['simulated']:,} were simulated in full",
    ]
    return (
        f"{c['legal']:,} legal layouts: {c['pruned_by_memory']:,} pruned as out of memory, "
        f"{c['pruned_by_bound']:,} as provably slower, {c['evaluated']:,} evaluated (of which {', '.join(fates)})"
    )
