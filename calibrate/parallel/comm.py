"""Groups of ranks that compute one block together, and the record of their communications.

Every communication inside a block goes through a `Group`, which writes its start and end to the rank's `Tape`. The tape
splits a step's forwards and backwards into computations and communications, as the simulator's programs
(`sim.core.program`) are split. A blocking collective is one entry. An asynchronous one has two: its start ("posted")
and its wait.
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
from sim.core.timeline import ACTION_KINDS

all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

WAIT = "wait"
COUNTS = "counts"  # the exchange of counts before an all-to-all of uneven parts, of which it is a part


class Clock(NamedTuple):
    """A moment: nanoseconds on the clock that all ranks of a machine share, and of this thread's CPU time."""

    wall: int
    cpu: int


class Entry(NamedTuple):
    """A blocking communication, or the start or the wait of an asynchronous one.

    The start has `posted`, the wait has the kind `WAIT`, and both have the same `number`. `backward`: it happened while
    autograd ran, which may be beside a forward if actions are paired. `members`: name and first rank of the group,
    which has `ranks` ranks. `bytes` as nccl-tests counts them (see `sim.core.program.Comm`).
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
    """This rank's communications, in order.

    A GPU runs behind its host, and waiting for it at every entry would empty its queue. So on a GPU a moment is an
    event among the queued kernels. Events are recorded only during a calibration (`rehearsing`); `moments` tells their
    times.
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
        """Return this moment; on a GPU the number of an event for `moments`, or 0 if nothing is recorded."""
        if self.device == "cpu":
            return Clock(time.perf_counter_ns(), time.thread_time_ns())
        if not self.on:
            return Clock(0, 0)
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        return Clock(len(self.events) - 1, 0)

    def moments(self) -> Callable[[Clock], Clock]:
        """Return a function that turns a `Clock` of `now` into nanoseconds, and forget all events.

        On a GPU nanoseconds count from the first event.
        """
        if self.device == "cpu":
            return lambda clock: clock
        events, self.events = self.events, []
        torch.cuda.synchronize()
        at = [round(events[0].elapsed_time(e) * 1e6) for e in events]
        return lambda clock: Clock(at[clock.wall], at[clock.wall])

    def take(self) -> list[Entry]:
        """Return the entries so far and forget them."""
        taken, self.entries = self.entries, []
        return taken


class Pending(NamedTuple):
    """An asynchronous communication under way. `wait` returns its result."""

    wait: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's group along one dimension of the mesh. If it has only this rank, communications do nothing.

    `second`: another process group of the same ranks, for backwards beside forwards (`ep_overlap`). `name` as in
    `sim.ranks.plan`. `ranks` are global ranks in ascending order; `index` is this rank's position among them.
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
        """Sum `x` over all members, in place."""
        return self.start_all_reduce(x, op, blocking=True).wait()

    def start_all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, blocking: bool = False
    ) -> Pending:
        """Start an `all_reduce`."""
        return self._run(
            "all_reduce", x, x, blocking, lambda: dist.all_reduce(x, op, group=self.process_group, async_op=True)
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [rows, …] → [size · rows, …] in the members' order."""
        return self.start_all_gather(x, blocking=True).wait()

    def start_all_gather(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start an `all_gather`."""
        x = x.contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if self.size > 1 else x
        return self._run(
            "all_gather", out, out, blocking, lambda: all_gather(out, x, group=self.process_group, async_op=True)
        )

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over all members and return this rank's part: [size · rows, …] → [rows, …]."""
        return self.start_reduce_scatter(x, blocking=True).wait()

    def start_reduce_scatter(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start a `reduce_scatter`."""
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if self.size > 1 else x
        return self._run(
            "reduce_scatter", x, out, blocking, lambda: reduce_scatter(out, x, group=self.process_group, async_op=True)
        )

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], backward: bool = False) -> Tensor:
        """Send `sent[i]` rows of `x` to member i and receive `received[i]` rows from it, in the members' order."""
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
        """Send row i of `sent` to member i; return the received rows in the members' order."""
        came = torch.empty_like(sent) if self.size > 1 else sent
        return self._run(
            COUNTS,
            sent,
            came,
            True,
            lambda: dist.all_to_all_single(came, sent, group=self.process_group, async_op=True),
        ).wait()

    def start_shift(self, x: Tensor, tag: int) -> Pending:
        """Start sending `x` to the next member and receiving from the previous one.

        `tag` tells messages apart that are under way at the same time.
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
        """Begin a communication of the bytes of `counted`, and record its start and its wait."""
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
    """Split a rank's actions into computations and communications.

    The start of an asynchronous communication counts as computation. A backward and a forward may run side by side, so
    each takes only its own entries.
    """
    backward = deque(e for e in entries if e.backward)
    others = deque(e for e in entries if not e.backward)
    out: list[Record] = []
    for r in records:
        if r.kind not in ACTION_KINDS:
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
