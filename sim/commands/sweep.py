"""`python -m sim.sweep SCENARIO.yaml --vary KEY=VALUE,…`: the step, or the serving, for each combination of values.

What if this rank were slower, that link half as fast, everything noisier? Each combination is simulated with its faults
and without, here, in other processes or on a Dask cluster: what a search's tasks run on.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sim.commands.command import Command
from sim.commands.layout_options import linked_rows
from sim.commands.options import Study, scenario_argument, study_options
from sim.core.errors import InputError
from sim.core.units import as_written, counted, n_bytes

if TYPE_CHECKING:
    from sim.studies.sweep_found import SweepResult, SweepRow
    from sim.studies.sweep_metrics import Workload
    from sim.studies.sweep_worker import Change
    from sim.views.terminal import TextTable

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
    help="a key and its values, repeatable; 0..7 are eight values. KEY,KEY=A:B,C:D links two keys. "
    "faults.stragglers.0.compute_scale is the first straggler's",
)
@click.option("--metric", metavar="NAME", help="the number to compare, such as tokens_per_s_per_gpu or ttft_p99_s")
@study_options
def main(scenario: Path, vary: tuple[str, ...], metric: str | None, study: Study) -> None:
    """Simulate SCENARIO (a training step or serving) once for every combination of the values of --vary."""
    from sim.views.sweep_page import sweep_page

    result = run_sweep(scenario, vary, study, metric)
    study.show(result, sweep_page, print_result)
    if result.left is not None:
        raise KeyboardInterrupt


def run_sweep(path: Path, vary: Sequence[str], study: Study, metric: str | None = None) -> SweepResult:
    """Simulate every combination. Ctrl-C ends the sweep with those that are done.

    Raises:
        KeyboardInterrupt: at Ctrl-C before the first is done.
        InputError: for a scenario or an option that is wrong, if no combination can be simulated, or if a Dask cluster
            does not answer.
    """
    from sim.core.executors import SoFar, results, tracked
    from sim.inputs.scenario import name_of, read_source
    from sim.studies.sweep_found import SweepResult, default_metric
    from sim.studies.sweep_metrics import METRICS
    from sim.studies.sweep_worker import attempt, first_legal, pack

    axes = parse_vary(vary)
    changes: list[Change] = [
        tuple(pair for axis, row in zip(axes, rows, strict=True) for pair in zip(axis.keys, row, strict=True))
        for rows in itertools.product(*(axis.rows for axis in axes))
    ]
    source, name = read_source(path, study.overrides), name_of(path)
    workload: Workload = "serving" if first_legal(source, name, changes).training is None else "training"
    known = [m.key for m in METRICS[workload]]
    if metric is not None and metric not in known:
        raise InputError(f"--metric: found '{metric[:60]}'; must be one of {', '.join(known)}")
    packed = pack(source, name, changes)
    begin = time.perf_counter()
    # What the first one takes tells whether other processes are worth their start.
    found: SoFar[SweepRow] = SoFar([attempt(packed, changes[0])])
    much, cores = (time.perf_counter() - begin) * len(changes) > POOL_FROM_S, 1
    with found.or_interrupted(), study.pool(much) as pool:
        cores = pool.cores()
        others = results(pool, attempt, ((packed, change) for change in changes[1:]))
        found.extend(tracked(others, "steps", len(changes) - 1))
    done = [row for row in found if not row.refused]
    if metric is not None and any(metric not in row.figures for row in done):
        raise InputError(f"--metric: found '{metric}'; steps of reinforcement learning have none")
    if not done:
        crowd = f"; none of the {len(found):,} combinations can be simulated" if len(found) > 1 else ""
        raise InputError(f"{found[0].refused}{crowd}")
    return SweepResult(
        name=source.data.get("name") or name,
        workload=workload,
        vary={key: [row[i] for row in axis.rows] for axis in axes for i, key in enumerate(axis.keys)},
        linked=tuple(axis.keys for axis in axes if len(axis.keys) > 1),
        metric=metric or default_metric(workload, found).key,
        rows=tuple(found),
        wall_s=time.perf_counter() - begin,
        cores=cores,
        left=len(changes) - len(found) if found.interrupted else None,
    )


class Axis(NamedTuple):
    """Keys that are varied together, and the rows of their values."""

    keys: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def parse_vary(options: Sequence[str]) -> list[Axis]:
    """`KEY=VALUE,…` options as values of a key, and `KEY,KEY=VALUE:VALUE,…` as rows of linked ones.

    >>> parse_vary(["faults.stragglers.0.rank=0..2,8"])[0].rows
    [(0,), (1,), (2,), (8,)]
    >>> parse_vary(["parallelism.dp,training.global_batch_size=8:64,16:128"])[0].rows
    [(8, 64), (16, 128)]

    Raises:
        InputError: for an option that is none, or too many combinations.
    """
    from sim.inputs.yaml_input import one_line

    out: list[Axis] = []
    for option in options:
        label = f"--vary {one_line(option, 80)}"
        text, sign, listed = option.partition("=")
        keys = tuple(key.strip() for key in text.split(","))
        if not sign or not all(keys) or not listed.strip():
            raise InputError(f"{label}: must be KEY=VALUE,… such as faults.jitter.sigma=0,0.02,0.05")
        known = [key for axis in out for key in axis.keys]
        twice = next((key for i, key in enumerate(keys) if key in known or key in keys[:i]), None)
        if twice is not None:
            raise InputError(f"{label}: {twice} is given twice")
        out.append(Axis(keys, _values(listed, label) if len(keys) == 1 else _linked(len(keys), listed, label)))
    _check_count(math.prod(len(axis.rows) for axis in out), "--vary")
    if len(out) > MOST_KEYS:
        raise InputError(f"--vary: found {len(out)} keys; at most {MOST_KEYS}")
    return out


def _values(listed: str, label: str) -> list[tuple[Any, ...]]:
    from sim.inputs.yaml_input import parse_yaml

    _check_count(sum(int(b) - int(a) + 1 for a, b in _RANGE.findall(listed)) or 1, label)
    whole = _RANGE.sub(lambda m: ",".join(map(str, range(int(m[1]), int(m[2]) + 1))), listed)
    return [(value,) for value in parse_yaml(f"[{whole}]", label)[0]]


def _linked(count: int, listed: str, label: str) -> list[tuple[Any, ...]]:
    from sim.inputs.yaml_input import parse_yaml

    return [tuple([parse_yaml(word, label)[0] for word in row]) for row in linked_rows(listed, count, label)]


def _check_count(count: int, label: str) -> None:
    if not 0 < count <= MOST_STEPS:
        raise InputError(f"{label}: makes {max(0, count):,} combinations; from 1 to {MOST_STEPS:,} can be simulated")


def _memory(rows: Sequence[SweepRow], keys: Sequence[str]) -> TextTable:
    """Memory of each row's fullest rank by category."""
    from sim.views.terminal import plain_table

    names = list(dict.fromkeys(name for row in rows for name in row.memory))
    sizes = (
        (*map(as_written, row.values.values()), *(n_bytes(row.memory.get(name, 0.0)) for name in names))
        for row in rows
        if row.memory
    )
    return plain_table([*keys, *(name.replace("_", " ") for name in names)], sizes, len(keys), gap=2)


