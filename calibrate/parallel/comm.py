"""Groups of ranks that compute one block together, and the tape of what they told each other.

Every communication inside a block goes through a `Group`, which writes on the rank's `Tape` when it began and
ended. That cuts a step's forwards and backwards into computations and communications, as the simulator's
programs (`sim.core.program`) are cut: a blocking collective is one entry, an asynchronous one two, its post and
its wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.parallel.pipeline import Record

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

WAIT = "wait"
COUNTS = "counts"  # what is asked before an exchange of uneven parts, and belongs to it


class Clock(NamedTuple):
    """A moment: nanoseconds on the clock that all ranks share, and of this thread's CPU time."""

    wall: int
    cpu: int


class Entry(NamedTuple):
    """One communication, or one end of an asynchronous one: `posted` at the first, `kind` is `WAIT` at the second,
    both with one `number`.

    `backward`: it was met while autograd ran, which on a rank with paired actions may be beside a forward. `members`:
    name and first rank of the group, of `ranks` ranks. `bytes` as nccl-tests counts them (see
    `sim.core.program.Comm`).
    """

    kind: str
    members: tuple[str, int]
    ranks: int
    bytes: int
    start: Clock
    end: Clock
    number: int
    posted: bool
    backward: bool = False


@dataclass(slots=True)
class Tape:
    """What this rank communicated, in order.

    A GPU runs behind its host, and to wait for it at every mark would empty its queue. So there a moment is an event
    among the queued kernels, written only while a calibration asks for it (`rehearsing`); `moments` tells when the
    events came.
    """

    device: str = "cpu"
    entries: list[Entry] = field(default_factory=list)
    rehearsing: bool = False
    numbers: Iterator[int] = field(default_factory=count)
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def on(self) -> bool:
        return self.device == "cpu" or self.rehearsing

    def now(self) -> Clock:
        """This moment; on a GPU the number of an event, for `moments` to look up, or 0 where nothing is written."""
        if self.device == "cpu":
            return Clock(time.perf_counter_ns(), time.thread_time_ns())
        if not self.on:
            return Clock(0, 0)
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        return Clock(len(self.events) - 1, 0)

    def moments(self) -> Callable[[Clock], Clock]:
        """What turns a `Clock` of `now` into nanoseconds; on a GPU from the first event on, all of them done with."""
        if self.device == "cpu":
            return lambda clock: clock
        events, self.events = self.events, []
        torch.cuda.synchronize()
        at = [round(events[0].elapsed_time(e) * 1e6) for e in events]
        return lambda clock: Clock(at[clock.wall], at[clock.wall])

    def take(self) -> list[Entry]:
        """The entries so far, which are forgotten."""
        taken, self.entries = self.entries, []
        return taken


