"""Arguments and options that several commands share: the same words, the same meaning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem
from click.types import FloatParamType
from msgspec import Struct

from sim.commands.files_named import JSON_OUTPUT, OUTPUT
from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.core.files import STANDARD_INPUT, write_json, write_text

if TYPE_CHECKING:
    from sim.core.executors import Workers
    from sim.core.timeline import Timeline
    from sim.results.memory import MemoryCurve
    from sim.results.records import Record


class ScenarioFile(click.Path):
    """A scenario's file, `-` for standard input, or the name of a shipped one (`1f1b_pp8`) where no file has it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; of a shipped scenario's name its file."""
        path = Path(str(super().convert(value, param, ctx)))
        if "/" in str(value) and not path.exists():
            self._refuse_model(str(value))
        if path.suffix or path == STANDARD_INPUT or path.exists() or "\0" in str(path):
            return path
        from sim.inputs.shipped import shipped_scenarios

        found = shipped_scenarios()
        if path.as_posix() in found:
            return found[path.as_posix()]
        from sim.inputs.input_source import nearest

        self._refuse_model(path.as_posix())
        hint = nearest(path.as_posix(), found)
        raise InputError(f"{path}: no such file or shipped scenario{hint} (`stepsim scenarios` lists them)")

    @staticmethod
    def _refuse_model(text: str) -> None:
        """Raise for a model: a shipped one's name, an id on the Hub that is known, or one with `hf://` or its site."""
        from sim.inputs.hub import PREFIX, as_model, config_of, without_site
        from sim.inputs.model_input import model_presets

        name = without_site(text)
        if name in model_presets() or name.startswith(PREFIX) or config_of(name) is not None:
            raise InputError(
                f"{text}: found the name of a model; allowed: a scenario (`stepsim scenarios` lists them), whose key"
                f" model names one; `stepsim run SCENARIO --set model={as_model(name)}` runs a scenario with this model"
            )

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of shipped scenarios, and files."""
        from sim.inputs.shipped import shipped_scenarios

        names = [CompletionItem(name) for name in shipped_scenarios() if name.startswith(incomplete)]
        return [*names, *super().shell_complete(ctx, param, incomplete)]


class Seconds(FloatParamType):
    """A time above 0: `4.1`, `4.1s`, `350ms`."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the text as a number of seconds."""
        from sim.inputs.units import parse_time_s  # with pydantic, which --help does without

        try:
            return parse_time_s(value)
        except ValueError as error:
            self.fail(f"found '{str(value)[:40]}'; {error}, such as 4.1, 4.1s or 350ms", param, ctx)


LEAST_TOKENS = 1000  # of a whole training: less lacks its unit


class Tokens(FloatParamType):
    """A number of tokens: `15e12`, `300B`, `15T`."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the text as a number of tokens."""
        from sim.inputs.units import TOKENS as UNIT  # with pydantic, which --help does without

        try:
            tokens = float(UNIT.parse(value))
        except ValueError as error:
            self.fail(f"found '{str(value)[:40]}'; {error}", param, ctx)
        if 0 < tokens < LEAST_TOKENS:
            self.fail(f"found '{str(value)[:40]}'; {tokens:g} tokens? write {tokens:g}B or {tokens:g}T", param, ctx)
        return tokens


Shown = TypeVar("Shown", bound="dict[str, Any] | Record")  # a result, or what its JSON has
SCENARIO = ScenarioFile()
SECONDS = Seconds()
TOKENS = Tokens()


def write_page(path: Path, text: str) -> None:
    """Write a page that a person will open, and say on standard error where it is."""
    write_text(path, text)
    where = path.resolve().as_uri() if path.is_file() else path
    length = len(text.encode(errors="replace"))
    size = f"{length / 1e6:.1f} MB" if length >= 1e5 else f"{length / 1e3:.1f} kB"
    print(f"wrote {path} ({size}): {where}", file=sys.stderr)


