"""Facts of the normal distribution that turn spreads into uncertainties and intervals."""

from __future__ import annotations

import math

SIGMA_PER_MAD = 1.4826  # standard deviations in a median absolute deviation
NINETY_PERCENT = 1.645  # standard deviations on each side that hold 90 % of the values
NINETY_BY_MEAN = 2.06  # means of |error| on each side that hold 90 % of the errors


def student_by_normal(degrees: float) -> float:
    """Return Student's t quantile of 95 % with `degrees` of freedom ÷ the normal one; within 2 % from 2 degrees on.

    A spread that comes from few values may be too small by chance, so an interval made of it has to be wider. The
    expansion is that of Abramowitz and Stegun, 26.7.5.

    >>> [round(NINETY_PERCENT * student_by_normal(n), 3) for n in (3, 5, 10)]  # 2.353, 2.015, 1.812
    [2.347, 2.015, 1.813]
    """
    z = NINETY_PERCENT
    terms = (
        (z**2 + 1) / 4,
        (5 * z**4 + 16 * z**2 + 3) / 96,
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384,
    )
    return 1.0 + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))


def normal_quantile(p: float) -> float:
    """Solve P(x <= q) = p for q, with p from 0.5 to below 1, by Newton's method.

    From 0 it rises to q and never steps over it, for the distribution function is concave there.
    `statistics.NormalDist` would do; its import takes longer than a small step takes to simulate, and its last
    digits differ.

    >>> round(normal_quantile(0.975), 12)
    1.95996398454
    """
    x, step = 0.0, 1.0
    while step > 1e-12:
        density = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        step = (p - 0.5 * math.erfc(-x / math.sqrt(2.0))) / density
        x += step
    return x
