"""Trace files that are large, or say so: limits hold before memory is taken."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.traces import files


@pytest.mark.parametrize("padding", [0, 2**25])
def test_a_gzip_bomb_is_refused_early(tmp_path: Path, padding: int) -> None:
    """Also where the file itself is so large that 1 GiB would be no more than 100 times that."""
    bomb = tmp_path / "bomb.json.gz"
    packed = gzip.compress(b"[" + b"0," * 60_000_000)
    bomb.write_bytes(packed + bytes(padding))
    assert len(packed) < 2**18
    tracemalloc.start()
    with pytest.raises(InputError, match=r"bomb\.json\.gz: unpacks to more than 100 times its own size"):
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
