"""Tell how far predictions are from measurements: statistics of relative errors, in all and by group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct


class Quantity(Struct, frozen=True):
    """The quantity that a prediction of one row is about."""

    id: str
    group: str
    quantity: str


class Error(Quantity, frozen=True):
    """One predicted quantity of one row; `error` is predicted ÷ measured − 1. `key`: the row's, with its unit."""

    key: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool:
        """Tell whether the measured value lies in the 90 % interval."""
        return self.low <= self.measured <= self.high

    @property
    def interval(self) -> list[float]:
        """The 90 % interval."""
        return [self.low, self.high]


class Verdict(Quantity, frozen=True):
    """A predicted yes or no of one row, such as whether it fits in memory."""

    predicted: bool
    measured: bool

    @property
    def error(self) -> float:
        """0 where both agree, 1 for a wrong yes and -1 for a wrong no."""
        return float(self.predicted) - float(self.measured)


ENTRY = ("id", "group", "quantity", "predicted", "measured", "error")


def as_dict(found: Error | Verdict) -> dict[str, Any]:
    """One entry of `errors` in the JSON; a verdict has no interval."""
    interval = found.interval if isinstance(found, Error) else None
    return {**{key: getattr(found, key) for key in ENTRY}, "interval": interval}


def accuracy(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of right answers, and how many of the wrong ones said yes (`wrong_true`) or no (`wrong_false`)."""
    wrong = [v for v in verdicts if v.predicted != v.measured]
    yes = sum(v.predicted for v in wrong)
    return {
        "rows": len(verdicts),
        "accuracy": 1.0 - len(wrong) / len(verdicts),
        "wrong_true": yes,
        "wrong_false": len(wrong) - yes,
    }


def summary(errors: Sequence[Error]) -> dict[str, float]:
    """Statistics of one quantity's errors, as fractions.

    `mean_abs_by_group` is the mean over groups of each group's mean absolute error, which is what counts where
    rows of a group are multiples of one another. `rows`: how many measured the quantity. `interval_width`: median of
    (high − low) / predicted.
    """
    found = np.array([e.error for e in errors])
    off = np.abs(found)
    groups: dict[str, list[float]] = {}
    for e in errors:
        groups.setdefault(e.group, []).append(abs(e.error))
    return {
        "rows": len(errors),
        "mean_abs": float(off.mean()),
        "median_abs": float(np.median(off)),
        "p95_abs": float(np.quantile(off, 0.95)),
        "max_abs": float(off.max()),
        "bias": float(found.mean()),
        "mean_abs_by_group": float(np.mean([np.mean(g) for g in groups.values()])),
        "inside_interval": float(np.mean([e.inside for e in errors])),
        "interval_width": float(np.median([(e.high - e.low) / e.predicted for e in errors])),
    }


def by_group(found: Iterable[Error | Verdict]) -> list[dict[str, Any]]:
    """The group `all` first, then every group by name: rows, and a summary of each quantity."""
    groups: dict[str, list[Error | Verdict]] = {"all": list(found)}
    for e in sorted(groups["all"], key=lambda e: e.group):
        groups.setdefault(e.group if e.group != "all" else "all rows", []).append(e)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: Sequence[Error | Verdict]) -> dict[str, Any]:
    out: dict[str, Any] = {"group": name, "rows": len({e.id for e in members})}
    for quantity in dict.fromkeys(e.quantity for e in members):
        errors = [e for e in members if isinstance(e, Error) and e.quantity == quantity]
        verdicts = [e for e in members if isinstance(e, Verdict) and e.quantity == quantity]
        out[quantity] = summary(errors) if errors else accuracy(verdicts)
    return out
