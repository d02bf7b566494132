"""`python -m benchmarks [--quick] [--json FILE]`: prints tables of rates, ratios and growth.

Seconds are CPU seconds of one core, the shortest of several runs. Machines differ and so do moments: compare the
ratios within one run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cases import contended, engines, folding, growth, large, processes, search
from benchmarks.serving import serving, serving_ways


def main() -> None:
    """Run all benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="How fast the simulator is here.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a smaller search")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    options = parser.parse_args()
    repeats = 2 if options.quick else 5
    rates = [
        *processes(repeats),
        *large(repeats),
        *engines(repeats),
        *folding(repeats),
        *contended(2 if options.quick else 32),
        *search(8 if options.quick else 32),
        *serving(repeats, 10_000),
        *serving_ways(repeats, 2_000),
    ]
    result = {"format": "benchmarks/1", "rates": rates, "growth": growth(repeats)}
    print_tables(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def print_tables(result: dict[str, Any]) -> None:
    """Two tables: rates, and growth with its exponents."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("what", "number", "CPU s", "per s", "ratio", box=SIMPLE_HEAD, title="Rates on one core")
    for row in result["rates"]:
        ratio = f"{row['ratio']:.1f}x" if "ratio" in row else ""
        number = f"{row['tasks']:,}" if "tasks" in row else ""
        table.add_row(row["what"], number, f"{row['seconds']:.4g}", f"{row['per_s']:,.0f} {row['unit']}", ratio)
    console.print(table)
    table = Table("as this grows", "sizes", "CPU ms", "slope", box=SIMPLE_HEAD, title="One simulation")
    for row in result["growth"]:
        sizes, times = " ".join(f"{n:,}" for n in row["sizes"]), " ".join(f"{s * 1e3:.1f}" for s in row["seconds"])
        table.add_row(row["what"], sizes, times, f"{row['slope']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
