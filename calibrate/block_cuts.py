"""A block's forward or backward cut at its communications, on both sides: the simulator's program and a run.

The simulator prices what a block computes between its communications piece by piece (`block key # phase #
run`). Here the same pieces are cut out of a real run by its tape, and each communication must be the one that the
program has in its place: kind and bytes. So the two cannot differ in what they send without it being noticed.
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
    """Nanoseconds on the wall clock and of this thread's CPU time."""

    wall: int
    cpu: int


class Cuts(NamedTuple):
    """Where a program is cut: its communications (kind, bytes; waits too), and for every piece before, between and
    after them the number of the run it belongs to (-1: the program computes nothing at all).
    """

    communications: tuple[tuple[str, float], ...]
    runs: tuple[int, ...]


def cuts_of(program: Program) -> Cuts:
    """The cuts of a program.

    Where it computes nothing between two communications, the little that a real rank does there joins the run
    before (at the beginning: the run after).
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
    """The cuts of all phases of a block."""
    return {
        phase: cuts_of(tuple(i for i in (*block.forward, *block.backward) if i.phase in phases))
        for phase, phases in PHASES.items()
    }


class Transfer(NamedTuple):
    """A communication as one rank saw it: when it was posted, from when on it was waited for (at once where it was
    blocking), and until when.
    """

    kind: str
    members: tuple[str, int]
    ranks: int
    bytes: int
    start_ns: int
    from_ns: int
    until_ns: int


def pieces_between(entries: Sequence[Entry], start: Clock, end: Clock) -> list[Elapsed]:
    """What a rank did from `start` to `end` but for its communications: one piece more than there are of these.

    To post an asynchronous one is the rank's own work (on a CPU its thread makes the call that sends) and the end of
    the piece before it: the simulator starts the communication after that piece.
    """
    inner = (x for e in merged(entries) for x in (e.end if e.posted else e.start, e.end))
    moments = [start, *inner, end]
    return [Elapsed(b.wall - a.wall, b.cpu - a.cpu) for a, b in zip(moments[::2], moments[1::2], strict=True)]


def merged(entries: Sequence[Entry]) -> list[Entry]:
    """Entries with the exchange of counts as part of the communication that follows.

    Raises:
        RuntimeError: if that one is asynchronous. Posting counts as work, and so would the waiting for the counts.
    """
    out: list[Entry] = []
    for e in entries:
        if out and out[-1].kind == COUNTS:
            if e.posted:
                raise RuntimeError(f"counts are asked for before what waits at once; {e.kind} is only posted here")
            e = e._replace(start=out.pop().start)
        out.append(e)
    return out


def transfers(entries: Sequence[Entry]) -> list[Transfer]:
    """Every communication of the tape, its post and its wait put together."""
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
    """The pieces of each run together.

    Raises:
        RuntimeError: if the rank did not communicate what the program does.
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
