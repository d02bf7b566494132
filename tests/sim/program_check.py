"""The form that every program has; what breaks it is a mistake in the code that wrote the program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from sim.core.program import BLOCK_END, Comm, Compute, Item, Phase

# A full backward mixes the gradients' two halves, so they stand at the same place.
_ORDER = {Phase.FORWARD: 0, Phase.INPUT_GRAD: 1, Phase.WEIGHT_GRAD: 1, Phase.OPTIMIZER: 2}


def check(program: Iterable[Item], started: Set[str] = frozenset()) -> frozenset[str]:
    """Check what one action executes; return the handles of its communications that nothing here waits for.

    `started`: handles of asynchronous communications that earlier actions of the step have left. Each may be waited for
    once; what nobody waits for ends with the step, such as the reduction of each micro-batch's gradients.

    Raises:
        ValueError: for bytes or flops that are negative or not finite; a computation after one of a later phase; a
            handle that is given twice before it is waited for, or waited for without a start; a communication that
            waits (`after`) for one that has not started here.
    """
    open_, phase = set(started), Phase.FORWARD
    own: set[str] = set()
    for place, item in enumerate(program):
        if item is BLOCK_END:
            continue
        where = f"item {place}, {item}"
        if isinstance(item, Compute):
            _check_amounts(where, item.bytes, item.flops, item.kernels, *item.shape)
            if _ORDER[item.phase] < _ORDER[phase]:
                raise ValueError(f"{where}: {item.phase} after {phase}")
            phase = item.phase
        elif isinstance(item, Comm):
            _check_comm(where, item, open_, own)
            if not item.blocking:
                open_.add(item.handle)
                own.add(item.handle)
        elif item.handle in open_:
            open_.remove(item.handle)
        else:
            raise ValueError(f"{where}: nothing of this handle has been started that is not waited for already")
    return frozenset(open_)


def _check_comm(where: str, item: Comm, open_: Set[str], own: Set[str]) -> None:
    _check_amounts(where, item.bytes)
    if item.blocking == bool(item.handle):
        raise ValueError(f"{where}: an asynchronous communication needs a handle, a blocking one has none")
    if item.handle in own & open_:
        raise ValueError(f"{where}: one of this handle is not waited for yet")
    if item.after and item.after not in own & open_:
        raise ValueError(f"{where}: comes after {item.after!r}, which this program has not started")


def _check_amounts(where: str, *amounts: float) -> None:
    for amount in amounts:
        if not math.isfinite(amount) or amount < 0:
            raise ValueError(f"{where}: found {amount}; must be a number that is not negative")
