"""Commands and flags of serving engines and of their benchmarks, by our names of settings: `flags.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

FILE = Path(__file__).with_name("flags.yaml")


class Server(Struct, frozen=True):
    """An engine: how its commands start, `unless` they have a word, its flags for each setting, flags by their names
    with one dash, and patterns of flags without a value."""

    starts: tuple[str, ...]
    flags: dict[str, str]
    unless: tuple[str, ...] = ()
    short: dict[str, str] = field(default_factory=dict)
    switches: str = ""


class Benchmark(Server, frozen=True, kw_only=True):
    """A benchmark. `range_ends_at_length`: a range of lengths ends at the stated one, which others have in the
    middle; `ratio`: where it begins, if no flag says it. `burstiness`: of the gaps between requests, if no flag says
    it, None: of a Poisson process. `exact_rate`: the gaps are scaled so that their sum is what the rate says.
    `temperature`: of its requests, if no flag says it; None: the server's. `own_server`: settings of the engine that it
    starts. `dataset`: whose requests it sends, if no flag says it. `note`: for the reader of the scenario."""

    defaults: dict[str, int]
    range_ends_at_length: bool = False
    ratio: float = 0.0
    burstiness: float | None = None
    exact_rate: bool = False
    temperature: float | None = 0.0
    own_server: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    note: str = ""


class Names(Struct, frozen=True):
    """Hold the content of `flags.yaml`."""

    servers: dict[str, Server]
    benchmarks: dict[str, Benchmark]
    datasets: dict[str, Server]
    policies: dict[str, str]
    all2all: dict[str, str]
    caches: dict[str, str]
    weights: dict[str, str]
    predicting: tuple[str, ...]


@cache
def names_of_flags() -> Names:
    return msgspec.yaml.decode(FILE.read_bytes(), type=Names)
