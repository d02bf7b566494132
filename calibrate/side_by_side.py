"""Shows a profile's unfused and fused kernels side by side.

    python -m calibrate.side_by_side PROFILE.json [--markdown] [--svg FILE]

`calibrate.run` prints the same table when it has measured attention or fused kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from sim.commands.command import Command, run_command
from sim.commands.files_named import FILE, OUTPUT
from sim.core.errors import InputError
from sim.core.files import write_text
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

UNFUSED = ("unfused", "eager")
_CHAIN = re.compile(r"elementwise:(\w+)_(eager|compiled|liger)(_backward)?")
_LOSS = re.compile(r"(linear_cross_entropy):(\w+?)(_backward)?")
_ATTENTION = re.compile(r"(attention)_(unfused_)?(forward|backward)(?::(\w+))?")


class KernelTiming(NamedTuple):
    """One implementation of one kernel. `peak_bytes` is known for losses only; it is NaN if it was not measured."""

    what: str
    dtype: str
    size: str
    how: str
    forward_s: float
    backward_s: float
    peak_bytes: float = math.nan

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def rows_of(profile: Profile) -> list[KernelTiming]:
    """Return all implementations of each kernel that was measured in more than one, the unfused one first."""
    found: dict[tuple[str, str, tuple[int, ...]], dict[str, dict[bool, float]]] = {}
    for table in profile.points:
        way = _way(table)
        if way is None:
            continue
        what, how, backward = way
        for shape, seconds in zip(table.shapes.tolist(), table.seconds.tolist(), strict=True):
            found.setdefault((what, table.dtype, tuple(shape)), {}).setdefault(how, {})[backward] = seconds
    rows = []
    for (what, dtype, shape), ways in found.items():
        if len(ways) < 2 or not set(ways) & set(UNFUSED):
            continue
        for how in sorted(ways, key=lambda how: (how not in UNFUSED, how)):
            forward_s, backward_s = (ways[how].get(backward, math.nan) for backward in (False, True))
            peak = profile.coefficients.peak_bytes.get(f"{what}:{how} {dtype} {'x'.join(map(str, shape))}", math.nan)
            rows.append(KernelTiming(what, dtype, _size(what, shape), how, forward_s, backward_s, peak))
    return rows


def _way(table: PointTable) -> tuple[str, str, bool] | None:
    """Return a table's kernel, implementation, and whether it is the backward; None for other tables."""
    if match := _ATTENTION.fullmatch(table.op):
        return "attention", "unfused" if match[2] else match[4] or "torch's choice", match[3] == "backward"
    match = _CHAIN.fullmatch(table.op) or _LOSS.fullmatch(table.op)
    return (match[1], match[2], match[3] is not None) if match else None


def _size(what: str, shape: tuple[int, ...]) -> str:
    if what == "attention":
        batch, heads, kv_heads, seq, _, width, *_ = shape
        grouped = f"/{kv_heads}" if kv_heads != heads else ""
        return f"b={batch} h={heads}{grouped} s={seq} d={width}"
    if what == "linear_cross_entropy":
        return "s={} v={} h={}".format(*shape)
    return f"{shape[0] / 2**20:g} MiB"


def cells(rows: Sequence[KernelTiming]) -> list[tuple[str, ...]]:
    """Return the table's text: kernel, dtype, size, implementation, forward, backward, speedup, peak memory."""
    out: list[tuple[str, ...]] = []
    base = math.nan
    for r in rows:
        base = r.seconds if r.how in UNFUSED else base
        times = "" if r.how in UNFUSED or math.isnan(r.seconds) else f"{base / r.seconds:.2f}×"
        peak = "" if math.isnan(r.peak_bytes) else f"{r.peak_bytes / 2**20:.1f} MiB"
        out.append((r.what.replace("_", " "), r.dtype, r.size, r.how, _ms(r.forward_s), _ms(r.backward_s), times, peak))
    return out


def _ms(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{seconds * 1e3:.3g} ms"


HEAD = ("kernel", "dtype", "size", "", "forward", "backward", "speed", "peak memory")


def print_rows(rows: Sequence[KernelTiming]) -> None:
    """Print the table on the terminal."""
    standard_output(PIPED_WIDTH).print_table(plain_table(HEAD, cells(rows), words=4, gap=2))


def markdown(rows: Sequence[KernelTiming]) -> str:
    """Return the table as Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *cells(rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


BAR, LINE, LEFT, WIDTH = 12, 17, 330, 820


def svg(rows: Sequence[KernelTiming]) -> str:
    """Return bars of forward and backward for each implementation, relative to the unfused one's sum."""
    parts, y, base = [], 28, 1.0
    group = ("", "", "")
    for r in rows:
        if r.how in UNFUSED:
            base = r.seconds
        if (r.what, r.dtype, r.size) != group:
            group = (r.what, r.dtype, r.size)
            y += 8
        scale = (WIDTH - LEFT - 90) / 1.6 / base
        first, second = (0.0 if math.isnan(s) else s * scale for s in (r.forward_s, r.backward_s))
        label = f"{r.what.replace('_', ' ')} {r.dtype}, {r.size}: {r.how}"
        parts.append(f'<text x="{LEFT - 6}" y="{y + BAR - 2}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{first:.1f}" height="{BAR}" fill="#0072b2"/>')
        parts.append(f'<rect x="{LEFT + first:.1f}" y="{y}" width="{second:.1f}" height="{BAR}" fill="#009e73"/>')
        parts.append(f'<text x="{LEFT + first + second + 5:.1f}" y="{y + BAR - 2}">{_ms(r.seconds)}</text>')
        y += LINE
    space, font = 'xmlns="http://www.w3.org/2000/svg"', 'font-family="system-ui, sans-serif" font-size="11"'
    head = f'<svg {space} viewBox="0 0 {WIDTH} {y + 8}" {font}><rect width="{WIDTH}" height="{y + 8}" fill="#ffffff"/>'
    forward, backward = '<tspan fill="#0072b2">■ forward</tspan>', '<tspan fill="#009e73">■ backward</tspan>'
    key = f'<text x="{LEFT}" y="18">{forward} {backward}, relative to the unfused one</text>'
    return "\n".join([head, key, *parts, "</svg>"]) + "\n"


@click.command("side-by-side", cls=Command)
@click.argument("profile", type=FILE, metavar="PROFILE.json")
@click.option("--markdown", "as_markdown", is_flag=True, help="print a Markdown table")
@click.option("--svg", "picture", type=OUTPUT, metavar="FILE", help="write a bar chart")
def main(profile: Path, as_markdown: bool, picture: Path | None) -> None:
    """Show unfused and fused kernels of PROFILE.json side by side."""
    rows = rows_of(load_profile(str(profile)))
    if not rows:
        raise InputError(
            f"{profile}: has no kernel both unfused and fused; run calibrate.run with --only attention --only fused"
        )
    if as_markdown:
        print(markdown(rows), end="")
    else:
        print_rows(rows)
    if picture is not None:
        write_text(str(picture), svg(rows))


if __name__ == "__main__":
    run_command(main)
