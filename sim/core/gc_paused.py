"""Pause Python's garbage collector, whose searches slow large steps and short commands."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 500_000
COUNTS_LEAKS = "triton"  # its extension (nanobind) lists on standard error what still lives at exit


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would scan tens of thousands of small live tuples again and again.

    What is alive at the end is moved to the oldest generation, or else the next allocation would scan all of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def rare_collection() -> Iterator[None]:
    """Garbage collection after `OBJECTS` new ones only: for work that repeats, and drops nearly all that it makes.

    After `no_collection` the next object starts a collection each time, a third of the time of a small step.
    """
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def one_command() -> Iterator[None]:
    """Collect garbage rarely while one command runs, and not at exit: else a quarter of a short command's time.

    Loading its modules makes 200,000 objects that stay, so collections are rare from the beginning. At the end Python
    would search all that lives for garbage once more, though the process gives back its memory anyway: what is frozen
    is not searched. With a package that counts leaks Python does search.
    """
    with rare_collection():
        try:
            yield
        finally:
            if COUNTS_LEAKS not in sys.modules:
                gc.freeze()
