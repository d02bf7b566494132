"""The errors of predicted tables, printed: per table, per group, and what could not be simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sim.core.units import counted
from sim.views.terminal import PIPED_WIDTH, Terminal, plain_table, standard_output

MOST_GROUPS = 12
HEAD = ("group", "quantity", "rows", "mean", "median", "max", "bias", "in 90 %")


def print_accuracy(tables: Sequence[dict[str, Any]]) -> None:
    """A table for each quantity of each published table."""
    terminal = standard_output(PIPED_WIDTH)
    for table in tables:
        terminal.print()
        terminal.print(f"{table['name']}: {table['simulated']} of {counted(table['rows'], 'row')} simulated", "bold")
        for key in ("failed", "not_simulated", "not_believed", "not_fitting"):
            _print_reasons(terminal, key.replace("_", " "), table[key])
        left_out = Counter(key for entry in table["not_predicted"] for key in entry["keys"])
        for key, rows in left_out.items():
            terminal.print(f"  not predicted: {key} of {counted(rows, 'row')}")
        if table["errors"]:
            _print_groups(terminal, table["groups"])


def _print_reasons(terminal: Terminal, title: str, left_out: list[dict[str, str]]) -> None:
    counts = Counter(entry["reason"] for entry in left_out)
    for reason, count in counts.most_common():
        first = next(entry["id"] for entry in left_out if entry["reason"] == reason)
        terminal.print(f"  {title}: {count} ({first}{' …' if count > 1 else ''}): {reason}")


def _print_groups(terminal: Terminal, groups: list[dict[str, Any]]) -> None:
    shown = groups[: MOST_GROUPS + 1]
    rows = []
    for group in shown:
        for quantity, s in group.items():
            if not isinstance(s, dict):
                continue
            if "accuracy" in s:
                wrong = f"{s['wrong_true']} wrong yes, {s['wrong_false']} wrong no"
                rows.append((group["group"], quantity, str(s["rows"]), f"{s['accuracy']:.1%} right", wrong, "", "", ""))
            else:
                figures = (f"{s[k]:.1%}" for k in ("mean_abs", "median_abs", "max_abs", "bias", "inside_interval"))
                rows.append((group["group"], quantity, str(s["rows"]), *figures))
    terminal.print_table(plain_table(HEAD, rows, words=2, gap=2))
    if len(groups) > len(shown):
        terminal.print(f"  and {len(groups) - len(shown)} more groups (all of them in --json)")
