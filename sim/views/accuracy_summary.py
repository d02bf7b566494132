"""The errors of predicted tables, printed: per table, per group, and what could not be simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sim.core.units import counted

MOST_GROUPS = 12


def print_accuracy(tables: Sequence[dict[str, Any]]) -> None:
    """A table for each quantity of each published table."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 132)
    for table in tables:
        console.print(
            f"\n[bold]{table['name']}[/bold]: {table['simulated']} of {counted(table['rows'], 'row')} simulated"
        )
        for key in ("failed", "not_simulated", "not_believed", "not_fitting"):
            _print_reasons(console, key.replace("_", " "), table[key])
        left_out = Counter(key for entry in table["not_predicted"] for key in entry["keys"])
        for key, rows in left_out.items():
            console.print(f"  not predicted: {key} of {counted(rows, 'row')}", markup=False)
        if table["errors"]:
            _print_groups(console, table["groups"])


def _print_reasons(console: Any, title: str, left_out: list[dict[str, str]]) -> None:
    counts = Counter(entry["reason"] for entry in left_out)
    for reason, count in counts.most_common():
        first = next(entry["id"] for entry in left_out if entry["reason"] == reason)
        console.print(f"  {title}: {count} ({first}{' …' if count > 1 else ''}): {reason}", markup=False)


def _print_groups(console: Any, groups: list[dict[str, Any]]) -> None:
    from rich.table import Table

    shown = groups[: MOST_GROUPS + 1]
    out = Table("group", "rows", "quantity", "mean", "median", "max", "bias", "in 90 %", box=None)
    for column in out.columns[1:2] + out.columns[3:]:
        column.justify = "right"
    for group in shown:
        for quantity, s in group.items():
            if not isinstance(s, dict):
                continue
            if "accuracy" in s:
                wrong = f"{s['wrong_true']} wrong yes, {s['wrong_false']} wrong no"
                out.add_row(group["group"], str(s["rows"]), quantity, f"{s['accuracy']:.1%} right", wrong)
            else:
                figures = (f"{s[k]:.1%}" for k in ("mean_abs", "median_abs", "max_abs", "bias", "inside_interval"))
                out.add_row(group["group"], str(s["rows"]), quantity, *figures)
    console.print(out)
    if len(groups) > len(shown):
        console.print(f"  and {len(groups) - len(shown)} more groups (all of them in --json)")
