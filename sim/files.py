"""Writing whole files: a temporary one beside the target, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sim.errors import InputError


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all.

    Raises:
        InputError: if the folder is missing or cannot be written to.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", text=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
