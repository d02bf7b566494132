"""Trace files that are large, or say so: limits hold before memory is taken."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.traces import files


def test_a_gzip_bomb_is_refused_early(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b"[" + b"0," * 60_000_000 + b"0]"))
    assert bomb.stat().st_size < 2**18
    tracemalloc.start()
    with pytest.raises(InputError, match=r"bomb\.json\.gz: holds more than \d+ unpacked, 100 times its own size"):
        files.read_bytes(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_small_files_take_little_memory_and_large_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, zipped = tmp_path / "small.json", tmp_path / "small.json.gz"
    small.write_bytes(b"[1, 2]")
    zipped.write_bytes(gzip.compress(b"[1, 2]" * 10_000))
    tracemalloc.start()
    assert files.read_bytes(small) == b"[1, 2]"
    assert files.read_bytes(zipped) == b"[1, 2]" * 10_000
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    with pytest.raises(InputError, match="holds more than 5 bytes"):
        files.read_bytes(small, 5)
    monkeypatch.setattr(files, "PIECE", 4)
    assert files.read_bytes(small, 6) == b"[1, 2]"


def test_a_key_that_a_recorder_gives_twice_counts_as_it_said_last() -> None:
    assert files.parse_trace(b'{"args": {"stream": 1, "stream": 7}}', "rank0.json") == {"args": {"stream": 7}}
