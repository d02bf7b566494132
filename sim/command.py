"""What the entry points share: one message and exit code 2 for bad input, JSON to a file or to standard output."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sim.errors import InputError
from sim.files import write_text


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Turn an `InputError` into one message on standard error and exit code 2; Ctrl-C into exit code 130."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None


def write_json(target: str, data: dict[str, Any]) -> None:
    """JSON to a file, or to standard output where `target` is "-"."""
    text = json.dumps(data, indent=1, allow_nan=False)
    if target == "-":
        _print(text)
    else:
        write_text(target, text + "\n")


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


def end_on_sigterm() -> None:
    """SIGTERM as an exception, with which files and processes are cleared away; exit code 143."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def run_main(main: Callable[..., None]) -> None:
    """Run a command function whose parameters are typer arguments and options."""
    import typer

    end_on_sigterm()
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    app()
