"""The summary of a step of reinforcement learning: headline, phases, GPUs, what was written and trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.rl_words import PHASE_HEAD, POOL_HEAD, fact_lines, phase_rows, pool_rows, rl_headline, rl_line
from sim.views.summary import numbers_table, plain_table, provenance_lines, warning_lines

if TYPE_CHECKING:
    from rich.console import Console

    from sim.rl.records import RlResult


def print_rl(result: RlResult, console: Console) -> None:
    """Print a result for a person."""
    from rich.table import Table
    from rich.text import Text

    rl = result.scenario.rl
    assert rl is not None
    console.print(Text(result.scenario.name, style="bold"), highlight=False)
    console.print(Text(rl_line(result.scenario, rl), style="dim"), highlight=False)
    phases = plain_table(*(name.lower() for name in PHASE_HEAD))
    for row in phase_rows(result):
        phases.add_row(*row)
    pools = plain_table(*(name.lower() for name in POOL_HEAD))
    for row in pool_rows(result.pools):
        pools.add_row(*row)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in fact_lines(result):
        facts.add_row(name, Text(value))
    for table in (numbers_table(rl_headline(result)), phases, pools, facts):
        console.print()
        console.print(table, highlight=False)
    console.print()
    for line in (*provenance_lines(result), *warning_lines(result)):
        console.print(line, highlight=False)
