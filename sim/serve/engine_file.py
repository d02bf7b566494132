"""Engines by name, or from a file: a running engine's host seconds, as `python -m calibrate.serving` writes them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sim.core.files import read_json
from sim.inputs.input_source import OneOf, Source, UserInput, as_tuple, found_file, show, validate
from sim.inputs.yaml_input import KeyPath
from sim.serve.engine_record import Engine, HostTimes
from sim.serve.engines import ENGINES

FORMAT: Literal["engine/1"] = "engine/1"

Seconds = Annotated[float, Field(ge=0, le=1e6)]


class HostSeconds(UserInput):
    """`HostTimes` as a file has them; what is left out takes no time."""

    iteration_s: Seconds = 0.0
    rank_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    prompt_s: Seconds = 0.0
    oversize_s: Seconds = 0.0
    launch_s: Seconds = 0.0
    collective_s: Seconds = 0.0
    request_s: Seconds = 0.0
    uncertainty: Seconds = 0.0


class EngineFile(UserInput):
    """A measured engine. `engine`: the record that says all but the host's seconds; `measured`: the loads that these
    were fitted to and judged on, which nothing reads."""

    format: Literal["engine/1"]
    engine: Annotated[str, OneOf(ENGINES)]
    host: HostSeconds
    source: str = Field(min_length=1, max_length=4096)
    date: str = Field(min_length=4, max_length=40, description="year, month and day of the measurement")
    measured: Annotated[tuple[Any, ...], BeforeValidator(as_tuple)] = ()


def engine_of(name: str) -> Engine:
    """The record that `inference.engine` names: one of `ENGINES`, or that of a file.

    Raises:
        InputError: for a file that cannot be read or is no such file.
    """
    return ENGINES.get(name) or _read(name)


def found_engine(name: str, source: Source, path: KeyPath) -> str:
    """The name, or the path of the file that a key names.

    Raises:
        InputError: where there is none, or as `engine_of`.
    """
    if name in ENGINES:
        return name
    file = found_file(name, source, path)
    engine_of(file)
    return file


@cache
def _read(name: str) -> Engine:
    data = read_json(Path(name))
    source = Source(name, data if isinstance(data, dict) else {})
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise source.error(("format",), f"found {show(found)}; must be '{FORMAT}', as calibrate.serving writes it")
    file = validate(EngineFile, data, source, ())
    times = {"measured": HostTimes(**file.host.model_dump())}
    return replace(ENGINES[file.engine], name=name, date=file.date, source=file.source, host=times)
