"""Runs a step with processes of one's own beside it, and says what they did."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

import simpy
from msgspec.structs import replace
from simpy.core import EmptySchedule

from sim.core.errors import InputError
from sim.engine.link_loads import LinkLoads
from sim.engine.live import LiveStep
from sim.engine.run import ran
from sim.engine.shared_links import RunOutcome
from sim.graph.build import Built
from sim.prices.rank_prices import Pricing
from sim.processes.cluster import Cluster, Process
from sim.ranks.plan import Plan
from sim.results.processes import ProcessesRun
from topology.shares import LINKS

if TYPE_CHECKING:
    from simpy.events import Event

STUCK_EVENTS = 1_000_000  # without a task that starts or ends: the step will not go on


def run_live(
    processes: Sequence[Process], built: Built, pricing: Pricing, plan: Plan, alone: RunOutcome
) -> tuple[RunOutcome, ProcessesRun]:
    """Run a graph with processes beside it; `alone`: the step without them.

    Raises:
        InputError: for what is no process; for a wrong call in one; where the step cannot end because of one.
    """
    loads = LinkLoads(pricing, frozenset(LINKS))
    flows = loads.flows(built.graph)
    live = LiveStep(built.graph, flows)
    cluster = Cluster(live, built, plan, loads)
    names = tuple(_name(f) for f in processes)
    for f in processes:
        live.env.process(_generator(f, live.env, cluster))
    start = live.env.event()
    start.callbacks.append(lambda _: live.begin())
    start.succeed()  # after the processes' first lines: what they change at once holds from the beginning
    _run(live, cluster)
    start_s, end_s = live.start[: live.tasks], live.end[: live.tasks]
    times = ran(built.graph, start_s, end_s, "simpy", live.events)
    cluster.close(times.step_s)
    times = replace(times, stretch=live.stretches())
    waited = tuple(dict.fromkeys(cluster.waiting.values()))
    lost_s = max(0.0, alone.times.step_s - alone.alone_s)
    outcome = RunOutcome(built, times, times.step_s - lost_s, alone.links, flows if alone.flows is not None else None)
    return outcome, ProcessesRun(names, tuple(cluster.shown), waited, cluster.changed)


def _generator(f: Process, env: simpy.Environment, cluster: Cluster) -> Generator[Event, Any, Any]:
    try:
        inspect.signature(f).bind(env, cluster)
    except TypeError:
        raise InputError(f"processes: {_name(f)}: must take two arguments, (env, cluster)") from None
    generator: Any = f(env, cluster)
    if not inspect.isgenerator(generator):
        raise InputError(
            f"processes: {_name(f)}: must be a generator function: wait with `yield`, such as `yield env.timeout(0.01)`"
        )
    return cast(Generator["Event", Any, Any], generator)


def _name(f: Process) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _run(live: LiveStep, cluster: Cluster) -> None:
    """Run the clock until the last task has ended."""
    quiet, before = 0, -1
    try:
        while not live.done.processed:
            live.env.step()
            quiet = quiet + 1 if live.left == before else 0
            before = live.left
            if quiet > STUCK_EVENTS:
                raise _stuck(live, cluster, f"{STUCK_EVENTS:,} events passed without one that ended")
    except EmptySchedule:
        raise _stuck(live, cluster, "they wait for what never comes") from None
    except RuntimeError as error:
        if "Invalid yield value" not in str(error):
            raise
        value = str(error).rpartition("Invalid yield value")[2].strip().strip('"')
        raise InputError(
            f"processes: {value} was yielded, which is no event; wait with env.timeout(seconds), cluster.when(…), "
            "hold.granted or what cluster.transfer returns"
        ) from None


def _stuck(live: LiveStep, cluster: Cluster, else_because: str) -> InputError:
    """Why a step does not go on: what a process has stopped, or what else was seen."""
    reasons = cluster.standing() or [else_because]
    return InputError(f"processes: the step never ends ({live.left} tasks are left): {'; '.join(reasons)}")
