"""Fit an engine's host seconds to measurements: the rule for published tables and for running engines alike.

The fit minimizes squares of log(predicted ÷ measured) over all measured quantities; errors beyond 10 % count linearly.
The first of every two rows is fitted. The deviation on the others is the `uncertainty` of the seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from sim.variants.engines import ENGINES
from sim.variants.engines.record import Engine

Values = NDArray[np.float64]
Row = TypeVar("Row")
LEAST, MOST = -9.0, 3.0  # powers of e by which a constant may differ from where the fit starts
NORMAL = float(np.sqrt(np.pi / 2))  # of a normal distribution: standard deviation by mean absolute error


@contextmanager
def tried(record: Engine) -> Iterator[None]:
    """Let scenarios that name this record's engine be simulated with this record."""
    before = ENGINES.get(record.name)
    ENGINES[record.name] = record
    try:
        yield
    finally:
        if before is None:
            del ENGINES[record.name]
        else:
            ENGINES[record.name] = before


def every_second(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to fit, and rows to judge on."""
    return list(rows[::2]), list(rows[1::2])


def solve(start: Mapping[str, float], errors: Callable[[Values], Values], most_steps: int = 12) -> Values:
    """Return the constants that fit best; `errors` of constants: log(predicted ÷ measured) of every quantity."""
    first: Values = np.log(list(start.values()))

    def errors_at(powers: Values) -> Values:
        return errors(np.exp(powers))

    found = least_squares(
        errors_at,
        first,
        bounds=(first + LEAST, first + MOST),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=np.full(len(first), 0.02),
        max_nfev=most_steps,
    )
    constants: Values = np.exp(found.x)
    return constants


def deviation(errors: Values) -> float:
    """The standard deviation of a normal distribution with these errors' mean size: a few rows at saturation would
    decide a root mean square."""
    return NORMAL * float(np.abs(errors).mean())


def spread_words(errors: Values) -> str:
    """Mean, median and deviation of errors in words."""
    size = np.abs(np.expm1(errors))
    return f"mean {size.mean():.1%}, median {np.median(size):.1%}, deviation {deviation(errors):.1%}"
