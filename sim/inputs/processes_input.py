"""The `processes` section of a scenario: shipped processes that change the cluster while a step runs, each with
the arguments of the function of its name in `sim.processes.examples`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from sim.inputs.input_source import Source, UserInput, as_tuple
from sim.inputs.parallelism import MAX_RANKS
from sim.inputs.yaml_input import KeyPath
from topology.shares import LinkKind


def _ranks(value: Any) -> Any:
    """One rank as a tuple of it, a list as the tuple that a fixed value needs."""
    return (value,) if type(value) is int else as_tuple(value)


Rank = Annotated[int, Field(ge=0, le=MAX_RANKS)]
_MOST = Field(min_length=1, max_length=100_000)
_WRITTEN = Rank | Annotated[list[Rank], _MOST]
Ranks = Annotated[tuple[Rank, ...], BeforeValidator(_ranks, json_schema_input_type=_WRITTEN), _MOST]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(gt=0, le=1e18)]
Speed = Annotated[float, Field(gt=0, le=1e18)]
Process = TypeVar("Process")
Listed = Annotated[tuple[Process, ...], BeforeValidator(as_tuple), Field(max_length=1000)]


class ThermalThrottling(UserInput):
    """GPUs compute at `scale` times their speed from `at_s` seconds into the step on, for `for_s` (null: to its end).
    `ranks` null: all."""

    ranks: Ranks | None = None
    at_s: Seconds = 0.0
    scale: float = Field(gt=0, le=1e6)
    for_s: Seconds | None = None


class LinkFlap(UserInput):
    """A link of `ranks` (null: all) carries nothing for `down_s`, from `at_s` on; `times` times, `up_s` apart."""

    ranks: Ranks | None = None
    at_s: Seconds
    down_s: Seconds
    link: LinkKind = "nic"
    up_s: Seconds = 0.0
    times: int = Field(default=1, ge=1, le=100_000)


class BackgroundTraffic(UserInput):
    """Another job's messages of `n_bytes` between two GPUs' links, each at least `every_s` after the one before."""

    source: Rank
    target: Rank
    n_bytes: Bytes
    every_s: Seconds = 0.0


class Checkpoint(UserInput):
    """Each of `ranks` (null: all) writes `n_bytes` to storage when the step begins, no faster than `bytes_per_s` (null:
    as its NICs allow), and computes nothing meanwhile unless `asynchronous`."""

    n_bytes: Bytes
    bytes_per_s: Speed | None = None
    ranks: Ranks | None = None
    asynchronous: bool = False


class StorageRead(UserInput):
    """Each of `ranks` (null: all) reads `n_bytes` from storage before it computes anything, no faster than
    `bytes_per_s`."""

    n_bytes: Bytes
    bytes_per_s: Speed
    ranks: Ranks | None = None


class Processes(UserInput):
    """Lists of shipped processes, by the name of each."""

    thermal_throttling: Listed[ThermalThrottling] = ()
    link_flap: Listed[LinkFlap] = ()
    background_traffic: Listed[BackgroundTraffic] = ()
    checkpoint: Listed[Checkpoint] = ()
    storage_read: Listed[StorageRead] = ()

    def listed(self) -> Iterator[tuple[str, int, UserInput]]:
        """Name, place in its list and arguments of each."""
        for name in type(self).model_fields:
            for index, arguments in enumerate(getattr(self, name)):
                yield name, index, arguments

    @property
    def named_ranks(self) -> frozenset[int]:
        """All ranks that the section names."""
        return frozenset(rank for *_, rank in _ranks_of(self))


def check_processes(processes: Processes, ranks: int, source: Source) -> None:
    """Refuse ranks that the step does not have.

    Raises:
        InputError: names the key.
    """
    for path, rank in _ranks_of(processes):
        if rank >= ranks:
            raise source.error(path, f"found {rank}; must be below the number of ranks ({ranks})")
    for name, index, arguments in processes.listed():
        if isinstance(arguments, BackgroundTraffic) and arguments.source == arguments.target:
            raise source.error(("processes", name, index, "target"), f"found {arguments.target}, which is the source")


def _ranks_of(processes: Processes) -> Iterator[tuple[KeyPath, int]]:
    """Yield each rank that the section names, with the path of the key that names it."""
    for name, index, arguments in processes.listed():
        for key in ("ranks", "source", "target"):
            found = getattr(arguments, key, None)
            for rank in (found,) if isinstance(found, int) else found or ():
                yield ("processes", name, index, key), rank
