"""`python -m sim.map`: the best layout for each model size and number of GPUs, beside measured runs.

The map that Hugging Face drew of 4,000 experiments on up to 512 GPUs (N. Tazi et al., The Ultra-Scale Playbook, 2025),
with `sim.search` in place of the cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.command import Command
from sim.commands.files_named import FILE
from sim.commands.layout_options import parse_gpus
from sim.commands.options import SCENARIO, Narrowing, Study, narrowing_options, study_options
from sim.core.errors import InputError
from sim.core.long_runs import lines_while
from sim.core.units import counted

if TYPE_CHECKING:
    from sim.core.executors import Workers
    from sim.validation.experiment_map import MapCell, MapResult

MODELS = "llama3.2-1b,llama3.2-3b,llama3-8b,llama3-70b,llama3-405b"
GPUS = "8,16,32,64,128,256,512"
MOST_CELLS = 1_000
ONLY = ("cp=1", "schedule=1f1b,interleaved_1f1b", "virtual_stages=1,2,4", "recompute=none,selective,full")
BASE, MEASURED = "map_llama3.yaml", Path("published") / "ultrascale_h100.json"


@click.command("map", cls=Command)
@click.argument("scenario", type=SCENARIO, metavar="[SCENARIO]", required=False)
@click.option("--models", default=MODELS, metavar="NAME,…", help="model presets or config.json files, one row for each")
@click.option("--gpus", default=GPUS, metavar="N,…", help="numbers of GPUs, one column for each")
@narrowing_options(ONLY)
@click.option(
    "--measured",
    type=FILE,
    metavar="TABLE.json",
    help="measured steps to draw beside the map; by default the Ultra-Scale Playbook's; - for none",
)
@study_options
def main(
    scenario: Path | None, models: str, gpus: str, narrowing: Narrowing, measured: Path | None, study: Study
) -> int:
    """Search the best layout of every model on every number of GPUs. SCENARIO gives batch, sequence and cluster;
    by default the shipped map_llama3."""
    from sim.inputs.shipped import scenarios_folder
    from sim.views.map_page import map_page

    path = scenario or scenarios_folder() / BASE
    table = measured or scenarios_folder() / MEASURED
    beside = None if str(table) == "-" else table
    result = run_map(path, parse_list(models), parse_gpus(gpus), narrowing, study, beside)
    study.show(result, map_page, print_map)
    return 0 if any(cell.best for cell in result.cells) else 1


def parse_list(text: str) -> list[str]:
    """Words between commas.

    >>> parse_list("llama3-8b, llama3-70b")
    ['llama3-8b', 'llama3-70b']

    Raises:
        InputError: if there is none, or one is given twice.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise InputError(f"--models: found {text!r}; must be different names between commas")
    return words


def run_map(
    path: Path,
    models: Sequence[str],
    gpus: Sequence[int],
    narrowing: Narrowing,
    study: Study,
    measured: Path | None = None,
) -> MapResult:
    """Search every cell.

    Raises:
        InputError: for a scenario, model, table or option that is wrong, or a Dask cluster that does not answer.
    """
    from sim.validation.best_measured import best_measured
    from sim.validation.experiment_map import MapResult

    if len(models) * len(gpus) > MOST_CELLS:
        raise InputError(f"--models, --gpus: make {len(models) * len(gpus):,} searches; at most {MOST_CELLS:,}")
    _check_models(models, path)
    begin, beside = time.perf_counter(), None if measured is None else best_measured(measured)
    with study.pool() as pool, _progress(len(models) * len(gpus)) as advance:
        cells = []
        for model in models:
            for n in gpus:
                cells.append(_cell(path, [*study.overrides, f"model={model}"], model, n, narrowing, pool))
                advance(f"{model} on {counted(n, 'GPU')}")
        cores = pool.cores()
    return MapResult(
        name=path.stem,
        models=tuple(models),
        gpus=tuple(gpus),
        not_measured=cells[0].not_measured,
        only=narrowing.only,
        memory_limit_bytes=cells[0].memory_limit_bytes,
        cells=tuple(cells),
        measured=beside,
        wall_s=time.perf_counter() - begin,
        cores=cores,
    )


def _check_models(models: Sequence[str], path: Path) -> None:
    """Raise for a model that does not exist before the first search.

    Raises:
        InputError: that names the option.
    """
    from sim.inputs.input_source import Source
    from sim.inputs.model_input import resolve_model

    for model in models:
        resolve_model(model, Source("--models", {}, folder=str(path.parent)), ())


def _cell(path: Path, overrides: Sequence[str], model: str, gpus: int, narrowing: Narrowing, pool: Workers) -> MapCell:
    """One search: the fastest layout of a model that fits, or none."""
    from sim.commands.search import Asked, search_space, space_of
    from sim.inputs.calibration_input import not_measured
    from sim.search.found import limit_of_any
    from sim.validation.experiment_map import MapCell

    space, limit_bytes, _ = space_of(path, overrides, gpus, narrowing)
    found, best = search_space(space, limit_bytes, Asked(top=1), pool)
    said = not_measured(space.base.cluster)
    return MapCell(model, gpus, best[0] if best else None, found.counts, limit_of_any(found), said)


@contextmanager
def _progress(cells: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error if that is a terminal, else lines there if it takes long."""
    if not sys.stderr.isatty():
        begin_s, done = time.monotonic(), list[str]()
        with lines_while(lambda: f"searches: {len(done)} of {cells} after {time.monotonic() - begin_s:,.0f} s"):
            yield done.append
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=cells)
        yield lambda done: bar.update(task, advance=1, description=done)


def print_map(result: MapResult) -> None:
    """MFU and layout of each cell, and measured runs beside their simulation."""
    from sim.views.map_page import RUN_HEAD, RUN_NUMBERS_FROM, cell_words, run_cells
    from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

    terminal = standard_output(PIPED_WIDTH)
    cells = {(cell.model, cell.gpus): cell for cell in result.cells}
    rows: list[tuple[str, ...]] = []
    for model in result.models:
        lines = zip_longest(*(cell_words(cells[model, n]) for n in result.gpus), fillvalue="")
        rows += [(model if i == 0 else "", *line) for i, line in enumerate(lines)]
    heads = ["MFU, GiB, layout", *(counted(n, "GPU") for n in result.gpus)]
    terminal.print_table(plain_table(heads, rows, len(heads), gap=2))
    if result.not_measured:
        terminal.print(f"kernels {result.not_measured}")
    if result.measured is not None:
        source = result.measured.source.get("citation", result.measured.table)
        terminal.print(f"Fastest measured layouts and their simulation: {source}")
        terminal.print_table(plain_table(RUN_HEAD, map(run_cells, result.measured.rows), RUN_NUMBERS_FROM, gap=2))
    cores = counted(result.cores, "core")
    terminal.print(f"{counted(len(cells), 'search')} in {result.wall_s:.1f} s on {cores}")
