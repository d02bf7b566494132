"""Find out which communications of a step share links, and run the step so that they slow each other.

A link that only one stream of a rank uses is never shared. For the other links a first run shows whether they are ever
overloaded. If none is, its times are the result. Otherwise the graph runs again with rates that change on every arrival
and departure. An action that is one task hides its communications; the actions that overlap with others on an
overloaded link are placed task by task before that run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Schedule
from sim.core.columns import Floats, Ints, ragged
from sim.core.engines import Engine
from sim.core.timeline import HOST, TO_HOST
from sim.engine.link_loads import IN, OF_CLASS, OUT, LinkLoads
from sim.engine.link_rates import FULL, Flow, Flows
from sim.engine.run import Times, run_contended, run_static
from sim.graph.build import Built
from sim.graph.compiled import ClassAction, Fineness
from sim.graph.taskgraph import TaskGraph, WholeAction
from sim.prices.rank_prices import Pricing
from sim.programs.streams import streams_of_groups
from topology.shares import LINKS, links_between, links_of

Use = tuple[str, int, str]  # use of a link: its name, the direction, and the stream that uses it
FlowOnLink = tuple[int, float, int, float]  # a flow's number, its quiet time, a link, load ÷ capacity
BLIP = 1e-12  # part of a step; shorter overlaps come from the rounding of sums
PART = 4  # factor by which the number of examined ranks grows
SIMPY_TASKS = 5000  # the most tasks that run on SimPy by default: 0.02 s longer, and as long for loading SimPy
SHARING_TASKS = 1250  # the same with shared links, where a task takes four times as long
ROUNDS = 6  # rounds of placing more actions task by task; the last one places all that use shared links


class OverloadedLinks(Struct, frozen=True):
    """Hold the kinds of links that are overloaded on some rank, and the actions that hide part of the load."""

    links: frozenset[str]
    hiding: frozenset[ClassAction]


def overloaded(
    shared: frozenset[str], flows: Flows, hidden: dict[int, Flow], built: Built, times: Times
) -> OverloadedLinks:
    """Return which of the links `shared` are overloaded if all flows are as fast as alone.

    `hidden`: peak loads of actions that are one task; they are assumed from the action's start to its end.
    """
    # Many kinds share one `Flow`, which is expanded once. Identity tells flows apart, because comparing is slower.
    flow_of_kind = {**flows.by_task_kind, **hidden}
    kinds = list({id(flow): flow for flow in flow_of_kind.values()}.values())
    numbers = {id(flow): i for i, flow in enumerate(kinds)}
    # One number beyond the last stands for kinds without a flow.
    number_of = np.full(len(built.graph.task_kinds), len(kinds))
    number_of[list(flow_of_kind)] = [numbers[id(flow)] for flow in flow_of_kind.values()]
    start, end, task_kind = times.start_s, times.end_s, built.graph.task_kind
    of_task = number_of[task_kind]
    names: set[str] = set()  # no `unique` and `isin` here: numpy loads its masked arrays for them
    hiding = np.zeros(len(task_kind), dtype=bool)
    hides = np.zeros(len(number_of), dtype=bool)
    hides[list(hidden)] = True
    for rows in _parts(kinds, flows.capacity_bytes_per_s, bool(hidden)):
        number, quiet_s, link, load = map(np.array, zip(*rows, strict=True))
        # The last count is that of kinds without a flow: zero rows.
        counts = np.bincount(number, minlength=len(kinds) + 1)
        task = np.flatnonzero(counts[of_task])
        pick, entry = ragged(counts, of_task[task])
        task = task[pick]
        begin_s, until_s = start[task] + quiet_s[entry], end[task]
        over = _over_seconds(link[entry], begin_s, until_s, load[entry], BLIP * end.max()) > 0
        # Halved and taken modulo the number of names, a link's number gives its name.
        crowds = np.bincount(link[entry[over]] // 2 % len(LINKS), minlength=len(LINKS))
        names |= {name for name, count in zip(LINKS, crowds.tolist(), strict=True) if count}
        hiding[task[over]] = hides[task_kind[task[over]]]
        # All kinds of shared links are overloaded and nothing is hidden, so other ranks add nothing.
        if not hidden and names == shared:
            break
    return OverloadedLinks(frozenset(names), _places(built, set(np.flatnonzero(hiding).tolist())))


def _parts(flows: list[Flow], capacity_bytes_per_s: dict[int, float], whole: bool) -> Iterator[list[FlowOnLink]]:
    """Yield the loads of flows on links in growing parts of the ranks, or all at once (`whole`).

    If nothing is hidden, the first few ranks mostly show which kinds of links are overloaded.
    """
    begin, end, links = 0, OF_CLASS, len(capacity_bytes_per_s)
    while begin < links:
        rows = [
            (number, flow.quiet_s, link, load / capacity_bytes_per_s[link])
            for number, flow in enumerate(flows)
            for link, load in flow.path.items()
            if whole or begin <= link < end
        ]
        if rows:
            yield rows
        begin, end = links if whole else end, end * PART


def _places(built: Built, tasks: set[int]) -> frozenset[ClassAction]:
    """Return the actions that begin with one of `tasks`, each with its class of ranks."""
    return frozenset(
        (i, action)
        for i, acted in enumerate(built.actions if tasks else ())
        for action, first in zip(acted.listed.actions, acted.first.tolist(), strict=True)
        if first in tasks
    )


def _whole_on_shared(loads: LinkLoads, built: Built) -> frozenset[ClassAction]:
    """Return all actions that are one task and wait for communication on shared links."""
    graph = built.graph
    on_shared = [isinstance(kind.work, WholeAction) and bool(loads.peak(kind.work).path) for kind in graph.task_kinds]
    return _places(built, set(np.flatnonzero(np.array(on_shared)[graph.task_kind]).tolist()))


def _over_seconds(link: Ints, begin_s: Floats, until_s: Floats, load: Floats, blip_s: float) -> Floats:
    """Return for how many seconds of each interval its link is overloaded (a load above 1)."""
    n = len(link)
    # Ends sort before starts, so the load of a flow of no duration would stay; it is left out.
    load = np.where(until_s > begin_s, load, 0.0)
    links, times = np.concatenate([link, link]), np.concatenate([until_s, begin_s])
    order = np.argsort(times, kind="stable")  # at one instant ends come first
    links = links.astype(np.min_scalar_type(links.max()))[order]  # 16-bit integers sort several times faster
    by_link = np.argsort(links, kind="stable")
    links, order = links[by_link], order[by_link]
    # One running sum serves all links, because each link's loads sum to zero at its end.
    level = np.cumsum(np.concatenate([-load, load])[order])
    # The last change of a link lasts no time, because the next row belongs to another link.
    lasts = np.diff(times[order], append=0.0) * np.append(links[1:] == links[:-1], False)
    reached = np.cumsum(np.where((level > FULL) & (lasts > blip_s), lasts, 0.0))
    before = np.empty(2 * n)
    # In the order of flows again: a flow's seconds are the overloaded seconds at its end minus those at its start.
    before[order] = np.concatenate([[0.0], reached[:-1]])
    return np.where(load > 0, before[:n] - before[n:], 0.0)


def shared_links(pricing: Pricing, schedule: Schedule) -> frozenset[str]:
    """Return the links of `topology.shares.LINKS` that several streams of some rank use in one direction."""
    plan, training = pricing.plan, pricing.plan.scenario.training
    activations = training is not None and bool(training.activation_offload)
    parameters = training is not None and training.parameter_offload
    offload = activations or parameters
    alike: dict[tuple[object, ...], set[Use]] = {}
    for c in plan.classes:
        context = pricing.context(c.rank)
        if context not in alike:
            alike[context] = _group_uses(pricing, c.rank)
    uses = [set(alike[pricing.context(c.rank)]) for c in plan.classes]
    _add_hops(uses, pricing, schedule)
    for each in uses if offload else ():
        each |= {("host", IN, HOST)} | ({("host", OUT, HOST)} if activations else set())
        each |= {("host", OUT, TO_HOST), ("host", IN, TO_HOST)} if parameters else set()
    users = [Counter((link, way) for link, way, _ in each) for each in uses]
    shared = {link for each in users for (link, _), n in each.items() if n > 1}
    return frozenset(shared if offload else shared - {"host"})


def _add_hops(uses: list[set[Use]], pricing: Pricing, schedule: Schedule) -> None:
    """Add the messages between stages to the uses of links by each class of ranks."""
    plan, of_stage = pricing.plan, schedule.rank_of_stage  # virtual stages repeat the same pairs of ranks
    # A hop within one rank uses no link.
    pairs = {pair for chain in schedule.chains for pair in pairwise([of_stage[s] for s in chain]) if len({*pair}) > 1}
    for before, after, pipeline in ((*pair, pipeline) for pair in pairs for pipeline in range(plan.pipelines)):
        a, b = before * plan.pipelines + pipeline, after * plan.pipelines + pipeline
        links = links_between(pricing.network, plan.classes[a].rank, plan.classes[b].rank)
        # Both directions at both ends: activations go from a to b, gradients come back.
        uses[a].update([u for n in links for u in ((n, OUT, f"to {b}"), (n, IN, f"from {b}"))])
        uses[b].update([u for n in links for u in ((n, IN, f"from {a}"), (n, OUT, f"to {a}"))])


def _group_uses(pricing: Pricing, rank: int) -> set[Use]:
    """Return the uses of links by a rank's collectives during forwards and backwards."""
    plan = pricing.plan
    return {
        (link, way, stream)
        for name, stream in streams_of_groups(plan).items()
        if plan.group_size(name) > 1
        for link in links_of(pricing.network, pricing.group(name, rank))
        for way in (OUT, IN)
    }


