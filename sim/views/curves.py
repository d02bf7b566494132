"""Memory over time as the plain columns that plots take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.results.memory import MemoryCurve, thinned
from sim.views.palette import MEMORY


def fullest(memory: Sequence[MemoryCurve]) -> int:
    """Return the index of the curve with the highest peak."""
    return max(range(len(memory)), key=lambda i: float(memory[i].total.max()))


def curve_columns(curve: MemoryCurve, end_s: float, points: int) -> dict[str, list[float] | list[int]]:
    """`time`, up to `end_s` at least, and whole bytes of each category; of more than about `points` those are kept
    where the total is highest."""
    keep = np.union1d(thinned(curve.total, points), [len(curve.time_s) - 1])
    time_s = curve.time_s[keep].tolist()
    columns = {c: getattr(curve, c)[keep].round().astype(np.int64).tolist() for c in MEMORY}
    return {"time": [*time_s, max(end_s, time_s[-1])], **{c: [*values, values[-1]] for c, values in columns.items()}}
