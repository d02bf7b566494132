"""Writes sim/presets/evidence.json: predictions of published steps and serving (sim/results/evidence.py).

    python tools/predict_published.py [--check]

`--check` writes nothing and judges the intervals on tables left out. `tests/sim/results/test_evidence.py` compares a
sample of the file with the simulator; if it fails, run this command again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple
from serving_evidence import not_fitted, served_quantities

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.core.files import write_text  # noqa: E402
from sim.core.normal import NINETY_PERCENT  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.prices.likeness import Features, features_of  # noqa: E402
from sim.results.evidence import (  # noqa: E402
    FILE,
    SERVING,
    PublishedStep,
    interval_factor,
    published,
    published_for,
    sort_of,
)
from sim.simulation import simulate  # noqa: E402
from sim.validation.prediction import profile_named  # noqa: E402
from sim.validation.records import Measurement  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402

PER_TABLE = 60  # rows at most, spread evenly over a table
UNLIKE = (", stalled", ", pp and tp")  # groups of ultrascale_h100 with other code (see the table's assumptions)


def chosen(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return a table's rows with a step time, at most `PER_TABLE`, without rows of other code.

    These are groups that a table itself marks, and ZeRO-3 of DeepSpeed in 2021 (docs/accuracy_causes.md).
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


def tables(kind: str = "training_step") -> list[Path]:
    """Return the shipped tables of a kind."""
    found = sorted((ROOT / "scenarios" / "published").glob("*.json"))
    return [p for p in found if json.loads(p.read_text(encoding="utf-8")).get("kind") == kind]


def served(path: Path) -> list[PublishedStep]:
    """Return the quantities of a table of serving, of at most `PER_TABLE` rows that no fit used."""
    rows = not_fitted(read_table(path).rows)
    return [q for row in rows[:: -(-len(rows) // PER_TABLE)] for q in served_quantities(row)]


def _dense(more: Callable[[Features], bool] = lambda _: True) -> Callable[[PublishedStep], bool]:
    return lambda row: row.features.kind == "dense" and more(row.features)


def _quantity(name: str) -> Callable[[PublishedStep], bool]:
    return lambda row: row.quantity.startswith(name)


# Groups of rows, none of which is a single table, by which intervals are judged.
Groups = tuple[tuple[str, Callable[[PublishedStep], bool]], ...]
GROUPS: Mapping[str, Groups] = {
    "training": (
        ("all", lambda _: True),
        ("dense", _dense()),
        ("dense, Megatron", _dense(lambda f: f.framework == "megatron")),
        ("dense, torch", _dense(lambda f: f.framework != "megatron")),
        ("dense, 10B and more", _dense(lambda f: f.active >= 10.0)),
        ("dense, below 10B", _dense(lambda f: f.active < 10.0)),
        ("dense, Ampere", _dense(lambda f: f.architecture == "ampere")),
        ("dense, Hopper", _dense(lambda f: f.architecture == "hopper")),
        ("dense, Blackwell", _dense(lambda f: f.architecture == "blackwell")),
        ("experts", lambda row: row.features.kind == "moe"),
    ),
    SERVING: (
        ("all", lambda _: True),
        ("tokens/s", _quantity("output_tokens_per_s")),
        ("first token", _quantity("time_to_first_token")),
        ("time per token", _quantity("time_per_output_token")),
        ("Ampere", lambda row: row.features.architecture == "ampere"),
        ("Hopper", lambda row: row.features.architecture == "hopper"),
    ),
}


class Judged(NamedTuple):
    """A row, and half the width of its 90 % interval from the other tables' errors, as a logarithm."""

    row: PublishedStep
    half: float

    @property
    def error(self) -> float:
        """Absolute logarithm of predicted ÷ measured, by which power of the time of all work it grows taken out."""
        return self.row.error

    @property
    def inside(self) -> bool:
        """Tell whether the interval holds the measured value."""
        return self.error <= self.half

    @property
    def width(self) -> float:
        """Half of the interval of the measured quantity, as a part of 1."""
        return math.expm1(self.half * self.row.power)


def left_out(rows: Sequence[PublishedStep]) -> list[Judged]:
    """Return each row with its interval from the errors of all tables but its own."""
    found = []
    for name in dict.fromkeys(row.table for row in rows):
        serving = any(row.features.kind == SERVING for row in rows if row.table == name)
        others = [row for row in published_for(serving) if row.table != name]
        width = lru_cache(partial(interval_factor, rows=others))
        for row in rows:
            if row.table == name and (known := width(sort_of(row.features))) is not None:
                half = math.hypot(math.log(known.factor), NINETY_PERCENT * row.host)
                found.append(Judged(row, half))
    return found


def judge(work: str) -> None:
    """Print for each table and each group how many rows lie in intervals from the other tables' errors, and how wide
    these are. Columns of groups: tables, rows, part inside as a mean over tables and as one over rows, half an
    interval, and half of one that would know each table's own errors."""
    judged = left_out([row for row in published() if (row.features.kind == SERVING) == (work == SERVING)])
    for name, mine in _grouped(judged, lambda row: f"{row.table} {row.quantity}").items():
        print(f"{name:50s} {len(mine):3d} rows  error {_mean(j.error for j in mine):6.1%}  {_inside(mine)}")
    for name, belongs in GROUPS[work]:
        tables = _grouped([j for j in judged if belongs(j.row)], lambda row: row.table).values()
        if tables:
            inside = _mean(_mean(j.inside for j in mine) for mine in tables)
            half = _mean(_mean(j.width for j in mine) for mine in tables)
            own = _mean(_own_width(mine) for mine in tables)
            every = [j.inside for mine in tables for j in mine]
            counts = f"{len(tables)} | {len(every)} | {inside:.0%} | {_mean(every):.0%}"
            print(f"| {name} | {counts} | {half:.1%} | {own:.1%} |")


def _own_width(mine: Sequence[Judged]) -> float:
    """Half of an interval that holds 90 % of these rows by their own errors."""
    half = float(np.quantile([j.error for j in mine], 0.9))
    return _mean(math.expm1(half * j.row.power) for j in mine)


def _grouped(judged: Sequence[Judged], by: Callable[[PublishedStep], str]) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        found[by(j.row)].append(j)
    return found


def _inside(mine: Sequence[Judged]) -> str:
    return f"inside {_mean(j.inside for j in mine):5.0%}  half width {_mean(j.width for j in mine):6.1%}"


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _lines(rows: Iterable[PublishedStep]) -> str:
    """Rows as JSON, one a line; what is as usual at their ends is left out."""
    out = []
    for row in rows:
        end = astuple(row)[5:]
        kept = [] if end == PublishedStep.__struct_defaults__ else end
        out.append(json.dumps([*astuple(row)[:4], list(row.features), *kept], separators=(",", ":")))
    return ",\n".join(out)


def main() -> None:
    """Write the file, or judge its intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="judge the intervals of the file as it is")
    if not parser.parse_args().check:
        steps = [predicted(row) for path in tables() for row in chosen(read_table(path).rows)]
        serving = [row for path in tables("inference") for row in served(path)]
        write_text(FILE, f'{{"format": "evidence/1", "rows": [\n{_lines([*steps, *serving])}\n]}}\n')
        published.cache_clear()
        published_for.cache_clear()
    for work in GROUPS:
        judge(work)


if __name__ == "__main__":
    main()
