"""`python -m sim.replay TRACE...`: replay recorded traces, as they are and with something changed.

TRACE: PyTorch profiler (Kineto) JSON, one file a rank, or Chakra execution traces (PREFIX.RANK.et), gzip or not; or
SQLite exports of Nsight Systems; or captured programs (PREFIX.rank0.json.gz), which `--cluster` prices.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from sim.commands.command import Command
from sim.commands.files_named import FILE, OUTPUT
from sim.commands.options import Report, engine_option, gathered, json_option, page_option, write_trace
from sim.core.errors import InputError
from sim.core.units import counted
from sim.traces.changes import (
    Change,
    check_names,
    doubts,
    dp_change,
    gpu_pair,
    kernel_scales,
    network_of,
    straggler_scales,
)
from sim.traces.reading import are_programs, load, load_programs
from sim.traces.recording import Recording
from sim.traces.replay import TIMES, Replay, recorded_times, replay, timeline
from sim.traces.replayed import ReplayResult, make_result

if TYPE_CHECKING:
    from sim.core.engines import Engine


class WhatIf(Struct, frozen=True, dict=True):
    """Hold the options that change a recording; each field is the option of its name."""

    cluster: str | None = None
    gpu: str | None = None
    gpu_ratio: float = 1.0
    network_scale: float = 1.0
    scale_kernels: tuple[str, ...] = ()
    straggler: tuple[str, ...] = ()
    dp: int | None = None
    dp_group: str | None = None

    def given(self) -> dict[str, Any]:
        """Return what the options change, by their names."""
        return {name: value for name, value in asdict(self).items() if value != getattr(_NOTHING, name)}


_NOTHING = WhatIf()
what_if_options = gathered(
    WhatIf,
    "what_if",
    click.option(
        "--cluster", metavar="PRESET", help="price communication on this cluster; captured programs: operators too"
    ),
    click.option("--gpu", metavar="NAME", help="replay on this GPU preset, or FROM=TO"),
    click.option("--gpu-ratio", type=float, default=1.0, metavar="X", help="a GPU X times as fast"),
    click.option("--network-scale", type=float, default=1.0, metavar="X", help="links X times as fast"),
    click.option(
        "--scale-kernels",
        multiple=True,
        metavar="REGEX=X",
        help="multiply the seconds of matching kernels by X, repeatable",
    ),
    click.option(
        "--straggler", multiple=True, metavar="RANK=X", help="multiply a rank's kernel seconds by X, repeatable"
    ),
    click.option(
        "--dp",
        type=click.IntRange(1, 1_000_000),
        metavar="N",
        help="number of data-parallel ranks, with the same work each",
    ),
    click.option("--dp-group", metavar="NAME", help="process group that --dp changes"),
)


class ReplayOptions(Report, frozen=True, kw_only=True, dict=True):
    """Hold the options that were given; each field is the option of its name."""

    calibration: str | None = None
    groups: Path | None = None
    step: int | None = None
    engine: Engine = "auto"
    trace: Path | None = None


replay_options = gathered(
    ReplayOptions,
    "options",
    click.option("--calibration", metavar="NAME", help="captured programs: a profile in place of the GPU's own"),
    click.option("--groups", type=FILE, metavar="FILE", help="Chakra: ASTRA-sim's communicator groups"),
    click.option(
        "--step", type=click.IntRange(0), metavar="N", help="profiler step; by default the one of median length"
    ),
    engine_option,
    json_option,
    page_option,
    click.option("--trace", type=OUTPUT, metavar="FILE", help="write a Chrome/Perfetto trace of the replay"),
)


@click.command("replay", cls=Command)
@click.argument("traces", type=FILE, nargs=-1, required=True, metavar="TRACE...")
@what_if_options
@replay_options
def main(traces: tuple[Path, ...], what_if: WhatIf, options: ReplayOptions) -> None:
    """Replay recorded traces (PyTorch profiler, Nsight Systems, Chakra) or captured programs; options change device,
    network, ranks or kernels."""
    if are_programs(traces):
        recording = load_programs(traces, what_if.cluster, options.calibration)
        asked = replace(what_if, cluster=None)  # the programs are priced on it already
        change = make_change(recording, asked)
        if asked.dp is not None:  # transfers of other ranks are priced anew
            change = replace(change, network=network_of(str(what_if.cluster), _ranks_after(recording, change.dp)))
    else:
        if options.calibration is not None:
            raise InputError("--calibration: is for captured programs; a trace has times of its own")
        recording, asked = load(traces, options.step, options.groups), what_if
        change = make_change(recording, asked)
    recording.warnings += doubts(recording, change)
    unchanged, changed = replay(recording, None, options.engine), replay(recording, change, options.engine)
    if options.trace is not None:
        write_trace(options.trace, timeline(changed))
    options.show(make_result(unchanged, changed, asked.given()), lambda found: _page(found, changed), _print)


def make_change(recording: Recording, asked: WhatIf) -> Change:
    """The what-if that options ask for.

    Raises:
        InputError: for a value that is out of range or names nothing.
    """
    for option, factor in (("--gpu-ratio", asked.gpu_ratio), ("--network-scale", asked.network_scale)):
        if not 1e-9 <= factor <= 1e9:
            raise InputError(f"{option}: found {factor}; must be a factor from 1e-9 to 1e9")
    dp = dp_change(recording, asked.dp, asked.dp_group) if asked.dp is not None else None
    kernels = kernel_scales(asked.scale_kernels)
    check_names(recording, kernels)
    return Change(
        kernels=kernels,
        gpu_ratio=asked.gpu_ratio,
        gpus=gpu_pair(asked.gpu, recording.gpu_name) if asked.gpu else None,
        network_scale=asked.network_scale,
        network=network_of(asked.cluster, _ranks_after(recording, dp)) if asked.cluster else None,
        dp=dp,
        stragglers=straggler_scales(asked.straggler, recording.ranks),
    )


def _ranks_after(recording: Recording, dp: tuple[frozenset[str], int, int] | None) -> int:
    """Ranks of the job once its data-parallel groups have their new size."""
    return recording.world_size * (-(-dp[2] // dp[1]) if dp else 1)


def _page(result: ReplayResult, changed: Replay) -> str:
    from sim.views.replay_page import replay_page

    return replay_page(result, timeline(changed), timeline(recorded_times(changed.recording)))


def _print(result: ReplayResult) -> None:
    from sim.core.units import change_percent, seconds
    from sim.views.replay_page import asked
    from sim.views.terminal import plain_table, standard_output

    terminal = standard_output()
    label = f", profiler step {result.profiler_step}" if result.profiler_step is not None else ""
    terminal.print(f"{result.traces}: {len(result.ranks)} of {counted(result.world_size, 'rank')}{label}", "bold")
    before, again = seconds(result.recorded_step_s), seconds(result.replayed_step_s)
    if result.priced_on:
        terminal.print(f"on {result.priced_on}: {again} a step")
    else:
        terminal.print(f"recorded {before}, replayed unchanged {again} ({change_percent(result.error, 2)})")
    if result.what_if:
        words = ", ".join(f"{k} {asked(v)}" for k, v in result.what_if.items())
        after = f"{seconds(result.step_time_s)} ({change_percent(result.change, 1)})"
        terminal.print(f"with {words}: {after}", whole=True)
    heads = ("rank", "ends", "compute", "exposed transfer", "waiting for ranks", "host alone")
    rows = ((str(row.after.rank), *(seconds(getattr(row.after, n)) for n in TIMES)) for row in result.per_rank[:32])
    terminal.print_table(plain_table(heads, rows))
    terminal.print(f"{counted(result.nodes, 'node')}, {result.engine.path} engine", "dim")
    for warning in result.warnings:
        terminal.print(f"note: {warning}")
