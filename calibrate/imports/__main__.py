"""Make a profile of measurements that others made: `python -m calibrate.imports FORMAT PATH… --out profile.json`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import numpy as np
from msgspec.structs import replace

from calibrate.imports import FORMATS, Imported
from calibrate.imports.measured import MeasuredTable, as_table
from sim.commands.command import Command, run_command
from sim.commands.files_named import OUTPUT
from sim.core.errors import InputError
from sim.inputs.calibration_input import profile_of
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from sim.prices.roofline import Device
from topology.presets import GPUS
from topology.spec import GpuSpec


def with_imported(base: Profile, imported: Imported, name: str, gpu: GpuSpec) -> Profile:
    """Return a profile of `gpu` with what was imported before all that `base` has."""
    collectives = {(t.op, t.ranks, t.source): t for t in (*base.collectives, *imported.collectives)}
    return replace(
        base,
        name=name,
        source=f"{imported.source}; the rest: {base.source}",
        date=datetime.now(UTC).date().isoformat(),
        software={**base.software, **imported.software},
        points=(*(_points(table, gpu) for table in imported.tables), *base.points),
        blocks=(*imported.blocks, *base.blocks),
        collectives=tuple(collectives.values()),
    )


def _points(table: MeasuredTable, gpu: GpuSpec) -> PointTable:
    """A profile's points: medians, and of matmuls what they take without the quantization of their input."""
    op, dtype, source = table.name
    count = len(table.seconds)
    seconds = as_table(table, Device.of(gpu)).seconds if any(table.input_s) else table.seconds
    rounded = np.asarray([float(f"{s:.6g}") for s in seconds])
    zeros, ones = np.zeros(count), np.ones(count, dtype=np.int64)
    return PointTable(op, dtype, table.shapes.astype(np.int64), rounded, zeros, ones, source, table.kernels)


@click.command(cls=Command)
@click.argument("form", metavar="FORMAT", type=click.Choice(list(FORMATS)))
@click.argument("paths", metavar="PATH…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=OUTPUT, help="the profile to write (JSON)")
@click.option("--gpu", help="the GPU (`stepsim gpus`), where the source has several or does not say it")
def main(form: str, paths: Sequence[Path], out: Path, gpu: str | None) -> None:
    """Read measurements that others made into a profile, for `--set calibration=FILE`.

    \b
    aiconfigurator  the package aiconfigurator-core, or a GPU's folder of its systems/data
    aiter           tuning records of AMD's AITER (aiter/configs/*.csv)
    llmservingsim   bundles of LLMServingSim 2's profiler
    nccl-tests      what nccl-tests or rccl-tests print (rccl-tests: the same)

    What the source did not measure, the GPU's own profile has; what was imported comes first.
    """
    if gpu is not None and gpu not in GPUS:
        raise InputError(f"--gpu: found {gpu!r}; allowed: {', '.join(sorted(GPUS))}")
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
    found = FORMATS[form](paths, gpu or "")
    named = gpu or found.gpu
    if not named:
        raise InputError(f"{paths[0]}: does not say of which GPU it is; name it by --gpu")
    made = with_imported(load_profile(profile_of(GPUS[named])), found, out.stem, GPUS[named])
    made.save(out)
    for head, lines in (("measured", found.covered), ("stays estimated", found.estimated), ("skipped", found.skipped)):
        click.echo("".join([f"{head}:\n", *(f"  {line}\n" for line in lines)]) if lines else "", nl=False)
    click.echo(f"wrote {out}: use it by --set calibration={out}")


if __name__ == "__main__":
    run_command(main)