class RunOutcome(Struct, frozen=True):
    """Hold a step that was built and run.

    `alone_s`: its seconds without overloaded links. `links`: the kinds of links that are overloaded. `flows`: the flows
    on shared links; None if no link is overloaded.
    """

    built: Built
    times: Times
    alone_s: float
    links: frozenset[str]
    flows: Flows | None


Make = Callable[[Fineness], Built]


def _on_simpy(graph: TaskGraph, flows: Flows, engine: Engine) -> bool:
    """Tell whether a graph runs on SimPy's clock.

    `engine`: "auto" takes SimPy for graphs that are small enough for the difference in time not to matter.
    """
    most = SHARING_TASKS if flows.by_task_kind else SIMPY_TASKS
    return engine == "simpy" or (engine == "auto" and len(graph) <= most)


def run_graph(graph: TaskGraph, flows: Flows, engine: Engine) -> Times:
    """Run a graph on SimPy's clock or without an event queue; both give the same times."""
    if _on_simpy(graph, flows, engine):
        # Imported here, because loading SimPy takes time and larger steps do not use it.
        from sim.engine.on_simpy import run_simpy

        return run_simpy(graph, flows)
    return run_contended(graph, flows)


def run_alone(make: Make, fineness: Fineness, engine: Engine) -> RunOutcome:
    """Build a step and run it as if no link were overloaded; its time is never above that of `run_step`."""
    built = make(fineness)
    times = run_graph(built.graph, Flows(), engine)
    return RunOutcome(built, times, times.step_s, frozenset(), None)


