"""The summary of a step of reinforcement learning: headline, phases, GPUs, what was written and trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.rl_words import PHASE_HEAD, POOL_HEAD, fact_lines, phase_rows, pool_rows, rl_headline, rl_line
from sim.views.summary import numbers_table, plain_table, print_provenance, words_table
from sim.views.terminal import Terminal

if TYPE_CHECKING:
    from sim.rl.records import RlResult


def print_rl(result: RlResult, terminal: Terminal) -> None:
    """Print a result for a person."""
    rl = result.scenario.rl
    assert rl is not None
    terminal.print(result.scenario.name, "bold")
    terminal.print(rl_line(result.scenario, rl), "dim")
    phases = plain_table([name.lower() for name in PHASE_HEAD], phase_rows(result))
    pools = plain_table([name.lower() for name in POOL_HEAD], pool_rows(result.pools))
    for table in (numbers_table(rl_headline(result)), phases, pools, words_table(fact_lines(result))):
        terminal.print()
        terminal.print_table(table)
    terminal.print()
    print_provenance(result, terminal)
