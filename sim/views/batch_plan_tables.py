"""The tables of a batch plan (`sim.studies.batch_plan`): its cuts, and the sizes around the critical batch."""

from __future__ import annotations

from typing import Any

from sim.core.units import allocated_reserved, count, counted, seconds


def print_plan(plan: dict[str, Any]) -> None:
    """The cuts as a table, and one sentence about the best."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "dp", "micro", "accum.", "GPUs", "peak / reserved", "", "step", "tokens/s/GPU", box=None, padding=(0, 1)
    )
    for c in plan["cuts"]:
        table.add_row(
            *(str(c[key]) for key in ("dp", "micro_batch_size", "accumulation", "gpus")),
            allocated_reserved(c["peak_memory_bytes"], c["peak_reserved_bytes"]),
            "✓ fits" if c["fits_in_memory"] else "✗ too big",
            seconds(c["step_time_s"]),
            count(c["tokens_per_s_per_gpu"]),
        )
    console = Console()
    console.print(f"{plan['name']}: global batch of {counted(plan['global_batch_size'], 'sequence')}", highlight=False)
    console.print(table, highlight=False)
    if "critical_batch_size" in plan:
        steps, tokens = plan["steps_factor"], plan["tokens_factor"]
        text = f"critical batch size {plan['critical_batch_size']:,.0f}: this batch takes {steps:.2f} times the fewest"
        console.print(f"{text} steps and {tokens:.2f} times the fewest tokens to a loss", highlight=False)
        heads = ("global batch", "accum.", "step", "steps ÷ fewest", "tokens ÷ fewest", "time ÷ fewest steps")
        table = Table(*heads, box=None, padding=(0, 1))
        for s in plan["batch_sizes"]:
            table.add_row(
                f"{s['global_batch_size']:,}",
                str(s["accumulation"]),
                seconds(s["step_time_s"]),
                f"{s['steps_factor']:.2f}",
                f"{s['tokens_factor']:.2f}",
                seconds(s["time_s"]),
            )
        console.print(table, highlight=False)
