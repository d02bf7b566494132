"""Whatever a file holds: it is read, or refused with one InputError; no other exception, no hang.

A few hundred files by default; STEPSIM_FUZZ=10000 tries so many for each loader and way. A file that broke something
is left in tests/fuzz/corpus, named after its loader; what lies there is tried first, always.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from sim.errors import InputError
from tests.fuzz.breaking import break_bytes, break_tree
from tests.fuzz.loaders import LOADERS, seeds

COUNT = int(os.environ.get("STEPSIM_FUZZ", "40"))
PATIENCE_S = 20  # of one file, on a busy machine
MEMORY_BYTES = 2**30
CORPUS = Path(__file__).parent / "corpus"


@contextmanager
def patience() -> Iterator[None]:
    """Raise in whatever runs longer than `PATIENCE_S`."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"ran for more than {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(name: str, path: Path) -> bool:
    """Use a file; True if it was accepted."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with patience():
            LOADERS[name].use(path)
    except InputError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 2000, f"a message of {len(message)} characters"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_BYTES, f"took {grown} bytes"
    return not message


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
