"""Reading trace files that may be anything: limits on size and depth, gzip, JSON, one message for what is wrong."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from sim.errors import InputError

MAX_BYTES = 1 << 30  # unpacked; a minute of a real rank is some hundred MB
GZIP = b"\x1f\x8b"


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """A file's content, unpacked where it is gzip.

    Raises:
        InputError: if it cannot be read, is no whole gzip file, or holds more than `limit` bytes.
    """
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == GZIP
            file.seek(0)
            if not zipped:
                data = file.read(limit + 1)
            else:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    data = unpacked.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is no whole gzip file: {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        raise InputError(f"{path}: holds more than {limit} bytes; cut the trace to fewer steps")
    return data


def parse_json(data: bytes, path: str | Path) -> Any:
    """JSON text as Python values.

    Raises:
        InputError: if it is no JSON, or is nested too deeply to be a trace.
    """
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # an integer of too many digits
        raise InputError(f"{path}: is no JSON that can be read: {str(error)[:80]}") from None
