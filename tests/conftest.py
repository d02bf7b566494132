"""What every test relies on, and which lane it runs in.

`pytest` runs the quick lane, `pytest -m "slow or not slow"` all tests. A test is slow because of what it must do: start
processes, ranks or a browser; run torch; go through all that is shipped; or draw many random programs. So all tests in
`SLOW` folders are slow but for the module `test_quick.py` of each, which does such a thing once; elsewhere
`@pytest.mark.slow` marks them.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings

SLOW = [Path(__file__).with_name(name) for name in ("browser", "calibrate", "docs", "fuzz", "real")]
GATE, ROOM = Path(__file__), Path(__file__).with_name("__init__.py")  # locks between workers; nobody writes them

# The same examples each time, so that a change fails by its own fault; `--hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
# Hypothesis also draws constants out of the project's modules imported so far, that is, of the tests that ran before.
with suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers.is_local_module_file = lambda path: False


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start also where this run itself is in the background, for which shells ignore it.

    Commands print as wide as in a pipe; a worker of xdist would tell them the width of its terminal.
    """
    os.environ.pop("COLUMNS", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick lane imports no module of slow tests: that takes as long as many tests."""
    quick = config.option.markexpr == "not slow"
    return True if quick and collection_path.suffix == ".py" and _in_slow_folder(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Timed tests come last: while one runs, no other worker has anything to do."""
    for item in items:
        if _in_slow_folder(item.path):
            item.add_marker(pytest.mark.slow)
    items.sort(key=_is_timed)


def _in_slow_folder(path: Path) -> bool:
    return path.name != "test_quick.py" and any(folder in path.parents for folder in SLOW)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With several workers (`-n 2`), a timed test has the machine to itself, fixtures included.

    A command that ran in this process has frozen all that lives, as for the process's end (`one_command`). Simulations
    after it would search for garbage each time.
    """
    gc.unfreeze()
    with _turn(alone=_is_timed(item)):
        return (yield)


def _is_timed(item: pytest.Item) -> bool:
    return item.get_closest_marker("timed") is not None


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
