"""The tables of a batch plan (`sim.studies.batch_plan`): its cuts, and the sizes around the critical batch."""

from __future__ import annotations

from typing import Any

from sim.core.units import allocated_reserved, count, counted, seconds
from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

CUTS = ("dp", "micro", "accum.", "GPUs", "peak / reserved", "", "step", "tokens/s/GPU")
SIZES = ("global batch", "accum.", "step", "steps ÷ fewest", "tokens ÷ fewest", "time ÷ fewest steps")


def print_plan(plan: dict[str, Any]) -> None:
    """The cuts as a table, and one sentence about the best."""
    terminal = standard_output(PIPED_WIDTH)
    terminal.print(f"{plan['name']}: global batch of {counted(plan['global_batch_size'], 'sequence')}")
    terminal.print_table(plain_table(CUTS, map(_cut, plan["cuts"]), words=0, gap=2))
    if "critical_batch_size" in plan:
        steps, tokens = plan["steps_factor"], plan["tokens_factor"]
        text = f"critical batch size {plan['critical_batch_size']:,.0f}: this batch takes {steps:.2f} times the fewest"
        terminal.print(f"{text} steps and {tokens:.2f} times the fewest tokens to a loss")
        terminal.print_table(plain_table(SIZES, map(_size, plan["batch_sizes"]), words=0, gap=2))


def _cut(c: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(str(c[key]) for key in ("dp", "micro_batch_size", "accumulation", "gpus")),
        allocated_reserved(c["peak_memory_bytes"], c["peak_reserved_bytes"]),
        "✓ fits" if c["fits_in_memory"] else "✗ too big",
        seconds(c["step_time_s"]),
        count(c["tokens_per_s_per_gpu"]),
    )


def _size(s: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{s['global_batch_size']:,}",
        str(s["accumulation"]),
        seconds(s["step_time_s"]),
        f"{s['steps_factor']:.2f}",
        f"{s['tokens_factor']:.2f}",
        seconds(s["time_s"]),
    )
