"""Changes that were tried, as rows of a table: what to set, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.units import allocated_reserved, change_s, percent, seconds
from sim.results.fit import SURE

if TYPE_CHECKING:
    from sim.studies.advice import Tried

ADVICE_HEAD = ("--set", "Step", "Change", "In %", "Peak / reserved")  # short: a line has room for a schedule's name


def advice_rows(tried: Sequence[Tried]) -> list[tuple[str, ...]]:
    """The overrides that make the change; the step with it, what that gains, and its memory."""
    return [
        (
            " ".join(t.changes),
            seconds(t.step_time_s),
            change_s(-t.gain_s),
            f"{_sign(t)}{percent(abs(t.gain))}",
            allocated_reserved(t.peak_memory_bytes, t.peak_reserved_bytes) + odds_words(t.fit_odds),
        )
        for t in tried
    ]


def odds_words(odds: float) -> str:
    """Say that a layout is tight, and with which odds it fits; nothing of one that surely does.

    >>> odds_words(0.71), odds_words(0.99)
    (', tight 71 %', '')
    """
    return "" if odds >= SURE else f", tight {100 * odds:.0f} %"


def _sign(t: Tried) -> str:
    """Return the sign of the change of the step's time: a gain makes it less."""
    return "" if t.gain_s == 0 else "−" if t.gain_s > 0 else "+"
