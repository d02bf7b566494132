"""Whatever a file holds: it is read, or refused with one InputError; no other exception, no hang, no gigabyte, and
nothing run, written or asked of the network.

A few hundred files by default; STEPSIM_FUZZ=10000 tries so many for each loader and way. A file that broke something
is left in tests/fuzz/corpus, named after its loader; what lies there is tried first, always.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from sim.core.errors import InputError
from tests.fuzz.breaking import break_bytes, break_tree
from tests.fuzz.loaders import LOADERS, seeds

COUNT = int(os.environ.get("STEPSIM_FUZZ", "40"))
PATIENCE_S = 20.0  # of one file, on a busy machine
MEMORY_BYTES = 2**30
CORPUS = Path(__file__).parent / "corpus"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# What a loader has no business with, as Python's audit events.
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.",
    "pickle.find_class",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "shutil.",
    "ctypes.",
    "webbrowser.",
    "urllib.",
)
_watched = threading.local()


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not getattr(_watched, "on", False):
        return
    written = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if written or event.startswith(FORBIDDEN):
        raise AssertionError(f"a loader asks for {event}{arguments}")


sys.dont_write_bytecode = True  # of modules that a loader imports late: Python itself would write a file
sys.addaudithook(_audit)


@contextmanager
def guard(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Raise in whatever runs for longer, takes more than `MEMORY_BYTES` more (on Linux), or leaves its own file."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"ran for more than {patience_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, patience_s)
    _watched.on = True
    try:
        yield
    finally:
        _watched.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def attempt(name: str, path: Path) -> bool:
    """Use a file; True if it was accepted."""
    try:
        with guard():
            LOADERS[name].use(path)
    except InputError as error:
        message = str(error)
        assert 0 < len(message) < 2000, f"a message of {len(message)} characters"
        return False
    return True


def check(name: str, data: bytes, path: Path) -> None:
    """Use a file that is made of `data`; keep it if it breaks something."""
    path.unlink(missing_ok=True)  # ext4 flushes a file that is cut and written again: six times as slow
    path.write_bytes(data)
    try:
        attempt(name, path)
    except BaseException:
        CORPUS.mkdir(exist_ok=True)
        kept = CORPUS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}{LOADERS[name].suffix}"
        kept.write_bytes(data)
        raise


@pytest.mark.parametrize("name", LOADERS)
def test_files_to_start_from_are_valid(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{LOADERS[name].suffix}"
    for data in seeds(name):
        path.write_bytes(data)
        assert attempt(name, path)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()) if CORPUS.is_dir() else [], ids=lambda p: p.name)
def test_what_once_broke(path: Path) -> None:
    attempt(path.name.partition("-")[0], path)


@pytest.mark.parametrize("name", LOADERS)
def test_files_with_broken_bytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{LOADERS[name].suffix}"
    for number in range(COUNT):
        dice = random.Random(f"{name} bytes {number}")
        check(name, break_bytes(dice.choice(seeds(name)), dice), path)


@pytest.mark.parametrize("name", [name for name, loader in LOADERS.items() if loader.json])
def test_documents_with_broken_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{LOADERS[name].suffix}"
    trees = [json.loads(data) for data in seeds(name)]
    for number in range(COUNT):
        dice = random.Random(f"{name} values {number}")
        check(name, json.dumps(break_tree(dice.choice(trees), dice)).encode(), path)


def _hang() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("deed", "problem"),
    [
        (_hang, TimeoutError),
        (lambda: os.system("true"), AssertionError),
        (lambda: Path("x").write_text(""), AssertionError),
        (lambda: pickle.loads(b"cos\nsystem\n(S'true'\ntR."), AssertionError),
        (lambda: socket.create_connection(("127.0.0.1", 9)), AssertionError),
        pytest.param(lambda: bytearray(2 * MEMORY_BYTES), MemoryError, marks=LINUX),
    ],
)
def test_the_guard_sees_what_no_loader_may_do(deed: Callable[[], object], problem: type[BaseException]) -> None:
    with pytest.raises(problem), guard(0.2):
        deed()
