"""`python -m sim.sweep SCENARIO.yaml --vary KEY=VALUE,…`: the step for every combination of values of some keys.

What if this rank were slower, that link half as fast, everything noisier? Each combination is simulated with its faults
and without, here, in other processes or on a Dask cluster: what a search's tasks run on.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Iterator, Sequence
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
    from sim.studies.executors import Workers
    from sim.studies.sweep_worker import Change, WhatIf

MOST_KEYS = 8
MOST_STEPS = 100_000
POOL_FROM_S = 5.0  # of expected work; less is done before other processes have started
ROWS_SHOWN = 40
_RANGE = re.compile(r"(?<![^\s,])(\d{1,8})\.\.(\d{1,8})(?![^\s,])")


@click.command("sweep", cls=Command)
@scenario_argument
@click.option(
    "--vary",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,…",
    help="a key and its values, repeatable; 0..7 is eight of them. faults.stragglers.0.compute_scale is the first "
    "straggler's",
)
@processes_option
@dask_option
@json_option
@page_option
@overrides_option
def main(
    scenario: Path,
    vary: tuple[str, ...],
    workers: int | None,
    dask: str | None,
    json: str | None,
    html: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Simulate SCENARIO's step once for every combination of the values that --vary lists."""
    result = run_sweep(scenario, overrides, vary, workers, dask)
    if json is not None:
        write_json(json, result, indent=1)
    if html is not None:
        from sim.views.sweep_page import sweep_page

        write_page(html, sweep_page(result))
    if json != "-":
        print_result(result)


def run_sweep(
    path: Path, overrides: Sequence[str], vary: Sequence[str], workers: int | None = None, dask: str | None = None
) -> dict[str, Any]:
    """Simulate, and return the result in the form of `--json`: format sim-sweep/1.

    Raises:
        InputError: for a scenario or an option that is wrong, if no combination can be simulated, or if a Dask cluster
            does not answer.
    """
    from sim.inputs.scenario import name_of, read_source
    from sim.studies.executors import available_cores, dask_workers, local_workers
    from sim.studies.sweep_worker import attempt, pack

    keys = parse_vary(vary)
    changes: list[Change] = [tuple(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]
    source = read_source(path, overrides)
    packed = pack(source, name_of(path), changes)
    begin = time.perf_counter()
    first = attempt(packed, changes[0])  # what it takes tells whether other processes are worth their start
    much = (time.perf_counter() - begin) * len(changes) > POOL_FROM_S
    count = workers or (available_cores() if much else 1)
    with dask_workers(dask) if dask else local_workers(count) as pool:
        rows = [first, *_run(pool, packed, changes[1:])]
        cores = pool.cores()
    if all(row.refused for row in rows):
        raise InputError(f"{rows[0].refused}; none of the {len(rows):,} combinations can be simulated")
    return {
        "format": "sim-sweep/1", "name": source.data.get("name") or name_of(path),
        "vary": {key: list(values) for key, values in keys.items()},
        "rows": [row.as_dict() for row in rows],
        "wall_s": time.perf_counter() - begin, "cores": cores,
    }  # fmt: skip


def _run(pool: Workers, packed: bytes, changes: Sequence[Change]) -> Iterator[WhatIf]:
    from sim.studies.executors import results
    from sim.studies.sweep_worker import attempt

    found = results(pool, attempt, ((packed, change) for change in changes))
    if not sys.stderr.isatty():
        yield from found
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(found, "steps", len(changes), console=Console(stderr=True), transient=True)


def parse_vary(options: Sequence[str]) -> dict[str, list[Any]]:
    """`KEY=VALUE,…` options as lists of values.

    >>> parse_vary(["faults.stragglers.0.compute_scale=1.1,1.3", "faults.stragglers.0.rank=0..2,8"])
    {'faults.stragglers.0.compute_scale': [1.1, 1.3], 'faults.stragglers.0.rank': [0, 1, 2, 8]}

    Raises:
        InputError: for an option that is none, or too many combinations.
    """
    from sim.inputs.yaml_input import one_line, parse_yaml

    out: dict[str, list[Any]] = {}
    for option in options:
        label = f"--vary {one_line(option, 80)}"
        key, sign, text = option.partition("=")
        key = key.strip()
        if not sign or not key or not text.strip():
            raise InputError(f"{label}: must be KEY=VALUE,… such as faults.jitter.sigma=0,0.02,0.05")
        if key in out:
            raise InputError(f"{label}: {key} is given twice")
        _check_count(sum(int(b) - int(a) + 1 for a, b in _RANGE.findall(text)) or 1, label)
        listed = _RANGE.sub(lambda m: ",".join(map(str, range(int(m[1]), int(m[2]) + 1))), text)
        out[key] = parse_yaml(f"[{listed}]", label)[0]
    combinations = 1
    for values in out.values():
        combinations *= len(values)
    _check_count(combinations, "--vary")
    if len(out) > MOST_KEYS:
        raise InputError(f"--vary: found {len(out)} keys; at most {MOST_KEYS}")
    return out


def _check_count(count: int, label: str) -> None:
    if not 0 < count <= MOST_STEPS:
        raise InputError(f"{label}: makes {max(0, count):,} combinations; from 1 to {MOST_STEPS:,} can be simulated")


def print_result(result: dict[str, Any]) -> None:
    """A table of all combinations; of very many the slowest."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from sim.views.sweep_page import about_faults, lost_words, memory_words
    from sim.views.units import seconds

    console, rows, faults = Console(), result["rows"], about_faults(result)
    shown = rows
    if len(rows) > ROWS_SHOWN:
        shown = sorted(rows, key=lambda r: -(r["step_time_s"] or 0.0))[:ROWS_SHOWN]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for key in result["vary"]:
        table.add_column(key, overflow="fold")
    for name in ("step", *(["lost to faults"] if faults else []), "memory", "tok/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        values = [str(v) for v in row["values"].values()]
        if row["refused"]:
            table.add_row(*values, "refused")
        else:
            lost = [lost_words(row)] if faults else []
            rate = f"{row['tokens_per_s_per_gpu']:,.0f}"
            table.add_row(*values, seconds(row["step_time_s"]), *lost, memory_words(row), rate)
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"the slowest {len(shown)} of {len(rows):,}; --json and --html have all", highlight=False)
    for reason in dict.fromkeys(r["refused"] for r in shown if r["refused"]):
        console.print(f"refused: {reason}", highlight=False, markup=False)
    cores = f"{result['cores']} core{'s' * (result['cores'] != 1)}"
    console.print(f"{len(rows):,} steps in {result['wall_s']:.1f} s on {cores}", highlight=False)
