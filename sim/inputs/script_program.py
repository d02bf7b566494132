"""Reads what a captured program says of its rank: streams, collectives and waits (key `script` of "program/1").

A program of one process has no such key: one rank, one stream, nothing to wait for.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from sim.core.collectives import KINDS
from sim.core.errors import InputError
from sim.core.host_work import HOST_WORK
from sim.inputs.parallelism import MAX_RANKS
from sim.inputs.plain_data import listed, mapping, one_of, rows_of, whole
from sim.inputs.program_file import DEVICES, FORMAT, CapturedProgram, read_program

HEAD = f'{{"format":"{FORMAT}"'.encode()


class What(StrEnum):
    """An entry between two operators; what its `value` is stands behind it."""

    START = "start"  # a collective's number: it starts after what its stream holds
    WAIT = "wait"  # a collective's number: the stream waits for it
    RECORD = "record"  # an event's number, recorded on the stream
    WAIT_EVENT = "wait_event"  # an event's number: the stream waits for it
    HOST_WAIT = "host_wait"  # an event's number: the host waits for it
    HOST_WORK = "host_work"  # the number of a kind of Python (`sim.core.host_work`) of which the host runs one call


class Entry(NamedTuple):
    """Something that a rank issued before operator number `before`, on a stream."""

    before: int
    what: What
    stream: int
    value: int


class Collective(NamedTuple):
    """A collective, or one end of a message, whose `ranks` are from and to. `bytes` as nccl-tests counts them."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    bytes: int


class RankProgram(Struct, frozen=True):
    """Hold the operators and collectives that one rank runs in a step. `on_gpu`: it asked for CUDA. `streams`: of each
    operator, 0 the default one."""

    program: CapturedProgram
    rank: int
    world_size: int
    on_gpu: bool
    streams: tuple[int, ...]
    collectives: tuple[Collective, ...]
    entries: tuple[Entry, ...]
    host_work: tuple[str, ...] = ()  # kinds, by their numbers in `entries`; none: captured before they were noted


def alone_note(world_size: int) -> str:
    """Say that ranks of a script run a step without any collective."""
    return (
        f"the step has no collective: its {world_size} ranks exchange no gradients and train {world_size} models; a "
        "script that trains one model calls torch.distributed.init_process_group and wraps the model "
        "(DistributedDataParallel, fully_shard)"
    )


def is_program(path: Path) -> bool:
    """Tell whether a file is a gzipped captured program, by its first bytes."""
    try:
        with gzip.open(path) as file:
            return file.read(len(HEAD)) == HEAD
    except (OSError, EOFError, zlib.error):
        return False


def read_rank_program(path: Path) -> RankProgram:
    """A rank's program.

    Raises:
        InputError: naming the file, the key, what was found and what is allowed.
    """
    program = read_program(path)
    with gzip.open(path) as file:  # read_program has checked that it is whole, small enough and JSON
        script = json.loads(file.read()).get("script")
    count = len(program.operators)
    if script is None:
        return RankProgram(program, 0, 1, True, (0,) * count, (), ())
    where = f"{path}: script"
    script = mapping(script, where)
    world = whole(script.get("world_size"), f"{where}.world_size", 1, MAX_RANKS)
    rank = whole(script.get("rank"), f"{where}.rank", 0, world - 1)
    streams = tuple(whole(x, f"{where}.streams", 0, 1000) for x in listed(script.get("streams"), f"{where}.streams"))
    if len(streams) != count:
        raise InputError(f"{where}.streams: found {len(streams)}; allowed: {count}, one for each operator")
    collectives = _collectives(script, world, where)
    device = one_of(script.get("device"), DEVICES, f"{where}.device")
    named = listed(script.get("host_work"), f"{where}.host_work") if "host_work" in script else []
    kinds = tuple(one_of(kind, HOST_WORK, f"{where}.host_work") for kind in named)
    entries = _entries(script, count, len(collectives), len(kinds), where)
    return RankProgram(program, rank, world, device == "cuda", streams, collectives, entries, kinds)


def _collectives(script: Mapping[str, Any], world: int, where: str) -> tuple[Collective, ...]:
    groups = []
    for i, group in enumerate(listed(script.get("groups"), f"{where}.groups")):
        at = f"{where}.groups[{i}]"
        if not isinstance(group, dict) or not isinstance(group.get("name"), str):
            raise InputError(f"{at}: found {str(group)[:60]}; allowed: a mapping with name and ranks")
        ranks = tuple(whole(r, f"{at}.ranks", 0, world - 1) for r in listed(group.get("ranks"), f"{at}.ranks"))
        if not ranks:
            raise InputError(f"{at}.ranks: found none; allowed: one or more")
        groups.append((group["name"], ranks))
    found = []
    for i, (kind, group, size) in enumerate(_rows(script, "collectives", ("kind", "group", "bytes"), where)):
        at = f"{where}.collectives[{i}]"
        one_of(kind, KINDS, f"{at}.kind")
        name, ranks = groups[whole(group, f"{at}.group", 0, len(groups) - 1)]
        found.append(Collective(kind, name, ranks, whole(size, f"{at}.bytes", 0, 2**62)))
    return tuple(found)


def _entries(script: Mapping[str, Any], operators: int, collectives: int, kinds: int, where: str) -> tuple[Entry, ...]:
    names = [one_of(name, What, f"{where}.whats") for name in listed(script.get("whats"), f"{where}.whats")]
    found: list[Entry] = []
    events = 0
    for i, row in enumerate(_rows(script, "entries", ("before", "what", "stream", "value"), where)):
        at = f"{where}.entries[{i}]"
        before = whole(row[0], f"{at}.before", found[-1].before if found else 0, operators)
        what = What(names[whole(row[1], f"{at}.what", 0, len(names) - 1)])
        known = {What.START: collectives, What.WAIT: collectives, What.HOST_WORK: kinds}
        most = known.get(what, events + (what is What.RECORD))
        stream = whole(row[2], f"{at}.stream", 0, 1000)
        found.append(Entry(before, what, stream, whole(row[3], f"{at}.value", 0, most - 1)))
        events += what is What.RECORD
    return tuple(found)


def _rows(data: Mapping[str, Any], key: str, names: tuple[str, ...], where: str) -> Iterator[tuple[Any, ...]]:
    return rows_of(mapping(data.get(key), f"{where}.{key}", "a mapping of columns"), names, f"{where}.{key}")
