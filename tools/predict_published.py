"""Writes sim/presets/evidence.json: predictions of published training steps (sim/results/evidence.py).

    python tools/predict_published.py [--check]

`--check` writes nothing and judges the intervals on tables left out. `tests/sim/test_evidence.py` compares a sample of
the file with the simulator; if it fails, run this command again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.core.files import write_text  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.results.evidence import FILE, Features, PublishedStep, features_of, interval_factor, published, sort_of  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from sim.validation.prediction import profile_named  # noqa: E402
from sim.validation.records import Measurement  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402

PER_TABLE = 60  # rows at most, spread evenly over a table
UNLIKE = (", stalled", ", pp and tp")  # groups of ultrascale_h100 with other code (see the table's assumptions)


def chosen(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return a table's rows with a step time, at most `PER_TABLE`, without rows of other code.

    These are groups that a table itself marks, and ZeRO-3 of DeepSpeed in 2021 (docs/accuracy_causes.md, "Worst rows").
    """
    mine = [r for r in rows if "step_time_s" in r.measured and not any(u in r.group for u in UNLIKE)]
    mine = [r for r in mine if r.table != "megatron_sc21_table2" or r.scenario["parallelism"].get("zero") != 3]
    every = -(-len(mine) // PER_TABLE) if mine else 1
    return mine[::every]


def predicted(row: Measurement) -> PublishedStep:
    """Simulate a row and return it with the prediction."""
    scenario = parse_scenario({**row.scenario, "name": row.id}, row.id)
    step_s = simulate(scenario, profile_named(scenario.calibration)).step_time_s
    return PublishedStep(row.table, row.id, row.measured["step_time_s"], float(f"{step_s:.9g}"), features_of(scenario))


def tables() -> list[Path]:
    """Return the shipped tables of training steps."""
    found = sorted((ROOT / "scenarios" / "published").glob("*.json"))
    return [p for p in found if json.loads(p.read_text(encoding="utf-8")).get("kind") == "training_step"]


# Groups of rows, none of which is a single table, by which intervals are judged.
GROUPS: tuple[tuple[str, Callable[[Features], bool]], ...] = (
    ("all", lambda _: True),
    ("dense", lambda f: f.kind == "dense"),
    ("dense, Megatron", lambda f: f.kind == "dense" and f.framework == "megatron"),
    ("dense, torch", lambda f: f.kind == "dense" and f.framework != "megatron"),
    ("dense, 10B and more", lambda f: f.kind == "dense" and f.active >= 10.0),
    ("dense, below 10B", lambda f: f.kind == "dense" and f.active < 10.0),
    ("dense, Ampere", lambda f: f.kind == "dense" and f.architecture == "ampere"),
    ("dense, Hopper", lambda f: f.kind == "dense" and f.architecture == "hopper"),
    ("dense, Blackwell", lambda f: f.kind == "dense" and f.architecture == "blackwell"),
    ("experts", lambda f: f.kind == "moe"),
)


class Judged(NamedTuple):
    """A row, and half the width of its 90 % interval from the other tables' errors, as a logarithm."""

    row: PublishedStep
    half: float

    @property
    def error(self) -> float:
        """Absolute logarithm of predicted ÷ measured."""
        return abs(math.log(self.row.predicted / self.row.measured))


def left_out(rows: Sequence[PublishedStep]) -> list[Judged]:
    """Return each row with its interval from the errors of all tables but its own."""
    found = []
    for name in dict.fromkeys(row.table for row in rows):
        others = [row for row in rows if row.table != name]
        width = lru_cache(partial(interval_factor, rows=others))
        for row in rows:
            if row.table == name and (known := width(sort_of(row.features))) is not None:
                found.append(Judged(row, math.log(known.factor)))
    return found


def judge(rows: Sequence[PublishedStep]) -> None:
    """Print for each table and each group how many rows lie in intervals from the other tables' errors, and how wide
    these are. Columns of groups: tables, rows, part inside as a mean over tables and as one over rows, half an
    interval, and half of one that would know each table's own errors."""
    judged = left_out(rows)
    for name, mine in _by_table(judged).items():
        print(f"{name:32s} {len(mine):3d} rows  error {_mean(j.error for j in mine):6.1%}  {_inside(mine)}")
    for name, belongs in GROUPS:
        tables = _by_table([j for j in judged if belongs(j.row.features)]).values()
        if tables:
            inside = _mean(_mean(j.error <= j.half for j in mine) for mine in tables)
            half = _mean(_mean(math.expm1(j.half) for j in mine) for mine in tables)
            own = _mean(math.expm1(np.quantile([j.error for j in mine], 0.9)) for mine in tables)
            every = [j.error <= j.half for mine in tables for j in mine]
            counts = f"{len(tables)} | {len(every)} | {inside:.0%} | {_mean(every):.0%}"
            print(f"| {name} | {counts} | {half:.1%} | {own:.1%} |")


def _by_table(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        found[j.row.table].append(j)
    return found


def _inside(mine: Sequence[Judged]) -> str:
    inside, half = _mean(j.error <= j.half for j in mine), _mean(math.expm1(j.half) for j in mine)
    return f"inside {inside:5.0%}  half width {half:6.1%}"


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def main() -> None:
    """Write the file, or judge its intervals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="judge the intervals of the file as it is")
    if not parser.parse_args().check:
        rows = [predicted(row) for path in tables() for row in chosen(read_table(path).rows)]
        lines = ",\n".join(json.dumps([*astuple(row)[:4], list(row.features)], separators=(",", ":")) for row in rows)
        write_text(FILE, f'{{"format": "evidence/1", "rows": [\n{lines}\n]}}\n')
        published.cache_clear()
    judge(published())


if __name__ == "__main__":
    main()
