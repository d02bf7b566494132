"""The price of one item of a program, and how host and device share the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.core.program import Comm, Compute
from topology.collectives import Choice

UNEVEN = 4.0  # chosen with vTrain's single-node steps in view, where host and device take about as long


class Priced(NamedTuple):
    """Seconds of one item, where they come from, and the relative standard deviation of that figure.

    `host_s`: what the host needs to issue it; the device waits where the host is late. `slows`: by how much of itself
    a computation takes longer while this communication runs beside it (it occupies multiprocessors).
    """

    seconds: float
    source: str
    uncertainty: float
    choice: Choice | None = None  # of a collective whose seconds come from the links
    bus_bandwidth_bytes_per_s: float = 0.0
    host_s: float = 0.0
    slows: float = 0.0


Price = Callable[[Compute | Comm], Priced]


def together_s(host_s: float, device_s: float) -> float:
    """Seconds of work that the host issues in `host_s` and the device executes in `device_s`, both at once.

    The larger of the two, and more where they are close: neither issues nor executes evenly, and what one waits for
    the other is lost. (h^p + d^p)^(1/p) with p = `UNEVEN`, a fifth more than the larger where both are equal.

    >>> together_s(0.0, 3.0), round(together_s(1.0, 1.0), 2)
    (3.0, 1.19)
    """
    # The norm's limit, taken apart because the quotient below would divide by zero.
    if host_s <= 0 or device_s <= 0:
        return device_s + host_s
    # The quotient of the two stays at most 1. Powers of seconds themselves, some 1e-6, would lose digits.
    small, large = (host_s, device_s) if host_s < device_s else (device_s, host_s)
    return float(large * (1.0 + (small / large) ** UNEVEN) ** (1.0 / UNEVEN))
