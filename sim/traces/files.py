"""Read trace files, which may contain anything: limits on size and depth, gzip, JSON, one message for an error."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, Any

from sim.core.errors import InputError
from sim.core.files import unreadable
from sim.core.json_text import parse_json
from sim.core.outputs import refuse_output
from sim.inputs.file_kinds import GZIP

MAX_BYTES = 1 << 30  # unpacked; a minute of a real rank is some hundred MB
GROWTH, GROWS_TO = 100, 1 << 24  # limit of unpacking: traces grow 10 to 40 times, gzip bombs 1000 times
PIECE = 1 << 20


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Return a file's content, unpacked if it is gzip.

    Raises:
        InputError: if it cannot be read, is an incomplete gzip file, holds over `limit` bytes, or is also an output.
    """
    refuse_output(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == GZIP
            file.seek(0)
            data = _read(gzip.GzipFile(fileobj=file) if zipped else file, limit, file if zipped else None)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is an incomplete or damaged gzip file: {error}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if data is None:
        raise InputError(f"{path}: unpacks to more than {GROWTH} times its own size; a trace grows 10 to 40 times")
    if len(data) > limit:
        raise InputError(f"{path}: holds more than {limit} bytes; cut the trace to fewer steps")
    return data


def _read(file: IO[bytes] | gzip.GzipFile, limit: int, packed: IO[bytes] | None) -> bytes | None:
    """Read at most `limit` bytes and one piece more; memory is allocated piece by piece. None as soon as what was read
    of a `packed` file has grown too much: a bomb is not held."""
    pieces, held = [], 0
    while held <= limit and (piece := file.read(PIECE)):
        pieces.append(piece)
        held += len(piece)
        if packed is not None and held > GROWS_TO + GROWTH * packed.tell():
            return None
    return b"".join(pieces)


def parse_trace(data: bytes, path: str | Path) -> Any:
    """Parse a trace's JSON.

    Names may hold any bytes. NaN is allowed here; the reader of a value refuses it and names the event. Recorders may
    write a key twice, because users attach values to events; the last one counts.

    Raises:
        InputError: as `parse_json`.
    """
    return parse_json(data.decode("utf-8", "replace"), str(path), finite=False, unique=False)
