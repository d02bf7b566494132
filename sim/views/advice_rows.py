"""Changes that were tried, as rows of a table: what to set, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.units import allocated_reserved, change_s, percent, seconds
from sim.results.fit import EVEN, SURE

if TYPE_CHECKING:
    from sim.studies.advice import Tried

ADVICE_HEAD = ("--set", "Step", "Change", "In %", "Peak/reserved", "Fits")  # short: so that a schedule's name has room

ADVICE_NOTE = (
    f"A change that does not help, or that fits with odds below {100 * EVEN:.0f} %, is left out; ✓: odds of "
    f"{100 * SURE:.0f} % or more."
)


def advice_rows(tried: Sequence[Tried]) -> list[tuple[str, ...]]:
    """The overrides that make the change; the step with it, what that gains, its memory, and the odds that it fits."""
    return [
        (
            " ".join(t.changes),
            seconds(t.step_time_s),
            change_s(-t.gain_s),
            f"{_sign(t)}{percent(abs(t.gain))}",
            allocated_reserved(t.peak_memory_bytes, t.peak_reserved_bytes),
            "✓" if t.fit_odds >= SURE else f"{100 * t.fit_odds:.0f} %",
        )
        for t in tried
    ]


def _sign(t: Tried) -> str:
    """Return the sign of the change of the step's time: a gain makes it less."""
    return "" if t.gain_s == 0 else "−" if t.gain_s > 0 else "+"
