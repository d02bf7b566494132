"""Writing whole files: a temporary one beside the target, then renamed over it.

Readers, and whoever comes after a full disk, a kill or a second writer, find the file as it was or as it was to be.
A process that is killed outright while it writes leaves its temporary file, `.NAME.….tmp`, which nothing reads.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sim.errors import InputError


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
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _replace(target: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:200]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
