"""A table of published measurements after all its rows were predicted: errors, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from sim.core.units import counted
from sim.inputs.yaml_input import one_line
from sim.validation.records import Table
from sim.validation.statistics import Error, Verdict, as_dict, by_group

# Why a row of a run is suspect: an offload or a recomputation that the row leaves out, or a wrong prediction.
TOO_LARGE = "ran, and is predicted not to fit: the row leaves something out, or the memory is predicted wrongly"


MOST_KEYS = 12  # of a table's rows that nothing reads, which a message names


class Outcome(Struct, frozen=True):
    """The outcome of one row: its errors and verdicts, or why there are none (`refused`: by a fault, else by design).
    `missing`: measured keys beside these that nothing predicts; `meant`: for those that look mistyped, a question.
    `too_large`: it ran, and its predicted peak is more than the GPU's memory. `unread`: the row's keys that nothing
    reads."""

    table: int
    id: str
    errors: tuple[Error, ...]
    refused: bool = False
    reason: str = ""
    missing: tuple[str, ...] = ()
    meant: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    too_large: bool = False
    unread: tuple[str, ...] = ()


class Validation(Struct, frozen=True):
    """A table and what became of its rows, in order."""

    table: Table
    outcomes: tuple[Outcome, ...]

    @property
    def errors(self) -> list[Error]:
        return [e for o in self.outcomes for e in o.errors]

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for o in self.outcomes for v in o.verdicts]

    def left_out(self, refused: bool) -> list[Outcome]:
        return [o for o in self.outcomes if o.reason and o.refused == refused]

    @property
    def mistyped(self) -> list[str]:
        """A message for each measured key that nothing predicts and that looks like one that is predicted."""
        where = self.table.path
        return [
            f"{where}: row {o.id}: measured.{key}: found no such quantity, so it is left out{said}"
            for o in self.outcomes
            for key, said in o.meant.items()
        ]

    @property
    def unread(self) -> Mapping[str, int]:
        """Keys of rows that nothing reads, and of how many rows."""
        return Counter([key for o in self.outcomes for key in o.unread])

    @property
    def not_read(self) -> list[str]:
        """A message that names them, if there are any."""
        keys = [f"{one_line(key)} ({counted(rows, 'row')})" for key, rows in self.unread.items()]
        more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
        named = ", ".join(keys[:MOST_KEYS])
        return [f"{self.table.path}: keys of rows that nothing here reads: {named}{more}"] if keys else []

    def as_dict(self) -> dict[str, Any]:
        """One entry of `tables` in format sim-validate/1."""
        found: list[Error | Verdict] = [*self.errors, *self.verdicts]
        return {
            "name": self.table.name,
            "title": self.table.title,
            "kind": self.table.kind,
            "rows": len(self.outcomes),
            "simulated": sum(not o.reason for o in self.outcomes),
            "failed": [{"id": o.id, "reason": o.reason} for o in self.left_out(True)],
            "not_simulated": [{"id": o.id, "reason": o.reason} for o in self.left_out(False)],
            "not_believed": [{"id": r.id, "reason": r.not_believed} for r in self.table.rows if r.not_believed],
            "not_fitting": [{"id": o.id, "reason": TOO_LARGE} for o in self.outcomes if o.too_large],
            "not_predicted": [{"id": o.id, "keys": list(o.missing)} for o in self.outcomes if o.missing],
            "not_read": dict(self.unread),
            "groups": by_group(found),
            "errors": [as_dict(e) for e in found],
        }
