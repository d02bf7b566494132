"""The cluster as a process of one's own sees it while a step runs: `f(env, cluster)`.

`env` is SimPy's environment, whose clock is the step's: 0 at its start, in seconds. All ranks are global ones.

>>> def hot_gpu(env, cluster):
...     yield env.timeout(0.010)               # 10 ms into the step …
...     cluster.set_clock(0.8, ranks=3)        # … rank 3 computes at 80 % of its speed
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sim.core.errors import InputError
from sim.engine.link_loads import IN, OF_CLASS, OUT, LinkLoads
from sim.engine.link_rates import Flow
from sim.engine.live import LiveStep, Turn
from sim.graph.build import Built
from sim.graph.taskgraph import SHOWN, Message
from sim.ranks.plan import Plan
from sim.results.processes import MARK, Shown
from topology.shares import LINKS, LinkKind

if TYPE_CHECKING:
    from simpy import Environment
    from simpy.events import Event

Process = Callable[["Environment", "Cluster"], Generator["Event", Any, Any]]
Ranks = int | Iterable[int]
ACTIONS = tuple(dict.fromkeys(SHOWN.values()))


class Hold:
    """The compute streams of some ranks, asked for by `Cluster.hold`: `yield` its `granted`, then `release()` it. As
    a context manager it releases itself."""

    def __init__(self, cluster: Cluster, turn: Turn, ranks: tuple[int, ...], name: str) -> None:
        self._cluster, self._turn, self._ranks, self._name = cluster, turn, ranks, name
        self._since_s: float | None = None
        self._over = False
        turn.granted.callbacks.insert(0, self._begin)

    @property
    def granted(self) -> Event:
        """Fires when nothing computes on any of the ranks."""
        return self._turn.granted

    def _begin(self, _: Event) -> None:
        self._since_s = self._cluster.env.now

    def release(self) -> None:
        """Let the ranks compute again. Releasing twice does nothing."""
        if not self._over:
            self._over = True
            if self._since_s is not None:
                self._cluster.show(self._ranks, self._name, "", self._since_s)
            self._cluster.live.end_turn(self._turn)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Cluster:
    """The view of the cluster that a process reads and changes. Every method that takes `ranks` takes one, several, or
    None for all.

    Ranks that are simulated as one (`sim.simulation.simulate`, `apart`) can only be changed together.
    """

    def __init__(self, live: LiveStep, built: Built, plan: Plan, loads: LinkLoads) -> None:
        self.env, self.live = live.env, live
        self.shown: list[Shown] = []
        self.changed = False  # whether anything was done that may change a time
        self.waiting: dict[Event, str] = {}  # for what, in words
        self._built, self._plan, self._loads = built, plan, loads
        self._open: dict[tuple[str, int], tuple[str, str, float]] = {}  # by what and class: process, words, since when
        self._bandwidth: dict[tuple[str, int], float] = {}

    # What it is.

    @property
    def ranks(self) -> range:
        """All ranks of the step."""
        return range(self._plan.scenario.parallelism.ranks)

    @property
    def nodes(self) -> range:
        """All nodes on which it runs."""
        return range(self.node_of(len(self.ranks) - 1) + 1)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self._plan.scenario.cluster.gpus_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks on a node.

        Raises:
            InputError: if the step does not use it.
        """
        if node not in self.nodes:
            raise InputError(f"{self._who}: node {node}: the step runs on nodes 0 to {len(self.nodes) - 1}")
        per_node = self._plan.scenario.cluster.gpus_per_node
        return range(node * per_node, min((node + 1) * per_node, len(self.ranks)))

    # Waiting for the step.

    def when(
        self,
        kind: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        at: Literal["start", "end"] = "end",
    ) -> Event:
        """An event: the next start or end of a span of this kind, from now on; who waits wakes before anything that
        follows from it.

        `kind` as the timeline has it: F, B or W (a whole forward or backward of a stage), OPTIMIZER, SEND_F,
        ALL_REDUCE, …. Without `rank` any simulated rank's counts, without `stage` and `micro_batch` any.

        Raises:
            InputError: if the step has no such span at all; says which kinds it has.
        """
        if at not in ("start", "end"):
            raise InputError(f"{self._who}: when(at={at!r}): must be 'start' or 'end'")
        class_index = None if rank is None else self._plan.class_of(self._checked((rank,))[0])
        if kind in ACTIONS:
            tasks = self._action_ends(kind, class_index, stage, micro_batch, at == "end")
        else:
            tasks = self._tasks(kind, class_index, stage, micro_batch)
        given = {"rank": rank, "stage": stage, "micro_batch": micro_batch}
        words = ", ".join([repr(kind), *(f"{name}={value}" for name, value in given.items() if value is not None)])
        if not tasks:
            kinds = ", ".join(sorted({*self._built.graph.span_kinds}))
            raise InputError(f"{self._who}: when({words}): the step has no such span; its kinds are {kinds}")
        event = self.live.env.prompt()
        watched, happened = (
            (self.live.end_watched, self.live.end) if at == "end" else (self.live.begin_watched, self.live.start)
        )
        for task in tasks:
            if happened[task] < 0:
                watched.setdefault(task, []).append(event)
        self.waiting[event] = f"{self._who} waits for the {at} of {words}"
        event.callbacks.append(self._woken)
        return event

    def _woken(self, event: Event) -> None:
        self.waiting.pop(event, None)

    def _action_ends(
        self, kind: str, class_index: int | None, stage: int | None, micro_batch: int | None, last: bool
    ) -> list[int]:
        """The first, or the last, task of every such action."""
        return [
            task
            for c, acted in enumerate(self._built.actions)
            if class_index in (None, c)
            for a, task in zip(acted.listed.actions, (acted.last if last else acted.first).tolist(), strict=True)
            if SHOWN[a.kind] == kind and stage in (None, a.stage) and micro_batch in (None, a.micro_batch)
        ]

    def _tasks(self, kind: str, class_index: int | None, stage: int | None, micro_batch: int | None) -> list[int]:
        """All tasks that show a span of this kind, class of ranks, stage and micro-batch; None: any."""
        graph = self._built.graph
        task, row, rows = graph.slots
        fits = (rows[:, 2] == graph.span_kinds.get(kind, -1))[row]
        for wanted, column in ((class_index, rows[row, 0]), (stage, graph.stages[task])):
            if wanted is not None:
                fits &= column == wanted
        if micro_batch is not None:
            fits &= graph.micro_batches[task] == micro_batch
        found: list[int] = np.unique(task[fits]).tolist()
        return found

    # Changing it.

    def set_clock(self, scale: float, *, ranks: Ranks | None = None) -> None:
        """Let ranks compute at `scale` times their speed from now on (1: as the scenario says; 0.5: half as fast; 0:
        not at all). Counts from the scenario's own speed, not from the one before. All of a computation stretches, what
        the GPU waits in it for its host too.

        Raises:
            InputError: for a scale below zero, or ranks that cannot be changed by themselves.
        """
        self._number("set_clock", "scale", scale)
        for c in self._classes(self.chosen(ranks)):
            if self.live.clock[c] != scale:
                self.changed = True
                self.live.set_clock(c, scale)
                self._follow("CLOCK", c, f"clock × {scale:g}", scale != 1.0)

    def set_link(self, link: LinkKind, scale: float, *, ranks: Ranks | None = None) -> None:
        """Let a link of ranks carry `scale` times its bytes/s from now on, both ways (0: nothing).

        `link`: `nic` (a GPU's share of its node's NICs), `domain` (its way into the NVLink domain, or to the PCIe
        host), `spine` (its share above the leaf switches), `host` (its PCIe link). All NICs of a node:
        `ranks=cluster.ranks_of(node)`. Counts from the scenario's own bandwidth.

        Raises:
            InputError: for another link, a scale below zero, or ranks that cannot be changed by themselves.
        """
        if link not in LINKS:
            raise InputError(f"{self._who}: set_link({link!r}): must be one of {', '.join(LINKS)}")
        self._number("set_link", "scale", scale)
        for c in self._classes(self.chosen(ranks)):
            if self._bandwidth.get((link, c), 1.0) != scale:
                self.changed = True
                self._bandwidth[link, c] = scale
                for number in self._numbers(c, link):
                    self.live.scale_link(number, scale)
                self._follow(f"LINK_{link.upper()}", c, f"{link} × {scale:g}", scale != 1.0)

    def pause(self, ranks: Ranks | None = None) -> None:
        """Let ranks stand still at once: their computations stop where they are, and nothing of theirs starts.
        Messages and collectives under way go on. Two calls need two of `resume`."""
        for c in self._classes(self.chosen(ranks)):
            self.changed = True
            self.live.pause(c)
            self._follow("PAUSE", c, "standing still", True)

    def resume(self, ranks: Ranks | None = None) -> None:
        """Take back a `pause`.

        Raises:
            InputError: if a rank is not paused.
        """
        classes = self._classes(self.chosen(ranks))
        for c in classes:
            if not self.live.paused[c]:
                raise InputError(f"{self._who}: resume: rank {self._plan.classes[c].rank} is not paused")
        for c in classes:
            self.live.resume(c)
            if not self.live.paused[c]:
                self._follow("PAUSE", c, "", False)

    def hold(self, ranks: Ranks | None = None, name: str = "HOLD") -> Hold:
        """Ask for the compute streams of ranks, to block them with work of one's own.

        `yield hold.granted` waits until the computation under way on each has ended; then nothing computes there until
        `hold.release()`. Messages and collectives go on. The timeline shows it as a span of kind `name`.
        """
        chosen = self.chosen(ranks)
        classes = self._classes(chosen)
        self.changed = True
        return Hold(self, self.live.take_turn(classes), chosen, name)

    def transfer(
        self,
        n_bytes: float,
        *,
        source: int | None = None,
        target: int | None = None,
        bytes_per_s: float | None = None,
        name: str = "TRANSFER",
    ) -> Event:
        """Send bytes beside the step's own messages, which share the links with them; the event: the last is there.

        Between two ranks they take the way of a message of the step. Where `source` or `target` is left out they come
        from, or go to, something outside (storage, another job), over the other rank's NICs and PCIe link, and no
        faster than `bytes_per_s`.

        Raises:
            InputError: without any rank, or for bytes or a speed that are not above zero.
        """
        self._number("transfer", "n_bytes", n_bytes, above=True)
        if bytes_per_s is not None:
            self._number("transfer", "bytes_per_s", bytes_per_s, above=True)
        ends = self.chosen([rank for rank in (source, target) if rank is not None])
        if not ends or source == target:
            raise InputError(f"{self._who}: transfer: needs a source or a target, which differ")
        classes = self._classes(ends)
        if len(ends) == 2:
            flow, seconds = self._message(classes[0], classes[1], n_bytes)
        else:
            flow, seconds = self._outside(classes[0], n_bytes, OUT if target is None else IN)
        if bytes_per_s is not None and n_bytes / bytes_per_s > seconds - flow.quiet_s:
            slower = (seconds - flow.quiet_s) * bytes_per_s / n_bytes
            flow = Flow(flow.quiet_s, {link: load * slower for link, load in flow.path.items()})
            seconds = flow.quiet_s + n_bytes / bytes_per_s
        self.changed = True
        who, begin_s = self._who, self.env.now
        done = self.live.transfer(flow, seconds)
        done.callbacks.append(lambda _: self.show(ends, name, f"{n_bytes / 1e6:,.6g} MB", begin_s, who))
        return done

    def mark(self, text: str, ranks: Ranks = 0) -> None:
        """Leave a mark on the timeline, now, in the row of ranks; changes nothing."""
        self.show(self.chosen(ranks), MARK, text, self.env.now)

    # What stands behind it.

    def show(self, ranks: tuple[int, ...], kind: str, text: str, start_s: float, who: str = "") -> None:
        """Leave a span from then to now on the timeline."""
        self.shown.append(Shown(who or self._who, ranks, kind, text, start_s, self.env.now))

    def close(self, end_s: float) -> None:
        """End what is still open when the step ends."""
        for (kind, c), (who, text, since_s) in self._open.items():
            self.shown.append(Shown(who, (self._plan.classes[c].rank,), kind, text, since_s, end_s))

    def standing(self) -> list[str]:
        """Return what keeps ranks and links from going on, in words."""
        live, out = self.live, list[str]()
        for c, of_ranks in enumerate(self._plan.classes):
            if live.paused[c]:
                out.append(f"rank {of_ranks.rank} is paused")
            if not live.clock[c]:
                out.append(f"rank {of_ranks.rank} has clock 0")
            if live.is_held(c):
                out.append(f"rank {of_ranks.rank} is held")
        down = [(link, self._plan.classes[c].rank) for (link, c), scale in self._bandwidth.items() if not scale]
        return out + [f"the {link} link of rank {rank} carries nothing" for link, rank in down]

    def _follow(self, kind: str, c: int, text: str, still: bool) -> None:
        """End the span of this kind on a class, and begin the next if it is `still` changed."""
        before = self._open.pop((kind, c), None)
        if before is not None and before[2] < self.env.now:
            self.show((self._plan.classes[c].rank,), kind, before[1], before[2], before[0])
        if still:
            self._open[kind, c] = (self._who, text, self.env.now)

    def _message(self, sender: int, receiver: int, n_bytes: float) -> tuple[Flow, float]:
        pricing = self._loads.pricing
        source, target = (pricing.plan.classes[c].rank for c in (sender, receiver))
        seconds = pricing.send(source, target, n_bytes, forward=None).seconds
        return self._loads.message(Message(sender, receiver, n_bytes, seconds)), seconds

    def _outside(self, c: int, n_bytes: float, way: int) -> tuple[Flow, float]:
        links = {name: self._numbers(c, name)[way] for name in ("nic", "host")}
        rate = min(self._loads.capacity_bytes_per_s[number] for number in links.values())
        quiet_s = self._plan.scenario.cluster.inter_node.latency_s
        return Flow(quiet_s, dict.fromkeys(links.values(), rate)), quiet_s + n_bytes / rate

    def _numbers(self, c: int, link: str) -> tuple[int, int]:
        """The numbers of a class's link, out and in."""
        first = OF_CLASS * c + 2 * LINKS.index(link)
        return first + OUT, first + IN

    def _classes(self, ranks: tuple[int, ...]) -> list[int]:
        """The classes that these ranks make up.

        Raises:
            InputError: if a class has other ranks, too.
        """
        classes, chosen = list(dict.fromkeys(map(self._plan.class_of, ranks))), set(ranks)
        for c in classes:
            others = [rank for rank in self._plan.classes[c].ranks if rank not in chosen]
            if others:
                mine = min(chosen.intersection(self._plan.classes[c].ranks))
                more = " and others" if len(others) > 1 else ""
                raise InputError(
                    f"{self._who}: rank {mine} is simulated as one with rank {others[0]}{more}; name all of them, or "
                    f"tell it apart: simulate(…, apart=[{mine}])"
                )
        return classes

    def chosen(self, ranks: Ranks | None) -> tuple[int, ...]:
        """Ranks given as one, several, or None for all.

        Raises:
            InputError: for one that the step does not have.
        """
        if ranks is None:
            return tuple(self.ranks)
        return self._checked(ranks if isinstance(ranks, Iterable) else (ranks,))

    def _checked(self, ranks: Iterable[int]) -> tuple[int, ...]:
        chosen = tuple(dict.fromkeys(ranks))
        for rank in chosen:
            if isinstance(rank, bool) or not isinstance(rank, Integral) or rank not in self.ranks:
                raise InputError(f"{self._who}: rank {rank!r}: the step has ranks 0 to {len(self.ranks) - 1}")
        return chosen

    def _number(self, method: str, name: str, value: float, above: bool = False) -> None:
        right = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
        if not right or value < 0 or (above and not value):
            raise InputError(f"{self._who}: {method}({name}={value!r}): must be {'above' if above else 'at least'} 0")

    @property
    def _who(self) -> str:
        """The process that runs now."""
        running = self.env.active_process
        return running.name if running is not None else "process"
