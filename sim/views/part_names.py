"""What parts of a model are called on pages and in terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.program import Part

if TYPE_CHECKING:
    from sim.results.operator_times import PartTime

_NAMES = {
    Part.MLP: "MLP",
    Part.NORM: "norms",
    Part.HEAD: "head and loss",
    Part.LAYER: "layers, parts not told apart",
    Part.HOST: "waiting for the host",
}


def part_name(row: PartTime) -> str:
    """Of a row of `sim.results.operator_times.time_by_part`; communication has its group before it."""
    name = _NAMES.get(Part(row.part), row.part)
    return f"{row.group} {name}" if row.group else name