def print_result(result: SweepResult) -> None:
    """A table of all combinations, the best by the metric first where there are very many; refused ones with the
    number of their reason."""
    from sim.views.sweep_page import incomplete_words, lost_words, metric_words, short_keys
    from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

    terminal = standard_output(PIPED_WIDTH)
    if result.left is not None:
        terminal.print(incomplete_words(result), "bold")
    rows, faults, metric = result.rows, result.about_faults, result.compared
    shown: Sequence[SweepRow] = rows
    if len(rows) > ROWS_SHOWN:
        sign = -1 if metric.more_is_better else 1
        shown = sorted(result.done, key=lambda row: sign * row.number(metric))[:ROWS_SHOWN]
    keys = list(short_keys(result.vary).values())
    heads = [*keys, *(m.name for m in result.metrics), *["lost to faults"] * faults]
    reasons = list(dict.fromkeys(r.refused for r in shown if r.refused))
    table = []
    for row in shown:
        if row.refused:
            numbers = [f"refused ({reasons.index(row.refused) + 1})", *[""] * (len(heads) - len(keys) - 1)]
        else:
            numbers = [*(metric_words(row, m) for m in result.metrics), *([lost_words(row)] if faults else [])]
        table.append((*map(as_written, row.values.values()), *numbers))
    terminal.print_table(plain_table(heads, table, len(keys), gap=2))
    if result.not_measured:
        terminal.print(result.not_measured)
    if any(row.memory for row in shown):
        terminal.print()
        terminal.print_table(_memory(shown, keys))
    if any(not row.refused and not row.fits_in_memory for row in shown):
        terminal.print("✗ does not fit in memory")
    if len(shown) < len(rows):
        said = f"the best {len(shown)} of {len(rows):,} by {metric.name}; --json and --html have all"
        terminal.print(said)
    for number, reason in enumerate(reasons, 1):
        terminal.print(f"({number}) refused: {reason}")
    cores = counted(result.cores, "core")
    what = "steps" if result.workload == "training" else "workloads"
    terminal.print(f"{len(rows):,} {what} in {result.wall_s:.1f} s on {cores}")