class Pending(NamedTuple):
    """An asynchronous communication under way. `wait` returns what it brings."""

    wait: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's group along one dimension. Alone (`size` 1) its communications do nothing.

    `second`: another process group of the same ranks, for what backwards send beside forwards (`ep_overlap`). `name` as
    in `sim.ranks.plan`; `ranks` are global, ascending; `index` is this rank's place among them.
    """

    name: str
    ranks: Sequence[int]
    index: int
    process_group: dist.ProcessGroup | None
    tape: Tape
    second: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum of all members' `x`, in its place."""
        return self.start_all_reduce(x, op, blocking=True).wait()

    def start_all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, blocking: bool = False
    ) -> Pending:
        """As `all_reduce`, asynchronous."""
        return self._run(
            "all_reduce", x, x, blocking, lambda: dist.all_reduce(x, op, group=self.process_group, async_op=True)
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, …] → [size · rows, …], in the members' order."""
        return self.start_all_gather(x, blocking=True).wait()

    def start_all_gather(self, x: Tensor, blocking: bool = False) -> Pending:
        """As `all_gather`, asynchronous."""
        x = x.contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if self.size > 1 else x
        return self._run(
            "all_gather", out, out, blocking, lambda: _all_gather(out, x, group=self.process_group, async_op=True)
        )

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size · rows, …] → [rows, …]: this rank's part of the sum."""
        return self.start_reduce_scatter(x, blocking=True).wait()

    def start_reduce_scatter(self, x: Tensor, blocking: bool = False) -> Pending:
        """As `reduce_scatter`, asynchronous."""
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if self.size > 1 else x
        return self._run(
            "reduce_scatter", x, out, blocking, lambda: _reduce_scatter(out, x, group=self.process_group, async_op=True)
        )

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], backward: bool = False) -> Tensor:
        """`sent[i]` rows of `x` go to member i, `received[i]` come from it; rows in the members' order."""
        group = self.second if backward and self.second is not None else self.process_group
        x = x.contiguous()
        out = x.new_empty((sum(received), *x.shape[1:])) if self.size > 1 else x
        return self._run(
            "all_to_all",
            x,
            out,
            True,
            lambda: dist.all_to_all_single(out, x, list(received), list(sent), group=group, async_op=True),
        ).wait()

    def exchange_counts(self, sent: Tensor) -> Tensor:
        """Row i of `sent` goes to member i; the rows that came, in the members' order. Small, before the data."""
        came = torch.empty_like(sent) if self.size > 1 else sent
        return self._run(
            COUNTS,
            sent,
            came,
            True,
            lambda: dist.all_to_all_single(came, sent, group=self.process_group, async_op=True),
        ).wait()

    def start_shift(self, x: Tensor, tag: int) -> Pending:
        """Send `x` to the next member and receive the previous one's. `tag` tells messages apart that are under way
        together.
        """
        came = torch.empty_like(x)
        after, before = (self.ranks[(self.index + i) % self.size] for i in (1, -1))
        ops = [
            dist.P2POp(dist.isend, x, after, self.process_group, tag),
            dist.P2POp(dist.irecv, came, before, self.process_group, tag),
        ]
        return self._run("send_recv", x, came, False, lambda: dist.batch_isend_irecv(ops))

    def _run(
        self,
        kind: str,
        counted: Tensor,
        result: Tensor,
        blocking: bool,
        begin: Callable[[], Any],
    ) -> Pending:
        """Begin a communication that counts as the bytes of `counted`, and note both its ends."""
        if self.size == 1:
            return Pending(lambda: result)
        number = next(self.tape.numbers)
        size = counted.numel() * counted.element_size()

        def note(kind: str, start: Clock, posted: bool = False) -> None:
            if self.tape.on:
                members, end = (self.name, self.ranks[0]), self.tape.now()
                inside = torch._C._current_graph_task_id() != -1
                self.tape.entries.append(Entry(kind, members, self.size, size, start, end, number, posted, inside))

        start = self.tape.now()
        begun = begin()
        works = begun if isinstance(begun, list) else [begun]
        if not blocking:
            note(kind, start, posted=True)

        def wait() -> Tensor:
            since = start if blocking else self.tape.now()
            for work in works:
                work.wait()
            note(kind if blocking else WAIT, since)
            return result

        return Pending(wait)


def cut_records(records: Sequence[Record], entries: list[Entry]) -> list[Record]:
    """A rank's actions cut into what they computed, posts of asynchronous communications among it, and what they
    communicated.

    A backward and a forward may run side by side, so each takes its own of the entries.
    """
    backward = deque(e for e in entries if e.backward)
    others = deque(e for e in entries if not e.backward)
    out: list[Record] = []
    for r in records:
        if r.kind not in ("F", "B", "W"):
            out.append(r)
            continue
        own = backward if r.kind == "B" else others
        since = r.start_ns
        posted: dict[int, Entry] = {}
        while own and own[0].end.wall <= r.end_ns:
            e = own.popleft()
            if e.kind == COUNTS:
                own[0] = own[0]._replace(start=e.start)
                continue
            out.append(r._replace(start_ns=since, end_ns=(e.end if e.posted else e.start).wall))
            since = e.end.wall
            if e.posted:
                posted[e.number] = e
                continue
            first = posted.pop(e.number, e)
            begun = e.start if first is e else first.end
            out.append(Record(first.kind.upper(), r.stage, r.micro_batch, begun.wall, e.end.wall))
        out.append(r._replace(start_ns=since))
    return out
