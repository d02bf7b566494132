"""Makes one message of an error in captured code: its line and the error."""

from __future__ import annotations

import traceback

from sim.core.errors import InputError

OURS = ("/torch/", "/calibrate/capture/", "<frozen", "<string>")


def failure(error: Exception, what: str) -> InputError:
    """Return the message for an error of captured code; `what` names the code if no line of it is in the traceback."""
    return InputError(f"{_line_of(error, what)}: {type(error).__name__}: {_first_line(error)}")


def _line_of(error: Exception, what: str) -> str:
    """Return the last line of the captured code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(part in f.filename for part in OURS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else what


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
