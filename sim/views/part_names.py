"""Names of a model's parts on pages and in terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.program import ModelPart

if TYPE_CHECKING:
    from sim.results.operator_times import PartTime

_NAMES: dict[str, str] = {
    ModelPart.MLP: "MLP",
    ModelPart.NORM: "norms",
    ModelPart.HEAD: "head and loss",
    ModelPart.LAYER: "layers, not split into parts",
    ModelPart.HOST: "waiting for the host",
}


def part_name(row: PartTime) -> str:
    """Return the name of a row of `sim.results.operator_times.time_by_part`; that of communication begins with its
    group."""
    name = named_part(row.part)
    return f"{row.group} {name}" if row.group else name


def named_part(part: str) -> str:
    """Return the name of a part by its key in results; another text comes back as it is.

    >>> named_part("norm"), named_part("tp communication")
    ('norms', 'tp communication')
    """
    return _NAMES.get(part, part)
