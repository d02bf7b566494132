"""The summary of a serving workload: latencies and throughput, the cache, memory, certainty, warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.views.summary import print_summary
from sim.views.units import count, n_bytes, percent, seconds

if TYPE_CHECKING:
    from rich.console import Console


def print_serving(result: Mapping[str, Any], console: Console) -> None:
    """Print a serving `sim-result/1` for a person."""
    print_summary(result, console)
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in cache_lines(result):
        table.add_row(name, Text(value))
    console.print()
    console.print(table, highlight=False)


def cache_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What there is to say about the workload and its cache, as (name, value)."""
    kv = result["kv_cache"]
    served = (
        f"{count(result['requests'])} requests, {count(result['output_tokens'])} tokens in "
        f"{seconds(result['duration_s'])}, {count(result['iterations'])} iterations"
    )
    cache = (
        f"{kv['layout']}, {count(kv['blocks'])} blocks of {kv['block_tokens']} tokens, "
        f"{n_bytes(kv['bytes_per_token'])} a token and GPU"
    )
    used = (
        f"at most {count(kv['blocks_used'])} blocks ({percent(kv['blocks_used'] / max(1, kv['blocks']))}), "
        f"{percent(kv['waste'])} of them empty; {count(kv['running_max'])} sequences at once at most"
    )
    lines = [("served", served), ("cache", cache), ("in use", used)]
    if kv["preemptions"]:
        swapped = f", {n_bytes(kv['swapped_bytes'])} a GPU to the host and back" if kv["swapped_bytes"] else ""
        lost = f"{count(kv['preemptions'])} times, {count(kv['recomputed_tokens'])} tokens lost{swapped}"
        lines.append(("preempted", lost))
    if kv["prefix_hit_tokens"]:
        loaded = f"; {n_bytes(kv['loaded_bytes'])} from the host" if kv["loaded_bytes"] else ""
        lines.append(("prefix cache", f"{percent(kv['prefix_hit_rate'])} of prompt tokens found{loaded}"))
    return lines
