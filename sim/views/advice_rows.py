"""Changes that were tried, as rows of a table: what to set, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.units import change_s, n_bytes, percent, seconds

if TYPE_CHECKING:
    from sim.studies.advice import Tried

ADVICE_HEAD = ("--set", "Step", "Change", "In %", "Peak")  # short: a line has room for a schedule's name


def advice_rows(tried: Sequence[Tried]) -> list[tuple[str, ...]]:
    """The overrides that make the change; the step with it, what that gains, and its memory."""
    return [
        (
            " ".join(t.changes),
            seconds(t.step_time_s),
            change_s(-t.gain_s),
            f"{_sign(t)}{percent(abs(t.gain))}",
            n_bytes(t.peak_memory_bytes),
        )
        for t in tried
    ]


def _sign(t: Tried) -> str:
    """Return the sign of the change of the step's time: a gain makes it less."""
    return "" if t.gain_s == 0 else "−" if t.gain_s > 0 else "+"
