"""Reading files of bounded size, and writing whole ones: a temporary one beside the target, then renamed over it.

Readers, and whoever comes after a full disk, a kill or a second writer, find the file as it was or as it was to be.
A process that is killed outright while it writes leaves its temporary file, `.NAME.….tmp`, which nothing reads.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
from functools import cache
from pathlib import Path

from sim.core.errors import InputError
from sim.core.json_text import parse_json
from sim.core.outputs import note_written, refuse_output

MAX_JSON_BYTES = 64 * 1024 * 1024
STANDARD_INPUT = Path("-")

_from_pipes: dict[Path, bytes] = {}


def read_text(path: Path, limit_bytes: int) -> str:
    """The text of a file that a user names; `-` is standard input.

    Raises:
        InputError: if it cannot be read, is larger than `limit_bytes`, is not UTF-8, or is to be overwritten.
    """
    if path != STANDARD_INPUT:
        refuse_output(path)
    try:
        raw = _standard_input(limit_bytes) if path == STANDARD_INPUT else _bytes_of(path, limit_bytes)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if len(raw) > limit_bytes:
        raise InputError(f"{path}: is larger than {limit_bytes} bytes, the limit for an input file")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")  # lines of Windows end in both
    except UnicodeDecodeError as error:
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{path}:1: is not UTF-8 text but UTF-16 or UTF-32; save it as UTF-8") from None
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: is not UTF-8 text (byte 0x{raw[error.start]:02x})") from None


def unreadable(path: str | Path, error: OSError | ValueError) -> InputError:
    """Return the error of a file that the system does not give; `error`: what it said (ValueError: of the path)."""
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path}: is a directory; a file is needed")
    return InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _bytes_of(path: Path, limit_bytes: int) -> bytes:
    """A file's first bytes. What a pipe gave is kept: commands may load their scenario again, and the pipe is empty."""
    if path in _from_pipes:
        return _from_pipes[path]
    with path.open("rb") as file:
        raw = file.read(limit_bytes + 1)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _from_pipes[path] = raw
    return raw


@cache
def _standard_input(limit_bytes: int) -> bytes:
    """Read once, since commands may load their scenario again."""
    if sys.stdin is None:
        raise OSError("it is closed")
    return sys.stdin.buffer.read(limit_bytes + 1)


def read_json(path: Path) -> object:
    """The JSON of a file that a user names, without NaN and infinities.

    Raises:
        InputError: as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, MAX_JSON_BYTES), str(path))


def write_json(target: str | Path, data: object, indent: int | None = None) -> None:
    """Write `data` as JSON: to a file, replaced at once, or to standard output where `target` is "-".

    Raises:
        InputError: as `write_text`; of a command also if standard output cannot be written to.
    """
    text = json.dumps(data, indent=indent, allow_nan=False)
    if target == "-":
        print(text, flush=True)
    else:
        write_text(target, text + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all.

    Raises:
        InputError: if the folder is missing, cannot be written to, or is full.
    """
    write_bytes(path, text.encode(errors="replace"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all; a link's file, and straight into what is no file, such as a pipe.

    Raises:
        InputError: as `write_text`.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # of /dev/stdout, no real path leads to a pipe
            Path(path).write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
            note_written(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _replace(target: Path, data: bytes) -> None:
    import tempfile  # takes 15 ms to load, and most commands only read

    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:200]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
