"""Measures this node and writes a profile: `python -m calibrate.run [--out PROFILE.json] [--quick] …`.

Each finished measurement is kept in `PROFILE.json.partial`. After an interruption the same command resumes from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.command import Command, interrupted_code, run_command
from sim.commands.files_named import OUTPUT, check_output
from sim.core.errors import InputError
from sim.core.units import counted

if TYPE_CHECKING:
    from calibrate.records import Partial, Record
    from calibrate.timings.matmuls import Case
    from calibrate.timings.timing import Bench

GROUPS = (
    "matmul",
    "attention",
    "elementwise",
    "fused",
    "memory",
    "optimizer",
    "launch",
    "collectives",
    "overlap",
    "sharing",
    "python",
)
LIMIT_S = {True: 0.12, False: 0.5}  # for one measurement, quick or not
DEFAULT_OUT = Path("profile.json")
Step = tuple[str, "list[Record]"]


@click.command("calibrate", cls=Command)
@click.option("--out", type=OUTPUT, default=DEFAULT_OUT, metavar="FILE", help="profile to write, or to replace")
@click.option("--device", default="", show_default=False, metavar="cpu|cuda", help="by default cuda if there is a GPU")
@click.option("--quick", is_flag=True, help="measure fewer shapes; takes a minute on a CPU")
@click.option("--only", multiple=True, metavar="GROUP", help=f"one of {', '.join(GROUPS)}; may be repeated")
@click.option("--cpu-seconds", is_flag=True, help="count CPU time instead of wall time, for busy CPUs")
def main(out: Path, device: str, quick: bool, only: tuple[str, ...], cpu_seconds: bool) -> int:
    """Measure matmuls, attention, elementwise kernels, memory, optimizer, launches, collectives and shared cores."""
    groups = _groups(only)
    check_output("--out", out)
    try:
        _calibrate(out, _device(device), quick, groups, cpu_seconds)
    except RuntimeError as error:  # a rank failed, or memory ran out
        print(f"error: {error}\nthe same command resumes from {out}.partial", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes from {out}.partial", file=sys.stderr)
        return interrupted_code()
    return 0


def _groups(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in GROUPS:
            raise InputError(f"--only: found {name!r}; allowed: {', '.join(GROUPS)}")
    return [g for g in GROUPS if not names or g in names]


def _device(name: str) -> str:
    if name not in ("", "cpu", "cuda"):
        raise InputError(f"--device: found {name!r}; allowed: cpu, cuda")
    import torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError("--device: cuda is not available on this machine; allowed: cpu")
    return name or ("cuda" if there else "cpu")


def _calibrate(out: Path, device: str, quick: bool, groups: list[str], cpu_seconds: bool) -> None:
    import torch

    from calibrate import machine
    from calibrate.machine_load import START_BELOW_CORES, Others
    from calibrate.records import Partial, make_profile
    from calibrate.side_by_side import print_rows, rows_of
    from calibrate.timings.timing import Bench

    if device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = {
        "hardware": machine.hardware(device),
        "software": machine.software(device),
        "settings": {**machine.settings(device, quick), **({"clock": "CPU time"} if cpu_seconds else {})},
    }
    busy = machine.busy_cores()
    if busy > START_BELOW_CORES:
        instead = "" if cpu_seconds or device != "cpu" else "; --cpu-seconds counts CPU time instead"
        said = f"other processes use {busy:.1f} cores; measured times will be too long{instead}"
        print(f"warning: {said}", file=sys.stderr)
    kept = Partial(out.with_name(out.name + ".partial"), facts)
    if len(kept):
        print(f"resuming from {counted(len(kept), 'measurement')} in {kept.path}", file=sys.stderr)
    others = Others()
    keys = _measure(Bench(device, quick, LIMIT_S[quick], cpu_seconds), groups, kept)
    load = {"busy_cores_before": round(busy, 2), "busy_cores_meanwhile": round(others.cores(), 2)}
    settings = {**facts["settings"], **load, "groups": " ".join(groups)}
    profile = make_profile(out.stem, {**facts, "settings": settings}, kept.records(keys))
    profile.save(out)
    kept.path.unlink(missing_ok=True)
    if rows := rows_of(profile):
        print_rows(rows)
    points = sum(len(t.seconds) for t in profile.points)
    sizes = sum(len(t.seconds) for t in profile.collectives)
    coefficients = counted(len(profile.coefficients.flat()), "coefficient")
    print(f"{out}: {counted(points, 'kernel')}, {counted(sizes, 'collective')}, {coefficients}")
    if "collectives" in groups and not sizes:
        print("no collectives: this machine has no room for two ranks", file=sys.stderr)


def _measure(bench: Bench, groups: list[str], kept: Partial) -> list[str]:
    """Measure what is not kept yet, and return the keys of everything asked for."""
    work = [w for group in groups for w in _work(bench, group)]
    keys = [key for wanted, _ in work for key in wanted]
    with _progress(len(keys), sum(key in kept for key in keys)) as advance:
        for wanted, run in work:
            missing = [key for key in wanted if key not in kept]
            for key, records in run(missing) if missing else ():
                kept.add(key, records)
                advance(key)
    return keys


def _work(bench: Bench, group: str) -> Iterator[tuple[list[str], Callable[[list[str]], Iterator[Step]]]]:
    """Yield the measurements of one group: their keys, and a function that runs the missing ones."""
    from calibrate import collectives, host_work, shared_cores
    from calibrate.timings import attention, elementwise, fused
    from calibrate.timings import matmuls as kernels

    if group == "python":
        yield [host_work.KEY], partial(host_work.measure, bench)
        return
    if group == "sharing":
        yield shared_cores.keys(bench), partial(shared_cores.measure, bench)
        return
    if group in ("collectives", "overlap"):
        for ranks in collectives.group_sizes(bench.device):
            keys = [collectives.overlap_key(ranks)] if group == "overlap" else [*collectives.calls(bench, ranks)]
            yield keys, partial(collectives.measure, bench, ranks)
        return
    cases = {
        "matmul": kernels.matmul_cases,
        "launch": kernels.launch_cases,
        "attention": attention.attention_cases,
        "elementwise": elementwise.elementwise_cases,
        "fused": fused.fused_cases,
        "memory": elementwise.memory_cases,
        "optimizer": elementwise.optimizer_cases,
    }[group](bench)

    yield [case.key for case in cases], partial(_run_cases, bench, {case.key: case for case in cases})


def _run_cases(bench: Bench, cases: dict[str, Case], missing: list[str]) -> Iterator[Step]:
    import torch

    for key in missing:
        try:
            records = cases[key].run(bench)
        except torch.OutOfMemoryError:
            print(f"{key}: skipped, it does not fit in the GPU's memory", file=sys.stderr)
            records = []
        yield key, records


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda key: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("warming up", total=total, completed=done)
        yield lambda key: bar.update(task, advance=1, description=key)


def _keep_memory() -> None:
    """Start again in the same process, with the allocator's settings of a real run's ranks."""
    from calibrate.launch import MALLOC

    if any(os.environ.get(k) != v for k, v in MALLOC.items()):
        command = [sys.executable, "-m", "calibrate.run", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | MALLOC)


if __name__ == "__main__":
    _keep_memory()
    run_command(main)
