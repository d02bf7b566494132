"""What every test relies on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings

GATE, ROOM = Path(__file__), Path(__file__).with_name("__init__.py")  # locks between workers; nobody writes them

# The same examples each time, so that a change fails by its own fault; `--hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
# Hypothesis also draws constants out of the project's modules imported so far, that is, of the tests that ran before.
with suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers.is_local_module_file = lambda path: False


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start also where this run itself is in the background, for which shells ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real runs come last: while one runs, no other worker has anything to do."""
    items.sort(key=_is_real)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With several workers (`-n 2`), real runs have the machine to themselves, fixtures included: they are timed.

    A command that ran in this process has frozen all that lives, as for the process's end (`one_command`). Simulations
    after it would search for garbage each time.
    """
    gc.unfreeze()
    with _turn(alone=_is_real(item)):
        return (yield)


def _is_real(item: pytest.Item) -> bool:
    return item.get_closest_marker("real") is not None


@contextmanager
def _turn(alone: bool) -> Iterator[None]:
    """Beside others, or alone among the workers of this run. Who waits to be alone closes the gate to the others."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    import fcntl

    with GATE.open() as gate, ROOM.open() as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)
