"""Pipeline actions: what one rank does with one micro-batch on one stage, and whole schedules of them.

A schedule is data: for every pipeline rank an ordered tuple of entries. The simulator expands it into tasks
and `calibrate` executes the very same lists, so simulated and real runs can differ in cost, never in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, NoReturn

from msgspec import Struct


class Kind(StrEnum):
    """The computation of an action. Letters are those of torch.distributed.pipelining."""

    __hash__ = str.__hash__  # Enum's is written in Python; actions are looked up often
    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients together
    I = "I"  # backward for the input only  # noqa: E741
    W = "W"  # backward for the weights only


class Action(NamedTuple):
    """One stage's work on one micro-batch; prints as `2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`.

        >>> Action.parse("2F0")
        Action(stage=2, kind=<Kind.F: 'F'>, micro_batch=0)

        Raises:
            ValueError: if `text` is no stage, letter of `Kind` and micro-batch.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no action: expected stage, one of F B I W, micro-batch, as in 2F0")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


class Overlap(NamedTuple):
    """A forward and a backward that a rank runs at once (DualPipe), each hiding the other's messages."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Entry = Action | Overlap
Step = tuple[Action, ...]  # what a rank runs at once: one action, or a pair

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Schedule(Struct, frozen=True):
    """Per-rank action lists over `len(rank_of_stage)` schedule stages.

    `rank_of_stage[s]` is the pipeline rank that runs schedule stage s; `part_of_stage[s]` the slice of the
    model it holds (equal to s, except for DualPipe, which holds each of its p parts on two ranks: 2p schedule
    stages). `chains` are the paths a micro-batch's activations take, first stage to last; DualPipe has two,
    one for each direction; every other schedule has one. `ranks[r]` is rank r's list. `joint[r]` has the places in
    it of forwards whose blocking messages go in one exchange with those of the backward behind them.
    """

    name: str
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    part_of_stage: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Entry, ...], ...]
    joint: tuple[range, ...] = ()

    def between_exchanges(self, rank: int) -> list[tuple[Entry, ...]]:
        """Return the entries that a rank runs between two blocking exchanges: one, or two that are `joint`."""
        entries = self.ranks[rank]
        ends = {place + 1 for place in self.joint[rank]} if self.joint else set()
        begins = [i for i in range(len(entries)) if i not in ends]
        return [entries[i:j] for i, j in pairwise([*begins, len(entries)])]


def parse_entry(text: str) -> Entry:
    """The entry that prints as `text`: `2F0`, or `(0F4;7B1)OVERLAP_F_B`, as torch writes them.

    Raises:
        ValueError: if it is neither.
    """
    match = _OVERLAP.fullmatch(text.strip())
    if match is None:
        return Action.parse(text)
    forward, backward = Action.parse(match[1]), Action.parse(match[2])
    if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
        raise ValueError(f"{text!r}: an overlap is a forward and then a backward, as in (0F4;7B1)OVERLAP_F_B")
    return Overlap(forward, backward)


def parts(entry: Entry) -> tuple[Action, ...]:
    """The entry's actions: one, or an overlap's two."""
    return (entry.forward, entry.backward) if isinstance(entry, Overlap) else (entry,)


def short(entry: Entry) -> str:
    """An entry as grids show it: `2F0`, or `0F4+7B1` for an overlap."""
    return "+".join(str(a) for a in parts(entry))


def grid(
    rows: Iterable[Sequence[Entry | str | None]],
    mark: tuple[int, int] | None = None,
    first_rank: int = 0,
    first_slot: int = 0,
) -> str:
    """A table of ranks (rows) and slots (columns); None is an idle slot, text stands as it is.

    `mark` (row, column) gets `<-- here`; `first_rank` and `first_slot` number the first row and column.

    >>> print(grid([[Action(0, Kind.F, 0), None], [None, Action(1, Kind.F, 0)]]))
           0   1
    rank 0 0F0
    rank 1     1F0
    """
    cells = [["" if e is None else e if isinstance(e, str) else short(e) for e in row] for row in rows]
    if mark is not None:
        cells[mark[0]][mark[1]] += " <-- here"
    columns = max((len(row) for row in cells), default=0)
    table = [["", *(str(first_slot + i) for i in range(columns))]]
    table += [[f"rank {first_rank + r}", *row, *[""] * (columns - len(row))] for r, row in enumerate(cells)]
    widths = [max(len(row[c]) for row in table) for c in range(columns + 1)]
    return "\n".join(" ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in table)


def validate(schedule: Schedule, *, p2p_overlap: bool = True) -> None:
    """Checks that every rank can run its list to the end and that the lists are the whole step's work.

    Each micro-batch runs along exactly one chain, forward once on each of its stages and backward once in
    reverse, B or else I and later W, each stage on its own rank. The lists are then run dry, with messages
    that take no time: with `p2p_overlap` an entry waits only for what it needs; without, after each entry (or two that
    are `joint`) a rank posts as one batch the sends of its results and the receives of what comes next, and waits for
    all.

    Raises:
        ValueError: naming rank, entry and rule, with the grid around it.
    """
    stages = len(schedule.rank_of_stage)
    if sorted(s for chain in schedule.chains for s in chain) != list(range(stages)):
        raise ValueError(f"{schedule.name}: chains must hold each of {stages} stages once: {schedule.chains}")
    if len(schedule.part_of_stage) != stages:
        raise ValueError(f"{schedule.name}: part_of_stage must have one entry for each of {stages} stages")
    _check_complete(schedule, _check_lists(schedule))
    if p2p_overlap:
        for _ in in_turn(schedule, Links(schedule)):
            pass  # a deadlock raises
    else:
        _run_blocking(schedule, Links(schedule))


_FORWARD, _INPUT, _DONE = 1, 2, 3  # what a (stage, micro-batch) has had
_STEP = {  # kind: (state it needs, state it leaves, what is wrong else)
    Kind.F: (0, _FORWARD, "forward runs twice"),
    Kind.B: (_FORWARD, _DONE, "backward needs one forward, and no other backward, before it"),
    Kind.I: (_FORWARD, _INPUT, "input gradient needs one forward, and no other backward, before it"),
    Kind.W: (_INPUT, _DONE, "weight gradient needs one input gradient, and no other, before it"),
}


def _fail(schedule: Schedule, rank: int, position: int, why: str) -> NoReturn:
    """Raises with the lists around the entry: whole grids of large schedules help nobody."""
    slot, row = max(0, position - 6), max(0, rank - 8)
    rows = [entries[slot : position + 4] for entries in schedule.ranks[row : rank + 9]]
    table = grid(rows, (rank - row, position - slot), row, slot)
    entry = short(schedule.ranks[rank][position])
    raise ValueError(f"{schedule.name}: rank {rank}, entry {position} ({entry}): {why}\n{table}")


def _check_lists(schedule: Schedule) -> bytearray:
    """Each list by itself: ranks, ranges, and the order of one stage's work. Returns the states it leaves."""
    m, rank_of_stage = schedule.micro_batches, schedule.rank_of_stage
    state = bytearray(len(rank_of_stage) * m)
    for rank, entries in enumerate(schedule.ranks):
        for position, entry in enumerate(entries):
            if isinstance(entry, Overlap) and entry.forward.micro_batch == entry.backward.micro_batch:
                _fail(schedule, rank, position, "an overlap's two halves need two micro-batches")
            for stage, kind, micro_batch in parts(entry):
                if not 0 <= stage < len(rank_of_stage) or rank_of_stage[stage] != rank:
                    _fail(schedule, rank, position, f"stage {stage} is not one of this rank's")
                if not 0 <= micro_batch < m:
                    _fail(schedule, rank, position, f"micro-batch {micro_batch} is not in 0..{m - 1}")
                needs, leaves, wrong = _STEP[kind]
                if state[stage * m + micro_batch] != needs:
                    _fail(schedule, rank, position, wrong)
                state[stage * m + micro_batch] = leaves
    return state


