"""Reading trace files that may be anything: limits on size and depth, gzip, JSON, one message for what is wrong."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import IO, Any

from sim.core.errors import InputError
from sim.core.json_text import parse_json
from sim.core.outputs import refuse_output

MAX_BYTES = 1 << 30  # unpacked; a minute of a real rank is some hundred MB
GROWTH, GROWS_TO = 100, 1 << 24  # what gzip may unpack to: traces are 10 to 40 times as large, bombs 1000 times
PIECE = 1 << 20
GZIP = b"\x1f\x8b"


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """A file's content, unpacked where it is gzip.

    Raises:
        InputError: if it cannot be read, is no whole gzip file, holds more than `limit` bytes, or is to be overwritten.
    """
    refuse_output(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == GZIP
            file.seek(0)
            if not zipped:
                data = _read(file, limit)
            else:
                size = os.fstat(file.fileno()).st_size
                limit = min(limit, GROWS_TO + GROWTH * size)
                with gzip.GzipFile(fileobj=file) as unpacked:
                    data = _read(unpacked, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is no whole gzip file: {error}") from None
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; a file is needed") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        unpacked_to = f" unpacked, {GROWTH} times its own size," if zipped and limit < MAX_BYTES else ""
        raise InputError(f"{path}: holds more than {limit}{unpacked_to} bytes; cut the trace to fewer steps")
    return data


def _read(file: IO[bytes] | gzip.GzipFile, limit: int) -> bytes:
    """At most `limit` bytes and one piece more; memory is taken as they come."""
    pieces, held = [], 0
    while held <= limit and (piece := file.read(PIECE)):
        pieces.append(piece)
        held += len(piece)
    return b"".join(pieces)


def parse_trace(data: bytes, path: str | Path) -> Any:
    """A trace's JSON, in whose names any bytes may stand. NaN is refused by who reads the value, with its event.

    Tools that record add what users attach to an event, sometimes under a key that it has: the last one counts.

    Raises:
        InputError: as `parse_json`.
    """
    return parse_json(data.decode("utf-8", "replace"), str(path), finite=False, unique=False)
