"""Garbage collection, which large steps do without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 500_000


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection meanwhile: ten thousands of small live tuples would be searched again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
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
