"""Prints the shipped profiles' errors on published rows that were not fitted (docs/accuracy.md, "What was fitted").

python -m sim.validate scenarios/published/*.json --json errors.json
python tools/held_out.py errors.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from fit_attention import by_implementation

from sim.commands.command import bad_input_exits
from sim.core.files import read_json
from sim.validation.records import Measurement
from sim.validation.tables import read_table

PUBLISHED = Path(__file__).parents[1] / "scenarios" / "published"
LARGE_FLOPS = 1e12  # larger matmuls last long enough for the power limit


class Split(NamedTuple):
    """A line of the output: rows of a table that were not fitted."""

    title: str
    table: str
    left: Callable[[list[Measurement]], list[Measurement]]
    by_group: bool = False


def others(rows: Sequence[Measurement], every: int) -> list[Measurement]:
    """Return all rows but the first of each `every`."""
    return [row for i, row in enumerate(rows) if i % every]


def configurations(rows: list[Measurement]) -> list[Measurement]:
    """Return the rows of all but every fifth configuration, sorted by name."""
    names = others(sorted({row.group for row in rows}), 5)  # type: ignore[type-var]
    return [row for row in rows if row.group in names]


def fused(rows: list[Measurement]) -> list[Measurement]:
    """Return every second row of each implementation on each GPU."""
    return [row for group in by_implementation(rows).values() for row in others(group, 2)]


def of_each_gpu(rows: list[Measurement]) -> list[Measurement]:
    """Return every second row of GPUs whose profiles have the other rows as points, and all rows of other GPUs."""
    gpus = {str(row.scenario["calibration"]): [r for r in rows if r.measured.get("seconds")] for row in rows}
    split = {gpu: [r for r in each if r.scenario["calibration"] == gpu] for gpu, each in gpus.items()}
    return [r for gpu, each in split.items() for r in (others(each, 2) if gpu in ("a100-sxm", "h100-sxm") else each)]


def flops(row: Measurement) -> float:
    """Return the FLOPs of a matmul's row."""
    return 2.0 * np.prod([float(row.data.get(key) or 1) for key in ("batch", "m", "n", "k")])


def matmuls(op: str, least_flops: float) -> Callable[[list[Measurement]], list[Measurement]]:
    """Return a function that selects an operator's rows, without every second large one, which were fitted."""

    def left(rows: list[Measurement]) -> list[Measurement]:
        mine = [row for row in rows if row.data.get("op") == op]
        large = [row for row in mine if flops(row) >= LARGE_FLOPS]
        small = [row for row in mine if flops(row) < LARGE_FLOPS] if least_flops < LARGE_FLOPS else []
        return small + others(large, 2)

    return left


def grouped(rows: list[Measurement]) -> list[Measurement]:
    """Return every second grouped matmul."""
    return others([row for row in rows if row.data.get("op") == "grouped_gemm"], 2)


SPLITS = (
    Split("vTrain on one node, by configuration", "vtrain_single_node", configurations, True),
    Split("MPT", "mosaic_mpt_a100_80gb", lambda rows: others(rows, 5)),
    Split("Megatron's table 1", "megatron_sc21_table1", lambda rows: others(rows, 2)),
    Split("fused attention", "flash_attention", fused),
    Split("Liger's kernels", "liger_kernels", of_each_gpu),
    Split("B200 matmuls", "b200_kernels", matmuls("gemm", 0.0)),
    Split("B200 matmuls from 1e12 flops on", "b200_kernels", matmuls("gemm", LARGE_FLOPS)),
    Split("B200 grouped matmuls", "b200_kernels", grouped),
)


def main() -> None:
    """Print the errors of each split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("errors", metavar="ERRORS.json", help="what `sim.validate --json` wrote")
    with bad_input_exits():
        tables = {t["name"]: t for t in read_json(Path(parser.parse_args().errors))["tables"]}
    for title, name, left, by_group in SPLITS:
        ids = {row.id for row in left(list(read_table(PUBLISHED / f"{name}.json").rows))}
        off: dict[str, list[float]] = {}
        for e in tables[name]["errors"]:
            if e["id"] in ids:
                off.setdefault(e["group"] if by_group else e["id"], []).append(abs(e["error"]))
        each = [float(np.mean(values)) for values in off.values()]
        print(f"{title}: {len(each)}, mean {np.mean(each):.1%}, median {np.median(each):.1%}")
    steps = [e for t in tables.values() if t["kind"] == "training_step" for e in t["errors"]]
    inside = [inside_interval(e) for e in steps if e["interval"] is not None]
    print(f"training tables' values in the 90 % intervals: {np.mean(inside):.0%} of {len(inside)}")


def inside_interval(e: dict[str, Any]) -> bool:
    """Return whether a measured value lies in its interval."""
    low, high = e["interval"]
    return bool(low <= e["measured"] <= high)


if __name__ == "__main__":
    main()
