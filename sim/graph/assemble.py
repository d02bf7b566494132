"""Assemble placements of programs to a task graph: number the tasks, and find which task waits for which.

The waits of a placement follow from its rank's earlier placements and from the messages of its micro-batch. Therefore
the graph is built as whole columns, without following messages from rank to rank. A step of a large cluster has ten
thousands of placements, and NumPy handles a column of them in the time in which Python handles a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from msgspec import Struct

from sim.core.actions import Kind
from sim.core.columns import Floats, Ints, ints, ragged, ragged_rows
from sim.core.timeline import COMPUTE
from sim.graph.messages import NO_HOP, Messages
from sim.graph.placements import Placements
from sim.graph.taskgraph import Columns, Deadlock, Launches, Waits
from sim.programs.step_end import LAST_INPUT_GRADIENT, NORM_BEFORE

NO_TASK = -1
PAIRS_AT_ONCE = 1 << 17  # a few columns of so many stay in a core's cache


class _Ends(Struct, frozen=True):
    """Hold one end of all messages: the placement that sends or receives each, the message's key, and the action (0 or
    1) of the placement's step."""

    placement: Ints
    key: Ints
    action: Ints


class AssembledGraph:
    """Lay out and join placements: `columns` of all tasks, `first_task` and `class_of` of each placement.

    Task i of a placement has the number `first_task + i`; messages follow after all placements. Placements of one class
    of ranks follow each other in the order in which the class runs them.

    Raises:
        Deadlock: if an action waits for a message that nobody sends; the text names some. Ranks that wait for each
            other in a circle are found when the graph runs.
    """

    def __init__(self, placements: Placements, messages: Messages, blocking: bool) -> None:
        self.placements, self.patterns, self.steps = placements, placements.patterns, placements.steps
        self.pattern, self.kinds_at, self.step, self.is_action = np.concatenate(placements.parts, axis=1)
        # Placements are listed class by class, so the counts of each class give the class of every row.
        in_class = np.diff([*placements.begin, placements.count])
        self.class_of = np.repeat(np.arange(len(placements.begin)), in_class)
        self.tasks_in = ints([len(p.seconds) for p in self.patterns])
        tasks_placed = self.tasks_in[self.pattern]
        # The sum of all counts before a placement: task numbers run through the placements without gaps.
        self.first_task = np.cumsum(tasks_placed) - tasks_placed
        self.follows = np.append(False, self.class_of[1:] == self.class_of[:-1])  # another placement of its class
        self.pairs: list[tuple[Ints, Ints]] = []
        launches = self._launches(messages)
        # `_along_streams` runs first, because it notes each placement's last computation. Its pairs are added last: of
        # waits that end together the critical path takes the first, and a dependency explains more than the order on a
        # stream.
        along_streams = self._along_streams()
        self._after_earlier_placements()
        own = self._tasks()
        sent = self._messages(messages, blocking, first_message=len(own[0]))
        self._before_the_epilogue()
        self._after_input_gradients()
        self._for_gathered_parameters()
        self.pairs += along_streams
        waits = self._all_waits()
        seconds, task_kind, step = (np.concatenate(both) for both in zip(own, sent, strict=True))
        self.columns = Columns(seconds, task_kind, step, self.steps, waits, launches)

    def spans(self, moved: Ints | None) -> list[tuple[Ints, Ints]]:
        """Return, by class, the first and the last task of each action's step; `moved`: new numbers of tasks."""
        at = np.flatnonzero(self.is_action)
        sides = [self.first_task[at] + ints([p.acts[i] for p in self.patterns])[self.pattern[at]] for i in (0, 1)]
        first, last = sides if moved is None else (moved[side] for side in sides)
        # Classes ascend along the placements, so one search finds the range of each class.
        ends = np.searchsorted(self.class_of[at], np.arange(len(self.placements.begin) + 1))
        return [(first[a:b], last[a:b]) for a, b in pairwise(ends.tolist())]

    # Each of these functions adds pairs of tasks as two columns.

    def _waits(self, *, waiter: Ints, until: Ints) -> None:
        """Make task waiter[i] wait for the end of task until[i]."""
        self.pairs.append((until, waiter))

    def _waits_for_tail(self, *, waiter: Ints, placement: Ints) -> None:
        """Make waiter[i] wait for the communications that the result of placement[i] needs."""
        pick, tail = self._named([p.tail for p in self.patterns], placement)
        self._waits(waiter=waiter[pick], until=tail)

    def _waits_for_result(self, *, waiter: Ints, placement: Ints) -> None:
        """Make waiter[i] wait for the rank's last computation up to placement[i], and for the communications that the
        placement's result needs."""
        last = self.last_computation[placement]
        ran = last != NO_TASK
        self._waits(waiter=waiter[ran], until=last[ran])
        self._waits_for_tail(waiter=waiter, placement=placement)

    def _input_waits(self, *, placement: Ints, until: Ints) -> None:
        """Make every task that needs the input of placement[i] wait for until[i]; parameter gathers need no input."""
        pick, takes = self._named([p.takes for p in self.patterns], placement)
        self._waits(waiter=takes, until=until[pick])

    def _named(self, numbers: Sequence[Sequence[int]], placement: Ints) -> tuple[Ints, Ints]:
        """Return the tasks that `numbers` lists for each pattern: their index in `placement`, and their number."""
        pick, row = ragged(ints([len(of_pattern) for of_pattern in numbers]), self.pattern[placement])
        return pick, self.first_task[placement[pick]] + ints(list(chain.from_iterable(numbers)))[row]

    # Tasks of placements, and waits within a class of ranks.

    def _tasks(self) -> tuple[Floats, Ints, Ints]:
        """Return seconds, kind and step of all tasks except messages."""
        row, many = ragged_rows(self.tasks_in, self.pattern), self.tasks_in[self.pattern]
        seconds = np.array(list(chain.from_iterable(p.seconds for p in self.patterns)))[row]
        # `row` counts through the tasks of all patterns, `kinds_at` from the first task of the placement.
        row += np.repeat(self.kinds_at - (np.cumsum(self.tasks_in) - self.tasks_in)[self.pattern], many)
        return seconds, ints(self.placements.task_kinds)[row], np.repeat(self.step, many)

    def _launches(self, messages: Messages) -> Launches:
        """Return the launches inside each placement, and those of gradient norms along the pipeline."""
        launched = list(chain.from_iterable(p.launches for p in self.patterns))
        placement, row = ragged(ints([len(p.launches) for p in self.patterns]), self.pattern)
        task, lag_s = ints([i for i, _ in launched]), np.array([lag_s for _, lag_s in launched], dtype=np.float64)
        norms = self._norms(messages)
        return Launches(
            np.append(self.first_task[placement], norms.first),
            np.append(self.first_task[placement] + task[row], norms.second),
            np.append(lag_s[row], norms.lag_s),
        )

    def _norms(self, messages: Messages) -> Launches:
        """Return the launches of post-validation: what follows a rank's gradient norm starts, at the earliest, when the
        norm of the pipeline rank before it has arrived, which was sent when the same task started there."""
        before: dict[int, tuple[int, int]] = {}  # by pipeline: class of ranks and task
        found = list[tuple[int, int, float]]()
        for class_index, placement in enumerate(self.placements.epilogue):
            pattern = self.patterns[self.pattern[placement]]
            pipeline = class_index % messages.plan.pipelines
            for i, handles in pattern.external if placement >= 0 else ():
                if NORM_BEFORE in handles:
                    task = int(self.first_task[placement]) + i
                    if pipeline in before:
                        sender, sent = before[pipeline]
                        found.append((sent, task, messages.norm_s(sender, class_index)))
                    before[pipeline] = class_index, task
        first, second, lag_s = zip(*found, strict=True) if found else ((), (), ())
        return Launches(ints(first), ints(second), np.array(lag_s, dtype=np.float64))

    def _all_waits(self) -> Waits:
        """Return the waits inside placements (nine tenths of all), followed by `pairs`."""
        inside = ints(list(chain.from_iterable(chain.from_iterable(p.waits for p in self.patterns)))).reshape(-1, 2).T
        counts = ints([len(p.waits) for p in self.patterns])
        after = np.cumsum(counts[self.pattern])
        count = int(after[-1]) if len(after) else 0
        waits = Waits(
            *(np.empty(count + sum(map(len, side)), dtype=np.int64) for side in zip(*self.pairs, strict=True))
        )
        # Ten million pairs are written in place, part by part, because allocating memory costs more than filling it.
        parts = np.searchsorted(after, np.arange(0, count, PAIRS_AT_ONCE)).tolist()
        end = 0
        for part in map(slice, parts, [*parts[1:], len(after)]):
            row = ragged_rows(counts, self.pattern[part])
            begin, end = end, end + len(row)
            # Pairs are numbers within a pattern. The placement's first task is added to each.
            first = np.repeat(self.first_task[part], counts[self.pattern[part]])
            for column, side in zip(waits, inside, strict=True):
                np.add(side[row], first, out=column[begin:end])
        for column, others in zip(waits, zip(*self.pairs, strict=True), strict=True):
            np.concatenate(others, out=column[count:])
        return waits

    def _along_streams(self) -> list[tuple[Ints, Ints]]:
        """Return the pairs of tasks that follow each other on a rank's stream, from one placement to the next.

        `last_computation` gets the last task on the compute stream up to the end of each placement.
        """
        self.last_computation, out = np.full(len(self.pattern), NO_TASK), list[tuple[Ints, Ints]]()
        # A dict keeps the order of first appearance. A set of names would have another order in every process.
        for stream in dict.fromkeys(chain.from_iterable(p.first for p in self.patterns)):
            first_in = ints([p.first.get(stream, NO_TASK) for p in self.patterns])
            last_in = ints([p.last.get(stream, NO_TASK) for p in self.patterns])
            at = np.flatnonzero(first_in[self.pattern] != NO_TASK)
            first, last = (self.first_task[at] + x[self.pattern[at]] for x in (first_in, last_in))
            # Neighbours in this column may belong to different ranks.
            same_class = self.class_of[at[1:]] == self.class_of[at[:-1]]
            out.append((last[:-1][same_class], first[1:][same_class]))
            if stream == COMPUTE:
                # If a placement computes nothing, the last one before it in its class that does counts.
                latest = np.searchsorted(at, np.arange(len(self.pattern)), "right") - 1
                # Before the first computation `latest` is -1, which would index the last one.
                computed = (latest >= 0) & (self.class_of[at[latest]] == self.class_of)
                self.last_computation = np.where(computed, last[latest], NO_TASK)
        return out

    def _after_earlier_placements(self) -> None:
        """Make a placement's tasks wait for the placement before on the same rank.

        A task that waits for nothing inside its placement waits for the earlier placement's result. A task that needs
        input, but waits for something inside already, waits only for the earlier placement's tail.
        """
        at = np.flatnonzero(self.follows)
        # The placement before is at - 1, because a class's placements are listed in the order in which it runs them.
        pick, begins = self._named([p.begins for p in self.patterns], at)
        self._waits_for_result(waiter=begins, placement=at[pick] - 1)
        # A task that waits inside its placement starts after the tasks that begin it, so only the tail may be missing.
        later = [[i for i in p.takes if i not in p.begins] for p in self.patterns]
        pick, takes = self._named(later, at)
        self._waits_for_tail(waiter=takes, placement=at[pick] - 1)

    def _before_the_epilogue(self) -> None:
        """Make the epilogue of a rank wait for the last communication that actions left running on each stream."""
        epilogue = ints(self.placements.epilogue)
        placements = np.arange(len(self.pattern))
        for stream in dict.fromkeys(chain.from_iterable(p.open for p in self.patterns)):
            open_in = ints([p.open.get(stream, NO_TASK) for p in self.patterns])
            # A class without an epilogue has -1, which is below every placement, so none of its rows is taken.
            at = np.flatnonzero((open_in[self.pattern] != NO_TASK) & (epilogue[self.class_of] > placements))
            # The slice matters only for an empty column, to which `append` adds an entry, too.
            is_last = np.append(self.class_of[at[1:]] != self.class_of[at[:-1]], True)[: len(at)]
            at = at[is_last]
            left_running = self.first_task[at] + open_in[self.pattern[at]]
            self._input_waits(placement=epilogue[self.class_of[at]], until=left_running)

    def _after_input_gradients(self) -> None:
        """Make what an epilogue starts beside weight gradients wait for the rank's last input gradient."""
        for placement in self.placements.epilogue:
            pattern = self.patterns[self.pattern[placement]]
            for i, handles in pattern.external if placement >= 0 else ():
                if LAST_INPUT_GRADIENT in handles:
                    last = placement - 1
                    while all(action.kind not in (Kind.B, Kind.I) for action in self.steps[self.step[last]]):
                        last -= 1
                    self._waits_for_result(waiter=ints([self.first_task[placement] + i]), placement=ints([last]))

    def _for_gathered_parameters(self) -> None:
        """Make the first action that uses a parameter wait for the parameter's gather in the prologue of its rank.

        Later actions follow the first one on the compute stream. Few tasks are concerned, so they are looked up one by
        one.
        """
        gathers: dict[tuple[int, int, str], int] = {}  # by class of ranks, stage and handle
        waiters, until = list[int](), list[int]()
        concerned = [bool(p.external or p.handles) for p in self.patterns]
        at = np.flatnonzero(np.array(concerned)[self.pattern])
        columns = (x[at].tolist() for x in (self.pattern, self.first_task, self.class_of, self.step, self.is_action))
        for pattern_number, first, class_index, step, is_action in zip(*columns, strict=True):
            pattern, stage = self.patterns[pattern_number], self.steps[step][0].stage
            for i, handles in pattern.external:
                for handle in handles:
                    # `pop` gives the handle to the first user only.
                    gather = gathers.pop((class_index, stage, handle), NO_TASK)
                    if gather != NO_TASK:
                        waiters.append(first + i)
                        until.append(gather)
            if not is_action:
                gathers.update({(class_index, stage, handle): first + i for handle, i in pattern.handles})
        self._waits(waiter=ints(waiters), until=ints(until))

    # Messages between ranks.

    def _messages(self, messages: Messages, blocking: bool, first_message: int) -> tuple[Floats, Ints, Ints]:
        """Join placements by messages, one task for each; return seconds, kind and step of these tasks."""
        sent, taken = self._ends(messages, messages.gives), self._ends(messages, messages.needs)
        routes, many = messages.all_routes(), messages.schedule.micro_batches
        # A key is (pipeline * hops + hop) * micro-batches + micro-batch. Divided by the micro-batches it is an index of
        # `all_routes`.
        route = ints([r.number for r in routes])[sent.key // many]
        message = first_message + np.arange(len(sent.key))
        taken_message = self._matched(messages, sent.key, message, taken.key, len(routes) * many)
        first, last = self._between_exchanges(messages, blocking)
        begin, end = first[taken.placement], last[sent.placement]
        self._waits_for_result(waiter=message, placement=end)
        self._queue(messages, sent, route, message)
        if blocking:
            # A receive is posted when the action before it has ended, and the next action waits for the posted sends.
            posted = self.follows[begin]
            self._waits_for_result(waiter=taken_message[posted], placement=begin[posted] - 1)
            goes_on = np.append(self.follows[1:], False)[end]
            self._input_waits(placement=end[goes_on] + 1, until=message[goes_on])
        self._input_waits(placement=begin, until=taken_message)
        seconds = np.array([r.seconds for r in messages.routes], dtype=np.float64)
        return seconds[route], ints([r.task_kind for r in messages.routes])[route], self._steps_of(sent)

    def _between_exchanges(self, messages: Messages, blocking: bool) -> tuple[Ints, Ints]:
        """Return, for each placement, the first and the last of those that its rank runs between two exchanges of
        messages: itself, or both of two that exchange theirs together (`Schedule.joint`)."""
        first, last = (np.arange(len(self.pattern)) for _ in range(2))
        joint = messages.schedule.joint if blocking else ()
        for number, c in enumerate(messages.plan.classes if joint else ()):
            at = np.flatnonzero(self.is_action & (self.class_of == number))
            places = ints(list(joint[c.pipeline_rank]))
            first[at[places + 1]], last[at[places]] = at[places], at[places + 1]
        return first, last

    def _ends(self, messages: Messages, hops: Ints) -> _Ends:
        """Return one end of the messages over these hops, given by stage and direction; equal keys are one message."""
        lists, acting = self.placements.lists, np.flatnonzero(self.is_action)
        step = self.step[acting]
        hop = hops[lists.stage[step], lists.direction[step]]
        # `nonzero` keeps the order of rows, so messages are in the order in which each rank sends them.
        row, action = np.nonzero(hop != NO_HOP)
        placement, step = acting[row], step[row]
        pipeline = self.class_of[placement] % messages.plan.pipelines
        key = messages.first_key(pipeline, hop[row, action]) + lists.micro_batch[step, action]
        return _Ends(placement, key, action)

    def _matched(self, messages: Messages, sent_key: Ints, message: Ints, taken_key: Ints, keys: int) -> Ints:
        """Return the message that each receiver waits for."""
        # A table over all keys joins both ends without a search. With two chains (DualPipe) it is half empty.
        of_key = np.full(keys, NO_TASK)
        of_key[sent_key] = message
        taken = of_key[taken_key]
        if (taken == NO_TASK).any():
            missing = dict.fromkeys(taken_key[taken == NO_TASK].tolist()[:5])
            raise Deadlock(f"deadlock: nobody sends {', '.join(messages.describe(key) for key in missing)}")
        return taken

    def _queue(self, messages: Messages, sent: _Ends, route: Ints, message: Ints) -> None:
        """Make a class's messages on one stream wait for each other, in the order in which the class sends them."""
        numbers: dict[str, int] = {}
        queue = ints([numbers.setdefault(r.queue, len(numbers)) for r in messages.routes])[route]
        # NCCL runs the work of one communicator in order. Other senders and other channels do not wait.
        queue += self.class_of[sent.placement] * len(numbers)
        # Only a stable sort keeps each queue in the order of sending.
        order = np.argsort(queue, kind="stable")
        same = queue[order[1:]] == queue[order[:-1]]
        self._waits(waiter=message[order[1:]][same], until=message[order[:-1]][same])

    def _steps_of(self, sent: _Ends) -> Ints:
        """Return the steps of messages; of a step of two overlapping actions, a step of the action that sends."""
        out: Ints = self.step[sent.placement]
        # Only schedules that overlap a forward and a backward (as DualPipe) have steps of two actions.
        if self.placements.lists.stage.shape[1] > 1:
            for i, (step, action) in enumerate(zip(out.tolist(), sent.action.tolist(), strict=True)):
                if len(self.steps[step]) > 1:
                    self.steps.append(self.steps[step][action : action + 1])
                    out[i] = len(self.steps) - 1
        return out
