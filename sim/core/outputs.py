"""The files that the running command was told to write, none of which it may read: it would overwrite its input.

Whoever opens a file that a user names asks first, so that also files are found which other files name. As commands
read before they write, nothing is written by then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sim.core.errors import InputError

Output = tuple[str, re.Pattern[str]]  # the option; what the names of its files match, links followed
_outputs: list[Output] = []
_written: set[str] = set()  # read again, such a file is no input


@contextmanager
def to_write(outputs: Sequence[Output]) -> Iterator[None]:
    """While a command with these outputs runs."""
    _outputs[:] = outputs
    try:
        yield
    finally:
        _outputs.clear()
        _written.clear()


def refuse_output(path: str | os.PathLike[str]) -> None:
    """Raise for a file that is about to be read and that the command will overwrite.

    Raises:
        InputError: naming the option and the file.
    """
    if not _outputs:
        return
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError):  # no name that a file can have: whoever opens it says so
        return
    for option, names in _outputs:
        if names.fullmatch(real) and real not in _written:
            raise InputError(f"{option}: {path} is read; it would be overwritten")


def note_written(path: str | os.PathLike[str]) -> None:
    """A file has been written, and may be read from now on."""
    if _outputs:
        _written.add(os.path.realpath(path))
