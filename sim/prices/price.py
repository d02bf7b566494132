"""Hold the price of one item of a program, and combine host and device times."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.core.program import Comm, Compute
from topology.collectives import Choice

# How evenly host and device work: the exponent of `together_s`. It was chosen by judgement after the errors of
# `vtrain_single_node` had been seen, where both take about equally long. So that table is no independent test of it
# (docs/accuracy.md). The host's coefficients of the A100 were fitted to a fifth of that table with it in place.
UNEVEN = 4.0


class Priced(NamedTuple):
    """Hold the seconds of one item, their source, and their relative standard deviation.

    `host_s`: the host's time for issuing it; the device waits if the host is late. `slows`: the part by which a
    computation takes longer while this communication, which occupies multiprocessors, runs beside it.
    """

    seconds: float
    source: str
    uncertainty: float
    choice: Choice | None = None  # algorithm and protocol of a collective whose seconds come from the links
    bus_bandwidth_bytes_per_s: float = 0.0
    host_s: float = 0.0
    slows: float = 0.0


Price = Callable[[Compute | Comm], Priced]


def together_s(host_s: float, device_s: float) -> float:
    """Return the seconds of work that the host issues in `host_s` while the device executes it in `device_s`.

    The result is (h^p + d^p)^(1/p) with p = `UNEVEN`: nearly the larger of the two, and a fifth more if both are equal,
    because neither works evenly and each sometimes waits for the other.

    >>> together_s(0.0, 3.0), round(together_s(1.0, 1.0), 2)
    (3.0, 1.19)
    """
    # The norm's limit; the quotient below would divide by zero.
    if host_s <= 0 or device_s <= 0:
        return device_s + host_s
    # Powers of the quotient, which is at most 1, keep all digits; powers of seconds (some 1e-6) would lose some.
    small, large = (host_s, device_s) if host_s < device_s else (device_s, host_s)
    return float(large * (1.0 + (small / large) ** UNEVEN) ** (1.0 / UNEVEN))
