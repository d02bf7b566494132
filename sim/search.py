"""`python -m sim.search SCENARIO.yaml`: the best layouts of its GPUs that fit in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.command import bad_input_exits, run_main, write_json
from sim.errors import InputError
from sim.options import Dask, Json, Overrides, Page, Processes

if TYPE_CHECKING:
    from sim.layout.best_first import BestFirst, Found
    from sim.layout.evaluation import Outcome
    from sim.layout.layouts import Layout, Space

OBJECTIVES = ("step_time", "tokens_per_s_per_gpu")
REFUSALS_SHOWN = 3  # the most frequent; --json has all
POOL_FROM_MESHES = 24  # fewer are done before other processes have started
Objective = Annotated[
    str, typer.Option(help="what is best; of one number of GPUs both rank alike", metavar="|".join(OBJECTIVES))
]
Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs to lay out; default: the scenario's ranks, without parallelism its cluster's GPUs", min=1),
]
WholeFront = Annotated[
    bool,
    typer.Option(
        "--whole-front",
        help="simulate all that may lie on the Pareto line of time and memory, not just near its fast end",
    ),
]


def main(
    scenario: Annotated[Path, typer.Argument(help="scenario file", metavar="SCENARIO.yaml")],
    gpus: Gpus = None,
    objective: Objective = "step_time",
    memory_limit: Annotated[
        str | None, typer.Option(help="bytes a GPU may use, such as 70GiB; by default all it has", metavar="BYTES")
    ] = None,
    top: Annotated[int, typer.Option(help="best layouts to list", min=1, max=10_000)] = 10,
    only: Annotated[
        list[str] | None, typer.Option(help="search these values of a key alone, repeatable", metavar="KEY=VALUE,…")
    ] = None,
    whole_front: WholeFront = False,
    workers: Processes = None,
    dask: Dask = None,
    json: Json = None,
    html: Page = None,
    set_: Overrides = None,
) -> None:
    """Search all layouts of SCENARIO.yaml's GPUs over tp, sp, cp, pp, dp, ep, zero, schedule, virtual stages,
    micro-batch size and recomputation."""
    with bad_input_exits():
        if objective not in OBJECTIVES:
            raise InputError(f"--objective: found {objective!r}; allowed: {', '.join(OBJECTIVES)}")
        result = run_search(
            scenario, set_ or [], gpus, memory_limit, top, only or [], whole_front, workers, dask, objective
        )
        if json is not None:
            write_json(json, result)
        if html is not None:
            from sim.files import write_text
            from sim.views.search_page import search_page

            write_text(html, search_page(result))
        if json != "-":
            print_result(result)
    if not result["best"]:
        raise SystemExit(1)


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
    from sim.inputs.scenario import read_source
    from sim.layout.best_first import BestFirst
    from sim.layout.executors import available_cores, dask_workers, local_workers
    from sim.layout.layouts import grid_is_legal, grids, make_space

    space = make_space(read_source(path, overrides), gpus, path.stem, parse_only(only))
    limit = _limit_bytes(memory_limit) or float(space.base.cluster.gpu.memory_bytes)
    meshes = sum(grid_is_legal(space, g) for g in grids(space))
    count = workers or (available_cores() if meshes >= POOL_FROM_MESHES else 1)
    with dask_workers(dask) if dask else local_workers(count) as pool, progress() as report:
        found = BestFirst(space, limit, top, whole_front, pool, report).run()
    return make_result(space, found, limit, objective)


def parse_only(options: Sequence[str]) -> dict[str, list[Any]]:
    """`KEY=VALUE,…` options as values of fields of Layout.

    >>> parse_only(["tp=4,8", "schedule=1f1b"])
    {'tp': [4, 8], 'schedule': ['1f1b']}

    Raises:
        InputError: for another key, or a value that the key never has.
    """
    from sim.inputs.input_source import nearest
    from sim.inputs.yaml_input import parse_yaml
    from sim.layout.layouts import RECOMPUTE, Layout
    from sim.schedules import NAMES

    words = {"schedule": NAMES, "recompute": RECOMPUTE}

    out: dict[str, list[Any]] = {}
    for option in options:
        key, sign, text = option.partition("=")
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
    from sim.inputs.parallelism import parse_size

    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise InputError(f"--memory-limit: found {text!r}; {error}") from None
    if size <= 0:
        raise InputError(f"--memory-limit: found {text!r}; must be above 0")
    return float(size)


def make_result(space: Space, found: Found, limit_bytes: float, objective: str) -> dict[str, Any]:
    """The result as plain data: format sim-search/1."""
    c, cpu_s, per_core = found.counts, found.cpu_s, found.wall_s * found.cores
    evaluating_s = sum(cpu_s.values()) - cpu_s["bounding"]
    return {
        "format": "sim-search/1",
        "name": space.base.name,
        "gpus": space.gpus,
        "objective": objective,
        "memory_limit_bytes": limit_bytes,
        "only": {k: list(v) for k, v in space.only.items()},
        "best": [_row(space, o) | {"scenario": _scenario(space, o.layout)} for o in found.best],
        "pareto": [_row(space, o) for o in found.pareto],
        "evaluated": [_row(space, o) for o in found.fitting],
        "counts": c,
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
    from sim.layout.layouts import scenario_of

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


def mesh_text(layout: dict[str, Any]) -> str:
    """A mesh in words: degrees of 1 are left out.

    >>> mesh_text({"tp": 8, "sp": True, "cp": 1, "pp": 4, "dp": 2, "ep": 1, "zero": 1})
    'tp8+sp pp4 dp2 z1'
    """
    words = [
        f"{k}{layout[k]}" + ("+sp" if k == "tp" and layout["sp"] else "")
        for k in ("tp", "cp", "pp", "dp", "ep")
        if layout[k] > 1
    ]
    return " ".join([*words, f"z{layout['zero']}"])


def print_result(result: dict[str, Any]) -> None:
    """A table of the best layouts, and what was looked at."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    c = result["counts"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("step", "tok/s/GPU", "GiB", "layout", "schedule", "b", "recompute"):
        table.add_column(name, justify="left" if name in ("layout", "schedule", "recompute") else "right", no_wrap=True)
    for row in result["best"]:
        x = row["layout"]
        schedule = x["schedule"] + (f" x{x['virtual_stages']}" if x["virtual_stages"] > 1 else "")
        table.add_row(
            f"{row['step_time_s']:.4g} s",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            mesh_text(x),
            schedule if x["pp"] > 1 else "-",
            str(x["micro_batch_size"]),
            x["recompute"],
        )
    limit, gpus = result["memory_limit_bytes"], f"{result['gpus']:,} GPU" + "s" * (result["gpus"] != 1)
    console.print(f"{result['name']}: {gpus}, at most {limit / 2**30:.4g} GiB each", highlight=False)
    if not c["legal"]:
        console.print(f"No layout is legal{' with these values of --only' * bool(result['only'])}.", highlight=False)
        return
    if result["best"]:
        console.print(table)
    else:
        fits = "No legal layout fits in memory" + (" and can be simulated." if c["refused"] else ".")
        console.print(fits, highlight=False)
    seconds = f"{result['wall_s']:.1f} s on {result['cores']} core" + "s" * (result["cores"] != 1)
    console.print(f"{_counts_words(c)}; {seconds}", highlight=False)
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
        f"{c['legal']:,} legal layouts: {c['pruned_by_memory']:,} too large by their least memory, "
        f"{c['pruned_by_bound']:,} too slow by their bound, {c['evaluated']:,} evaluated (of which {', '.join(fates)})"
    )


if __name__ == "__main__":
    run_main(main)
