"""What the entry points share: one message and exit code 2 for bad input, JSON to a file or to standard output."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO, cast

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
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


class _Output:
    """Standard output that a reader may close, as `| head` does: what nobody reads is dropped without a word.

    The exit code stays the command's own, and files that it also writes are written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Write out, or drop."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def end_on_sigterm() -> None:
    """SIGTERM as an exception, with which files and processes are cleared away; exit code 143."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def run_main(main: Callable[..., None]) -> None:
    """Run a command function whose parameters are typer arguments and options."""
    import typer

    end_on_sigterm()
    sys.stdout = cast(TextIO, _Output(sys.stdout))
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    app()


def run_plain(main: Callable[[], int]) -> NoReturn:
    """Run a command function that reads its own arguments and returns its exit code."""
    end_on_sigterm()
    sys.stdout = cast(TextIO, _Output(sys.stdout))
    with bad_input_exits():
        code = main()
    raise SystemExit(code)
