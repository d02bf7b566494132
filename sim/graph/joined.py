"""Pieces of programs → task graph: tasks numbered piece by piece, then messages, and who waits for whom.

All at once, column by column: what a piece waits for follows from its rank's pieces before it and from the messages of
its micro-batch, so nothing has to be walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from sim.graph.messages import NO_HOP, Messages
from sim.graph.pieces import Pieces
from sim.graph.taskgraph import Columns, Deadlock, Floats, Ints, Launches, Waits, ints, ragged
from sim.graph.template import COMPUTE

NO_TASK = -1


class Joined:
    """The pieces, laid out and joined: `columns` of all tasks, `base` the first of each piece, `class_index` its class.

    Raises:
        Deadlock: if an action waits for a message that nobody sends; names some. Ranks that wait for each other in a
            circle are found when the graph runs.
    """

    def __init__(self, pieces: Pieces, messages: Messages, blocking: bool) -> None:
        self.pieces, self.shapes, self.steps = pieces, pieces.shapes, pieces.steps
        self.shape, self.sorts_at, self.step, self.acts = np.concatenate(pieces.parts, axis=1)
        self.class_index = np.repeat(np.arange(len(pieces.begin)), np.diff([*pieces.begin, pieces.count]))
        self.sizes = ints([len(s.seconds) for s in self.shapes])
        many = self.sizes[self.shape]
        self.base = np.cumsum(many) - many
        self.follows = np.append(False, self.class_index[1:] == self.class_index[:-1])  # another piece of its rank
        self.waits: list[tuple[Ints, Ints]] = []
        launches, streams = self._inside(), self._streams()
        self._before()
        seconds, sort, step = self._tasks()
        sent = self._communicate(messages, blocking, len(seconds))
        self._epilogues()
        self._handles()
        self.waits += streams
        waits = Waits(*(np.concatenate(side) for side in zip(*self.waits, strict=True)))
        seconds, sort, step = (np.concatenate(both) for both in zip((seconds, sort, step), sent, strict=True))
        self.columns = Columns(seconds, sort, step, self.steps, waits, launches)

    def spans(self, now: Ints | None) -> list[tuple[Ints, Ints]]:
        """By class the first and the last task of each of its steps; `now`: where tasks stand by now."""
        piece = np.flatnonzero(self.acts)
        sides = [self.base[piece] + ints([s.acts[i] for s in self.shapes])[self.shape[piece]] for i in (0, 1)]
        first, last = sides if now is None else (now[side] for side in sides)
        ends = np.searchsorted(self.class_index[piece], np.arange(len(self.pieces.begin) + 1))
        return [(first[a:b], last[a:b]) for a, b in pairwise(ends.tolist())]

    def _tasks(self) -> tuple[Floats, Ints, Ints]:
        """Seconds, sort and step of all tasks but messages."""
        piece, row = ragged(self.sizes, self.shape)
        seconds = np.array(list(chain.from_iterable(s.seconds for s in self.shapes)))
        sorts_at = self.sorts_at - (np.cumsum(self.sizes) - self.sizes)[self.shape]
        return seconds[row], ints(self.pieces.sorts)[sorts_at[piece] + row], self.step[piece]

    def _each(self, lists: Sequence[Sequence[int]], at: Ints) -> tuple[Ints, Ints]:
        """Tasks of the pieces `at` that `lists` name by shape: which of `at` each belongs to, and its number."""
        pick, row = ragged(ints([len(x) for x in lists]), self.shape[at])
        return pick, self.base[at[pick]] + ints(list(chain.from_iterable(lists)))[row]

    def _wait(self, task: Ints, before: Ints) -> None:
        """Those of `task` wait for those of `before`."""
        self.waits.append((before, task))

    def _after_tail(self, task: Ints, piece: Ints) -> None:
        """Tasks wait for what comes last in a piece, its last computation aside."""
        pick, tail = self._each([s.tail for s in self.shapes], piece)
        self._wait(task[pick], tail)

    def _after(self, task: Ints, piece: Ints) -> None:
        """Tasks wait for all that a rank has done once it has run a piece."""
        done = self.done[piece]
        self._wait(task[done >= 0], done[done >= 0])
        self._after_tail(task, piece)

    def _take(self, piece: Ints, task: Ints) -> None:
        """Pieces wait for tasks before what needs input."""
        pick, takes = self._each([s.takes for s in self.shapes], piece)
        self._wait(takes, task[pick])

    def _inside(self) -> Launches:
        """What tasks wait for within their piece, and what they launch there."""
        pairs = ints(list(chain.from_iterable(chain.from_iterable(s.waits for s in self.shapes)))).reshape(-1, 2)
        piece, row = ragged(ints([len(s.waits) for s in self.shapes]), self.shape)
        self._wait(self.base[piece] + pairs[row, 1], self.base[piece] + pairs[row, 0])
        launched = list(chain.from_iterable(s.launches for s in self.shapes))
        piece, row = ragged(ints([len(s.launches) for s in self.shapes]), self.shape)
        task, lag_s = ints([i for i, _ in launched]), np.array([lag_s for _, lag_s in launched], dtype=np.float64)
        return Launches(self.base[piece], self.base[piece] + task[row], lag_s[row])

    def _streams(self) -> list[tuple[Ints, Ints]]:
        """Tasks that follow each other on a stream of a rank; finds the last computation by the end of each piece."""
        self.done, out = np.full(len(self.shape), NO_TASK), list[tuple[Ints, Ints]]()
        for stream in dict.fromkeys(chain.from_iterable(s.first for s in self.shapes)):
            first, last = (ints([x.get(stream, NO_TASK) for x in sides]) for sides in self._sides())
            at = np.flatnonzero(first[self.shape] >= 0)
            begin, end = (self.base[at] + x[self.shape[at]] for x in (first, last))
            same = self.class_index[at[1:]] == self.class_index[at[:-1]]
            out.append((end[:-1][same], begin[1:][same]))
            if stream == COMPUTE:
                latest = np.searchsorted(at, np.arange(len(self.shape)), "right") - 1
                known = (latest >= 0) & (self.class_index[at[latest]] == self.class_index)
                self.done = np.where(known, end[latest], NO_TASK)
        return out

    def _sides(self) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
        return [s.first for s in self.shapes], [s.last for s in self.shapes]

    def _before(self) -> None:
        """What waits for all that its rank did before, and what for the end of it alone."""
        at = np.flatnonzero(self.follows)
        pick, task = self._each([s.begins for s in self.shapes], at)
        self._after(task, at[pick] - 1)
        pick, task = self._each([[i for i in s.takes if i not in s.begins] for s in self.shapes], at)
        self._after_tail(task, at[pick] - 1)

    def _communicate(self, messages: Messages, blocking: bool, tasks: int) -> tuple[Floats, Ints, Ints]:
        """Joins pieces by messages, which are numbered from `tasks` on: their seconds, sorts and steps."""
        ways, many = messages.all_ways(), messages.schedule.micro_batches
        sent, sent_key, side = self._messages(messages, messages.gives)
        got, got_key, _ = self._messages(messages, messages.needs)
        way = ints([w.number for w in ways])[sent_key // many]
        message = tasks + np.arange(len(sent))
        of_key = np.full(len(ways) * many, NO_TASK)
        of_key[sent_key] = message
        got_message = of_key[got_key]
        if (got_message < 0).any():
            missing = dict.fromkeys(got_key[got_message < 0].tolist()[:5])
            raise Deadlock(f"deadlock: nobody sends {', '.join(messages.describe(key) for key in missing)}")
        self._after(message, sent)
        queues: dict[str, int] = {}
        queue = ints([queues.setdefault(w.queue, len(queues)) for w in messages.ways])[way]
        queue += self.class_index[sent] * len(queues)
        order = np.argsort(queue, kind="stable")
        same = queue[order[1:]] == queue[order[:-1]]
        self._wait(message[order[1:]][same], message[order[:-1]][same])
        if blocking:
            ready = self.follows[got]
            self._after(got_message[ready], got[ready] - 1)
            again = np.append(self.follows[1:], False)[sent]
            self._take(sent[again] + 1, message[again])
        self._take(got, got_message)
        seconds = np.array([w.seconds for w in messages.ways], dtype=np.float64)
        return seconds[way], ints([w.sort for w in messages.ways])[way], self._steps_of(sent, side)

    def _messages(self, messages: Messages, hops: Ints) -> tuple[Ints, Ints, Ints]:
        """Messages of all pieces over these hops, by stage and way: piece, key, number of its action in the step."""
        lists, acting = self.pieces.lists, np.flatnonzero(self.acts)
        step = self.step[acting]
        hop = hops[lists.stage[step], lists.way[step]]
        row, side = np.nonzero(hop != NO_HOP)
        piece, step = acting[row], step[row]
        number = self.class_index[piece] % messages.plan.lanes * len(messages.hops) + hop[row, side]
        return piece, number * messages.schedule.micro_batches + lists.micro_batch[step, side], side

    def _steps_of(self, piece: Ints, side: Ints) -> Ints:
        """The steps of messages: their action alone."""
        out: Ints = self.step[piece]
        if self.pieces.lists.stage.shape[1] > 1:
            for i, (step, which) in enumerate(zip(out.tolist(), side.tolist(), strict=True)):
                if len(self.steps[step]) > 1:
                    self.steps.append(self.steps[step][which : which + 1])
                    out[i] = len(self.steps) - 1
        return out

    def _epilogues(self) -> None:
        """What ends a rank's step waits for what it left running, the last on each stream."""
        epilogue = ints(self.pieces.epilogue)
        for stream in dict.fromkeys(chain.from_iterable(s.open for s in self.shapes)):
            left = ints([s.open.get(stream, NO_TASK) for s in self.shapes])
            at = np.flatnonzero((left[self.shape] >= 0) & (epilogue[self.class_index] > np.arange(len(self.shape))))
            at = at[np.append(self.class_index[at[1:]] != self.class_index[at[:-1]], True)[: len(at)]]
            self._take(epilogue[self.class_index[at]], self.base[at] + left[self.shape[at]])

    def _handles(self) -> None:
        """What waits for the gathers of its rank's prologue: the first that wants each."""
        known: dict[tuple[int, int, str], int] = {}
        late, soon = list[int](), list[int]()
        concerned = [bool(s.external or s.handles) for s in self.shapes]
        at = np.flatnonzero(np.array(concerned)[self.shape])
        columns = (x[at].tolist() for x in (self.shape, self.base, self.class_index, self.step, self.acts))
        for number, base, class_index, step, acts in zip(*columns, strict=True):
            shape, stage = self.shapes[number], self.steps[step][0].stage
            for i, handles in shape.external:
                for handle in handles:
                    task = known.pop((class_index, stage, handle), NO_TASK)
                    if task != NO_TASK:
                        late.append(base + i)
                        soon.append(task)
            if not acts:
                known.update({(class_index, stage, handle): base + i for handle, i in shape.handles})
        self._wait(ints(late), ints(soon))
