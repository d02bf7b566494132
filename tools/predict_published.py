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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import astuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.core.files import write_text  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.results.evidence import FILE, Row, features_of, interval_factor, published  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from sim.validation.prediction import profile_named  # noqa: E402
from sim.validation.tables import Row as TableRow  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402

PER_TABLE = 60  # rows at most, spread evenly over a table
UNLIKE = (", stalled", ", pp and tp")  # groups of ultrascale_h100 with other code (see the table's assumptions)


def chosen(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return a table's rows with a step time, at most `PER_TABLE`, without rows of other code.

    These are groups that a table itself marks, and ZeRO-3 of DeepSpeed in 2021 (docs/accuracy_causes.md, "Worst rows").
    """
    mine = [r for r in rows if "step_time_s" in r.measured and not any(u in r.group for u in UNLIKE)]
    mine = [r for r in mine if r.table != "megatron_sc21_table2" or r.scenario["parallelism"].get("zero") != 3]
    every = -(-len(mine) // PER_TABLE) if mine else 1
    return mine[::every]


def predicted(row: TableRow) -> Row:
    """Simulate a row and return it with the prediction."""
    scenario = parse_scenario({**row.scenario, "name": row.id}, row.id)
    step_s = simulate(scenario, profile_named(scenario.calibration)).step_time_s
    return Row(row.table, row.id, row.measured["step_time_s"], float(f"{step_s:.9g}"), features_of(scenario))


def tables() -> list[Path]:
    """Return the shipped tables of training steps."""
    found = sorted((ROOT / "scenarios" / "published").glob("*.json"))
    return [p for p in found if json.loads(p.read_text(encoding="utf-8")).get("kind") == "training_step"]


def judge(rows: Sequence[Row]) -> None:
    """Print for each table how many rows lie in intervals from the other tables' errors, and the intervals' width."""
    by_table: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_table[row.table].append(row)
    shares, widths = [], []
    for name, mine in by_table.items():
        others = [row for row in rows if row.table != name]
        factors = [interval_factor(row.features, others) for row in mine]
        known = [(row, f.factor) for row, f in zip(mine, factors, strict=True) if f is not None]
        inside = np.mean([abs(math.log(r.predicted / r.measured)) <= math.log(f) for r, f in known])
        width = np.mean([f - 1.0 for _, f in known])
        mean = np.mean([abs(r.predicted / r.measured - 1.0) for r in mine])
        shares.append(inside)
        widths.append(width)
        print(f"{name:32s} {len(mine):3d} rows  error {mean:6.1%}  inside {inside:5.0%}  half width {width:6.1%}")
    print(f"tables: mean inside {np.mean(shares):.0%}, mean half width {np.mean(widths):.1%}")


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