def run_messages(built: Built, pricing: Pricing, engine: Engine) -> RunOutcome:
    """Run a step whose collectives are messages (`sim.graph.collective_steps`), which may share any link."""
    shared = frozenset(LINKS)
    flows, times = LinkLoads(pricing, shared).flows(built.graph), run_graph(built.graph, Flows(), engine)
    links = overloaded(shared, flows, {}, built, times).links if flows.by_task_kind else frozenset()
    if not links:
        return RunOutcome(built, times, times.step_s, links, None)
    return RunOutcome(built, run_graph(built.graph, flows, engine), times.step_s, links, flows)


def run_step(make: Make, fineness: Fineness, pricing: Pricing, schedule: Schedule, engine: Engine) -> RunOutcome:
    """Build a step and run it; communications on overloaded links slow each other."""
    shared = shared_links(pricing, schedule)
    if not shared:
        return run_alone(make, fineness, engine)
    loads = LinkLoads(pricing, shared)
    fineness = replace(fineness, apart=loads.shares)
    built = make(fineness)
    # This run shows which links are overloaded. It needs no clock: SimPy would give the same times later.
    times = run_static(built.graph)
    alone_s = times.step_s
    flows, hidden = loads.flows(built.graph), loads.hidden(built.graph)
    overload = overloaded(shared, flows, hidden, built, times)
    if not overload.links:
        if _on_simpy(built.graph, Flows(), engine):
            times = run_graph(built.graph, Flows(), engine)
        return RunOutcome(built, times, alone_s, frozenset(), None)
    for left in reversed(range(ROUNDS)):
        if overload.hiding:
            # Slowed communications may overlap with further ones, so the last round expands all actions.
            more = overload.hiding if left else _whole_on_shared(loads, built)
            fineness = replace(fineness, expanded=fineness.expanded | more)
            built = make(fineness)
            flows, hidden = loads.flows(built.graph), loads.hidden(built.graph)
        times = run_graph(built.graph, flows, engine)
        # No action that is one task can hide an overload any more.
        if not hidden:
            break
        overload = overloaded(shared, flows, hidden, built, times)
        if not overload.hiding:
            break
    return RunOutcome(built, times, alone_s, overload.links, flows)