def _check_complete(schedule: Schedule, state: bytearray) -> None:
    """Each micro-batch has a chain, and every stage of a chain did all its work on all its micro-batches."""
    m = schedule.micro_batches
    owner: dict[int, int] = {}
    for number, chain in enumerate(schedule.chains):
        for micro_batch in range(m):
            seen = [state[s * m + micro_batch] for s in chain]
            if not any(seen):
                continue
            if owner.setdefault(micro_batch, number) != number:
                raise ValueError(f"{schedule.name}: micro-batch {micro_batch} runs on two chains")
            for stage, done in zip(chain, seen, strict=True):
                if done != _DONE:
                    missing = {0: "forward", _FORWARD: "backward", _INPUT: "weight gradient"}[done]
                    where = f"stage {stage}, micro-batch {micro_batch}"
                    rank = schedule.rank_of_stage[stage]
                    raise ValueError(f"{schedule.name}: rank {rank} has no {missing} of {where}")
    if len(owner) != m:
        lost = next(i for i in range(m) if i not in owner)
        raise ValueError(f"{schedule.name}: micro-batch {lost} is never run")


class Links:
    """Messages as integers: the result of (stage, forward or backward, micro-batch) has the number
    2·(stage·m + micro-batch) + (0 forward, 1 backward). Each has one taker."""

    def __init__(self, schedule: Schedule) -> None:
        self.m = schedule.micro_batches
        self.rank_of_stage = schedule.rank_of_stage
        stages = len(schedule.rank_of_stage)
        self.before, self.after = [-1] * stages, [-1] * stages
        for chain in schedule.chains:
            for a, b in pairwise(chain):
                self.after[a], self.before[b] = b, a

    def needs(self, entry: Entry) -> list[tuple[int, int]]:
        """Messages that an entry takes, each with the rank that gives it."""
        return self._messages(entry, False)

    def gives(self, entry: Entry) -> list[tuple[int, int]]:
        """Messages that an entry makes, each with the rank that takes it."""
        return self._messages(entry, True)

    def _messages(self, entry: Entry, given: bool) -> list[tuple[int, int]]:
        """A message is numbered by the stage that gives it; weight gradients neither take nor give one."""
        forward, backward = (self.after, self.before) if given else (self.before, self.after)
        found = []
        for stage, kind, micro_batch in parts(entry):
            other = forward[stage] if kind is Kind.F else backward[stage] if kind is not Kind.W else -1
            if other >= 0:
                giver = stage if given else other
                found.append((2 * (giver * self.m + micro_batch) + (kind is not Kind.F), self.rank_of_stage[other]))
        return found

    def name(self, message: int) -> str:
        """Return what a message is, in words."""
        stage, micro_batch = divmod(message // 2, self.m)
        return f"{'backward' if message % 2 else 'forward'} of stage {stage}, micro-batch {micro_batch}"


class Turn(NamedTuple):
    """An entry whose turn it is: what it takes, as `Links.needs` has it, and what it makes, as `Links.gives` has it."""

    rank: int
    entry: Entry
    takes: list[tuple[int, int]]
    makes: list[tuple[int, int]]


def in_turn(schedule: Schedule, links: Links) -> Iterator[Turn]:
    """Yields every entry after those before it on its rank and after those that make what it takes.

    Raises:
        ValueError: if lists wait for each other forever.
    """
    done: set[int] = set()
    waiting: dict[int, int] = {}
    position = [0] * len(schedule.ranks)
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        entries = schedule.ranks[rank]
        for i in range(position[rank], len(entries)):
            takes, makes = links.needs(entries[i]), links.gives(entries[i])
            missing = [message for message, _ in takes if message not in done]
            if missing:
                waiting[missing[0]] = rank
                break
            yield Turn(rank, entries[i], takes, makes)
            for message, _ in makes:
                done.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
            position[rank] = i + 1
    for message, rank in waiting.items():
        _fail(schedule, rank, position[rank], f"deadlock: waits forever for the {links.name(message)}")


def _run_blocking(schedule: Schedule, links: Links) -> None:
    """Runs every list as far as it goes; batches of messages complete when both ends have posted them."""
    done: set[int] = set()
    posted: dict[int, int] = {}  # one end only: by whom
    open_messages: list[set[int]] = [set() for _ in schedule.ranks]
    position = [-1] * len(schedule.ranks)
    runs = [schedule.between_exchanges(rank) for rank in range(len(schedule.ranks))]
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        while not open_messages[rank] and position[rank] < len(runs[rank]):
            i = position[rank]
            ended = runs[rank][i] if i >= 0 else ()
            for entry in ended:
                _check_local(schedule, links, done, rank, entry)
                done.update(message for message, _ in links.gives(entry))
            begin = runs[rank][i + 1] if i + 1 < len(runs[rank]) else ()
            batch = [message for entry in ended for message, taker in links.gives(entry) if taker != rank]
            batch += [message for entry in begin for message, giver in links.needs(entry) if giver != rank]
            for message in batch:
                if message in posted:
                    other = posted.pop(message)
                    open_messages[other].discard(message)
                    ready.append(other)
                else:
                    posted[message] = rank
                    open_messages[rank].add(message)
            position[rank] = i + 1
    for rank, messages in enumerate(open_messages):
        if messages:
            names = " and the ".join(links.name(message) for message in sorted(messages))
            at = schedule.ranks[rank].index(runs[rank][max(position[rank] - 1, 0)][-1])
            _fail(schedule, rank, at, f"deadlock: the blocking messages after it never pass: the {names}")


def _check_local(schedule: Schedule, links: Links, done: set[int], rank: int, entry: Entry) -> None:
    """Raise unless a rank has made what it hands to itself earlier in its list."""
    for message, giver in links.needs(entry):
        if giver == rank and message not in done:
            _fail(
                schedule,
                rank,
                schedule.ranks[rank].index(entry),
                f"deadlock: waits forever for the {links.name(message)}",
            )
