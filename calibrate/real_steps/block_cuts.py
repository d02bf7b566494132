"""Cuts a block's forward or backward at its communications, in the simulator's program and in a real run alike.

A run (of computations) is what a block computes between two communications; the simulator has one price for each run
(`block key # phase # run`). The communications that a real rank recorded (`Tape`) cut its times into the same runs.
Each recorded communication must have the kind and the bytes of the program's communication in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from calibrate.parallel.comm import COUNTS, WAIT, Clock, Entry
from sim.core.program import Block, Comm, Compute, Phase, Program

PHASES = {
    "forward": {Phase.FORWARD},
    "backward": {Phase.INPUT_GRAD, Phase.WEIGHT_GRAD},
    "input_grad": {Phase.INPUT_GRAD},
    "weight_grad": {Phase.WEIGHT_GRAD},
}


class Elapsed(NamedTuple):
    """Nanoseconds of wall time and of this thread's CPU time."""

    wall: int
    cpu: int


class Cuts(NamedTuple):
    """Where a program is cut.

    `communications`: kind and bytes of each, waits included. `runs`: for every piece before, between and after them
    the number of its run; -1 if the program computes nothing.
    """

    communications: tuple[tuple[str, float], ...]
    runs: tuple[int, ...]


def cuts_of(program: Program) -> Cuts:
    """Return the cuts of a program.

    If the program computes nothing between two communications, the little that a real rank does there counts to the
    run before it (at the beginning: to the run after it).
    """
    communications: list[tuple[str, float]] = []
    runs, run, computing = [-1], -1, False
    for item in program:
        if isinstance(item, Compute):
            run += not computing
            computing, runs[-1] = True, run
            continue
        communications.append((item.kind, item.bytes) if isinstance(item, Comm) else (WAIT, 0.0))
        computing = False
        runs.append(run)
    return Cuts(tuple(communications), tuple(max(r, min(run, 0)) for r in runs))


def block_cuts(block: Block) -> dict[str, Cuts]:
    """Return the cuts of all phases of a block."""
    return {
        phase: cuts_of(tuple(i for i in (*block.forward, *block.backward) if i.phase in phases))
        for phase, phases in PHASES.items()
    }


class Transfer(NamedTuple):
    """A communication on one rank: when it started, and from when to when the rank waited for it.

    A blocking communication is waited for from its start. Times are nanoseconds.
    """

    kind: str
    members: tuple[str, int]
    ranks: int
    bytes: int
    start_ns: int
    from_ns: int
    until_ns: int


def pieces_between(entries: Sequence[Entry], start: Clock, end: Clock) -> list[Elapsed]:
    """Return the times between communications from `start` to `end`: one piece more than there are communications.

    The call that starts an asynchronous communication counts to the piece before it. It is the rank's own work, and the
    simulator starts the communication after that piece.
    """
    inner = (x for e in merged(entries) for x in (e.end if e.posted else e.start, e.end))
    moments = [start, *inner, end]
    return [Elapsed(b.wall - a.wall, b.cpu - a.cpu) for a, b in zip(moments[::2], moments[1::2], strict=True)]


def merged(entries: Sequence[Entry]) -> list[Entry]:
    """Make each exchange of counts a part of the communication that follows it.

    Raises:
        RuntimeError: if that communication is asynchronous: the wait for the counts would then count as computation.
    """
    out: list[Entry] = []
    for e in entries:
        if out and out[-1].kind == COUNTS:
            if e.posted:
                raise RuntimeError(f"an exchange of counts must precede a blocking communication; found {e.kind}")
            e = e._replace(start=out.pop().start)
        out.append(e)
    return out


def transfers(entries: Sequence[Entry]) -> list[Transfer]:
    """Return every communication of the tape; the start and the wait of an asynchronous one are joined."""
    posted: dict[int, Entry] = {}
    out = []
    for e in merged(entries):
        if e.posted:
            posted[e.number] = e
            continue
        first = posted.pop(e.number, None)
        kind, start = (e.kind, e.start.wall) if first is None else (first.kind, first.end.wall)
        out.append(Transfer(kind, e.members, e.ranks, e.bytes, start, e.start.wall, e.end.wall))
    return out


def sum_by_run(pieces: Sequence[Elapsed], cuts: Cuts, entries: Sequence[Entry], what: str) -> dict[int, Elapsed]:
    """Add up the pieces of each run; `what` names the block in the error.

    Raises:
        RuntimeError: if the rank's communications are not those of the program.
    """
    done = [(e.kind, 0.0 if e.kind == WAIT else float(e.bytes)) for e in merged(entries)]
    if done != list(cuts.communications):
        raise RuntimeError(f"{what}: communicated {done}; the simulator's program has {list(cuts.communications)}")
    out: dict[int, Elapsed] = {}
    for piece, run in zip(pieces, cuts.runs, strict=True):
        if run >= 0:
            before = out.get(run, Elapsed(0, 0))
            out[run] = Elapsed(before.wall + piece.wall, before.cpu + piece.cpu)
    return out
