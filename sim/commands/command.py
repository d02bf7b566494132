"""The start and end of every command: one message and exit code 2 for bad input, 130 for Ctrl-C, 143 for SIGTERM."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from types import TracebackType
from typing import Any, NoReturn, TextIO, cast

import click

from sim.commands.files_named import outputs_of
from sim.core.errors import InputError
from sim.core.first_moments import ctrl_c_raises
from sim.core.gc_paused import one_command
from sim.core.outputs import to_write
from topology.errors import PresetError

UNUSED = {  # what numpy and pydantic would set up at import, a tenth of a short command's time
    "OPENBLAS_NUM_THREADS": "1",  # threads for products of large matrices, of which there are none
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # looked for in the metadata of every package that is installed
}
END_WITHIN_S = 20.0  # of being asked to
LONGEST_SAID = 300  # characters of a message on options
AGAIN_AFTER_S = 0.005
EXTRAS = {"torch": "calibrate", "torchao": "torchao", "transformers": "huggingface", "distributed": "dask"}
# One character each, so that columns stay where they are.
RARE = "█▓░✓✗·–−—─…×÷µ→≤≥±‘’“”"
PLAIN = "#=.+!-----~x/u><>~''\"\""
LOOK_ALIKES = dict(zip(RARE, PLAIN, strict=True))


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Turn bad input into one message on standard error and exit code 2, Ctrl-C into exit code 130, SIGTERM into 143.

    Bad input is an `InputError`, a wrong file of a GPU or machine, or a package of an extra that is missing.
    """
    try:
        yield
    except (InputError, PresetError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"error: this needs {error.name}: pip install 'stepsim[{EXTRAS[error.name]}]'", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if not _asked_to_end:
            print("interrupted", file=sys.stderr)
        raise SystemExit(interrupted_code()) from None


def wrong_preset_exits(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook` for commands that are their own `__main__`: they load presets before `run_command` runs."""
    with bad_input_exits():
        if isinstance(error, PresetError):
            raise error
    sys.__excepthook__(kind, error, trace)


class Command(click.Command):
    """A command whose function raises `InputError` for bad input and may return an exit code; None stands for 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"show_default": True, "max_content_width": 120})
        super().__init__(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run the function and end the process."""
        with bad_input_exits(), to_write(outputs_of(ctx)):
            ctx.exit(super().invoke(ctx) or 0)


class _Output:
    """Standard output or error that a reader may close, as `| head` does: what nobody reads is dropped without a word.

    The exit code stays the command's own, and files that it also writes are written. Standard output that cannot be
    written for another reason, as on a full disk, is dropped too, but said at the end. Of standard error nothing can be
    said.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out, or drop."""
        with self._dropping():
            self._stream.flush()

    @contextmanager
    def written_out(self) -> Iterator[None]:
        """Write out at the end of a command that was not stopped.

        Raises:
            InputError: if something could not be written.
        """
        try:
            yield
        except SystemExit as end:
            self.flush()
            if self._error is not None and end.code in (None, 0, 1):
                raise InputError(f"standard output: cannot be written: {self._error.strerror}") from None
            raise

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if not isinstance(error, BrokenPipeError):
                self._error = error


def _look_alike(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: what an encoding lacks, as characters that every encoding has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(LOOK_ALIKES.get(character, "?") for character in missing), error.end


def _open_closed_streams() -> None:
    """A shell's `>&-` closes a stream, which Python then lacks: what would be written there is dropped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open to the end


def _write_any_character() -> None:
    """No character ends the program: a pipe on Windows is cp1252, a cron job's output ASCII."""
    codecs.register_error("look-alike", _look_alike)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="look-alike")


class _Ended(KeyboardInterrupt):
    """The command was asked to end: what it found by then is shown and written, as at Ctrl-C."""


_asked_to_end = list[bool]()  # holds something once SIGTERM has come


def interrupted_code() -> int:
    """Return the exit code of a command that Ctrl-C or SIGTERM ended."""
    return 128 + (signal.SIGTERM if _asked_to_end else signal.SIGINT)


@contextmanager
def _end_when_asked() -> Iterator[None]:
    """SIGTERM as an exception, as Ctrl-C is one, with which files and processes are cleared away.

    A library in C may raise an exception of its own instead (pydantic, which builds a model while a module loads); the
    command still ends as it was asked to. Python drops an exception that meets it in a callback (of a weak reference,
    of an import's lock) or in a `__del__`, and the command would go on to its end as if nobody had asked. So the
    exception of SIGTERM or of Ctrl-C is raised again. A command that is still there some time after SIGTERM ends
    without clearing up; its ranks die with it.
    """

    def end(*_: object) -> None:
        _asked_to_end.append(True)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, END_WITHIN_S)
        raise _Ended

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(what)
        elif hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, end if _asked_to_end else signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER_S)

    sys.unraisablehook = dropped
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        if _asked_to_end:
            raise _Ended from None
        raise


def _load(module: str) -> click.Command:
    for name, value in UNUSED.items():
        os.environ.setdefault(name, value)
    command: click.Command = import_module(module).main
    return command


def run_command(command: click.Command | str) -> NoReturn:
    """Run a command as this process; of a module's name its `main`, so that Ctrl-C may also meet it while it loads."""
    ctrl_c_raises()
    _open_closed_streams()
    _write_any_character()
    output = _Output(sys.stdout)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, _Output(sys.stderr))
    with bad_input_exits(), output.written_out(), one_command(), _end_when_asked():
        raise SystemExit(_exit_code(_load(command) if isinstance(command, str) else command))
    raise AssertionError("a command ends its process")


def _exit_code(command: click.Command) -> int:
    """Run a command; a wrong option is one message, as all that a user wrote."""
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        shown = f" (`{error.ctx.command_path} --help` shows the options)" if error.ctx is not None else ""
        said = error.format_message().replace("is not a valid integer range", "is not a whole number")
        if len(said) > LONGEST_SAID:  # a shell's `*` may stand for a thousand files
            said = f"{said[:LONGEST_SAID]} …"
        print(f"error: {_key_meant(error) or said + shown}", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None


def _key_meant(error: click.UsageError) -> str:
    """Say what to write where a scenario's key was given as an option, as `--pp 4`; empty for any other mistake."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    if all("--set" not in known.opts for known in error.ctx.command.params):
        return ""
    from sim.inputs.parallelism import Parallelism  # after the mistake alone: these take a tenth of a second to load
    from sim.inputs.training_config import Training

    key = error.option_name.lstrip("-").replace("-", "_")
    sections = {"parallelism": Parallelism.model_fields, "training": Training.model_fields}
    found = [f"{name}.{key}" for name, fields in sections.items() if key in fields]
    found += [key] if key in ("calibration", "cluster", "model") else []
    found += ["cluster.nodes"] if key in ("nodes", "nnodes") else []
    if key in ("gpus", "num_gpus", "ngpus", "world_size"):
        takes = "their number is tp·cp·pp·dp: write --set parallelism.dp=N; `stepsim search --gpus N` finds layouts"
        return f"No such option '{error.option_name}': {takes}"
    if not found:
        return ""
    return f"No such option '{error.option_name}': write --set {found[0]}=VALUE, it is a scenario's key"
