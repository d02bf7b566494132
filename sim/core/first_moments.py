"""Ctrl-C while a command's modules load, before it can be caught: the process ends with one word and exit code 130."""

from __future__ import annotations

import os
import signal


def ctrl_c_ends() -> None:
    """Let Ctrl-C end the process at once, unless the shell lets it be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def ctrl_c_raises() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which commands catch."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