def write_trace(path: Path, timeline: Timeline, memory: Sequence[MemoryCurve] = ()) -> None:
    """Write spans, and memory as counters, for Chrome and Perfetto."""
    import json

    from sim.views.trace import trace_events

    write_text(path, json.dumps(trace_events(timeline, memory)))


scenario_argument = click.argument("scenario", type=SCENARIO, metavar="SCENARIO")
engine_option = click.option(
    "--engine",
    type=click.Choice(get_args(Engine)),
    default="auto",
    help="auto: simpy for small simulations, static (faster, same times) for large ones",
)
json_option = click.option(
    "--json", type=JSON_OUTPUT, metavar="FILE|-", help="write the result as JSON; - for standard output"
)
overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key, repeatable"
)
page_option = click.option("--html", type=OUTPUT, metavar="FILE", help="write an interactive page that opens offline")
processes_option = click.option(
    "--workers", type=click.IntRange(1, 4096), metavar="N", help="number of processes; by default one for each core"
)
dask_option = click.option("--dask", metavar="ADDRESS", help="run on the Dask cluster with this scheduler")


class Report(Struct, frozen=True, dict=True):
    """Hold the keys of its scenario that a command changes, and the files of its result: JSON, a page."""

    json: str | None = None
    html: Path | None = None
    overrides: tuple[str, ...] = ()

    def show(self, result: Shown, page: Callable[[Shown], str] | None, table: Callable[[Shown], None]) -> None:
        """Write the result where the options say, and print its table unless its JSON is on standard output. `page`:
        None where the command has none."""
        if self.json is not None:
            write_json(self.json, result if isinstance(result, dict) else result.to_json(), indent=1)
        if self.html is not None and page is not None:
            write_page(self.html, page(result))
        if self.json != "-":
            table(result)


class Study(Report, frozen=True, dict=True):
    """Hold the options of a study of many steps: those of `Report`, and where the steps run."""

    workers: int | None = None
    dask: str | None = None

    def pool(self, much: bool = True) -> AbstractContextManager[Workers]:
        """The Dask cluster's workers, or processes; by default one for each core, or this one unless there is `much`
        to do."""
        from sim.core.executors import available_cores, dask_workers, local_workers

        if self.dask:
            return dask_workers(self.dask)
        return local_workers(self.workers or (available_cores() if much else 1))


class Narrowing(Struct, frozen=True, dict=True):
    """Which layouts a search looks at: options of every command that searches."""

    only: tuple[str, ...] = ()
    memory_limit: str | None = None


def joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Join the values of an option that may be given several times; None without any."""
    return ",".join(values) if values else None


def gathered(record: type[Struct], name: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that gives a command these options, as one argument `name`: a record with a field for each; other
    fields keep their defaults."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(**given: Any) -> Any:
            values = {field: given.pop(field) for field in record.__struct_fields__ if field in given}
            return function(**given, **{name: record(**values)})

        for option in reversed(options):
            call = option(call)
        return call

    return decorate


report_options = gathered(Report, "report", json_option, page_option, overrides_option)
STUDY_OPTIONS = (processes_option, dask_option, json_option, page_option, overrides_option)
study_options = gathered(Study, "study", *STUDY_OPTIONS)


def each_narrowing_option(default: tuple[str, ...] = ()) -> tuple[Callable[[Any], Any], ...]:
    """--only, with a default, and --memory-limit."""
    only = click.option(
        "--only",
        multiple=True,
        default=default,
        metavar="KEY=VALUE,…",
        help="search only these values of a key, repeatable; tp,pp=8:1,4:2 links two keys",
    )
    limit = click.option(
        "--memory-limit",
        metavar="BYTES",
        help="most bytes of a GPU that a layout may use, such as 70GiB; by default what sim.run says that fits",
    )
    return only, limit


def narrowing_options(default: tuple[str, ...]) -> Callable[[Any], Any]:
    """The options of `each_narrowing_option` as one argument `narrowing`."""
    return gathered(Narrowing, "narrowing", *each_narrowing_option(default))
