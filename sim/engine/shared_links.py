"""Which communications of a step share links, and the step run so that these slow each other.

A link that only one stream of a rank uses is never shared. Of the others, the static pass tells whether they are ever
asked for more than they carry; if not, its times stand, to the last bit. If so, the graph runs again with rates that
change on every arrival and departure. Actions that stand as one task hide their communications: those that overlap
with others on a full link are placed task by task first, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from sim.core.actions import Schedule
from sim.engine.link_loads import IN, OF_CLASS, OUT, LinkLoads
from sim.engine.link_rates import FULL, Flow, Flows
from sim.engine.run import Times, run_contended
from sim.graph.build import Built
from sim.graph.compiled import ClassAction, Fineness
from sim.graph.taskgraph import TaskGraph, WholeAction, ragged
from sim.prices.rank_prices import Pricing
from sim.programs.data_parallel import DP, REPLICA
from topology.shares import LINKS, links_between, links_of

Use = tuple[str, int, str]  # of a link: its name, direction, and the stream that uses it
FlowOnLink = tuple[int, float, int, float]  # a flow's number, when its bytes flow, a link, the part that they take
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BLIP = 1e-12  # of a step: overlaps as short are the rounding of sums
PART = 4  # times as many ranks as so far are looked at next
SIMPY_TASKS = 5000  # so many run on SimPy unless told otherwise: they take 0.02 s longer there, as does loading SimPy
SHARING_TASKS = 1250  # the same where links are shared, which costs four times as much a task
ROUNDS = 6  # of placing more actions task by task; then all that use shared links


class OverloadedLinks(Struct, frozen=True):
    """The sorts of links that are somewhere asked for more than they carry, and the actions that hide part of it."""

    links: frozenset[str]
    hiding: frozenset[ClassAction]


def overloaded(
    shared: frozenset[str], flows: Flows, hidden: dict[int, Flow], built: Built, times: Times
) -> OverloadedLinks:
    """Where the links `shared` are asked for more than they carry, were all flows as fast as alone; actions that stand
    as one task put on links the most that they can, which is `hidden`."""
    # Many kinds share one `Flow`, so each is laid out once. Identity tells them apart: comparing paths would cost more
    # than it spares.
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
        # The added count is that of kinds without a flow: zero rows.
        counts = np.bincount(number, minlength=len(kinds) + 1)
        task = np.flatnonzero(counts[of_task])
        pick, entry = ragged(counts, of_task[task])
        task = task[pick]
        begin_s, until_s = start[task] + quiet_s[entry], end[task]
        over = _over_seconds(link[entry], begin_s, until_s, load[entry], BLIP * end.max()) > 0
        # Numbers of links hold class, name and direction. Halved and taken by the names, only the name is left.
        crowds = np.bincount(link[entry[over]] // 2 % len(LINKS), minlength=len(LINKS))
        names |= {name for name, count in zip(LINKS, crowds.tolist(), strict=True) if count}
        hiding[task[over]] = hides[task_kind[task[over]]]
        # All that can be overloaded is. More ranks would add nothing, and no action has to be found.
        if not hidden and names == shared:
            break
    return OverloadedLinks(frozenset(names), _places(built, set(np.flatnonzero(hiding).tolist())))


def _parts(flows: list[Flow], capacity_bytes_per_s: dict[int, float], whole: bool) -> Iterator[list[FlowOnLink]]:
    """What flows put on links, in parts of more and more ranks, all rows of a link in one; or all at once.
    Where nothing hides, the first few ranks mostly tell already which sorts of links are overloaded."""
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
    """The actions that these tasks stand for."""
    return frozenset(
        (i, action)
        for i, acted in enumerate(built.actions if tasks else ())
        for action, first in zip(acted.listed.actions, acted.first.tolist(), strict=True)
        if first in tasks
    )


def _whole_on_shared(loads: LinkLoads, built: Built) -> frozenset[ClassAction]:
    """All actions that stand as one task and wait for communication on shared links."""
    graph = built.graph
    on_shared = [isinstance(kind.work, WholeAction) and bool(loads.peak(kind.work).path) for kind in graph.task_kinds]
    return _places(built, set(np.flatnonzero(np.array(on_shared)[graph.task_kind]).tolist()))


def _over_seconds(link: Ints, begin_s: Floats, until_s: Floats, load: Floats, blip_s: float) -> Floats:
    """For how much of each interval its link is asked for more than it carries (a load of 1)."""
    n = len(link)
    # A flow without time to flow would go up after it went down, as ends sort first.
    load = np.where(until_s > begin_s, load, 0.0)
    links, times = np.concatenate([link, link]), np.concatenate([until_s, begin_s])
    order = np.argsort(times, kind="stable")  # at one instant ends come first
    links = links.astype(np.min_scalar_type(links.max()))[order]  # numbers of 16 bits sort several times faster
    by_link = np.argsort(links, kind="stable")
    links, order = links[by_link], order[by_link]
    # One running sum serves all links: on each, what went up has come down again before the next link begins.
    level = np.cumsum(np.concatenate([-load, load])[order])
    # The last change of a link lasts no time: what follows is another link's first change.
    lasts = np.diff(times[order], append=0.0) * np.append(links[1:] == links[:-1], False)
    reached = np.cumsum(np.where((level > FULL) & (lasts > blip_s), lasts, 0.0))
    before = np.empty(2 * n)
    # Back in the order of the flows, overloaded seconds at a flow's end less those at its begin are those of its own.
    before[order] = np.concatenate([[0.0], reached[:-1]])
    return np.where(load > 0, before[:n] - before[n:], 0.0)


def shared_links(pricing: Pricing, schedule: Schedule) -> frozenset[str]:
    """The links of `topology.shares.LINKS` that more than one stream of some rank uses in one direction."""
    plan, network = pricing.plan, pricing.network
    training, lanes = plan.scenario.training, plan.lanes
    offload = training is not None and training.activation_offload
    alike: dict[tuple[object, ...], set[Use]] = {}
    for c in plan.classes:
        context = pricing.context(c.rank)
        if context not in alike:
            alike[context] = _group_uses(pricing, c.rank)
    uses = [set(alike[pricing.context(c.rank)]) for c in plan.classes]
    of_stage = schedule.rank_of_stage  # virtual stages repeat the same pairs of ranks
    # A hop on one rank uses no link.
    pairs = {pair for chain in schedule.chains for pair in pairwise([of_stage[s] for s in chain]) if len({*pair}) > 1}
    for before, after in pairs:
        for a, b in ((before * lanes + lane, after * lanes + lane) for lane in range(lanes)):
            links = links_between(network, plan.classes[a].rank, plan.classes[b].rank)
            # Both directions on both ends: a forward goes from a to b, and its gradient comes back.
            uses[a].update([u for n in links for u in ((n, OUT, f"to {b}"), (n, IN, f"from {b}"))])
            uses[b].update([u for n in links for u in ((n, IN, f"from {a}"), (n, OUT, f"to {a}"))])
    for each in uses if offload else ():
        each |= {("host", OUT, "host"), ("host", IN, "host")}
    users = [Counter((link, way) for link, way, _ in each) for each in uses]
    shared = {link for each in users for (link, _), n in each.items() if n > 1}
    return frozenset(shared if offload else shared - {"host"})


def _group_uses(pricing: Pricing, rank: int) -> set[Use]:
    """Those of a rank's collectives; after the last backward each has the links to itself."""
    plan = pricing.plan
    # Without ZeRO, gradients are all-reduced over dp and cp at once. With it they are scattered over the shards, and
    # then all-reduced over the replicas of these (Megatron's num_distributed_optimizer_instances, FSDP's HSDP).
    data = {"dp_cp": DP} if plan.scenario.parallelism.zero == 0 else {"shard": DP, "replica": REPLICA}
    streams = {"tp": "tp", "cp": "cp", **data}
    if plan.scenario.model.moe is not None:
        experts = {"dp": DP} if plan.scenario.parallelism.zero == 0 else data
        streams |= {"ep": "ep", "expert_tp": "expert_tp", **{f"expert_{name}": s for name, s in experts.items()}}
    return {
        (link, way, stream)
        for name, stream in streams.items()
        if plan.group_size(name) > 1
        for link in links_of(pricing.network, pricing.group(name, rank))
        for way in (OUT, IN)
    }


class RunOutcome(Struct, frozen=True):
    """A step that was built and run. `alone_s`: how long it takes if links carry everything at once; `links`: the sorts
    of links that do not, and `flows` what uses them, None where there are none."""

    built: Built
    times: Times
    alone_s: float
    links: frozenset[str]
    flows: Flows | None


Make = Callable[[Fineness], Built]
Engine = Literal["auto", "simpy", "static"]


def run_graph(graph: TaskGraph, flows: Flows, engine: Engine) -> Times:
    """Run a graph on SimPy's clock or in passes without one, which give the same times; `auto`: on SimPy where nobody
    would notice how much longer that takes."""
    most = SHARING_TASKS if flows.by_task_kind else SIMPY_TASKS
    if engine == "simpy" or (engine == "auto" and len(graph) <= most):
        # Imported here, as loading SimPy takes time that larger steps do not need.
        from sim.engine.on_simpy import run_simpy

        return run_simpy(graph, flows)
    return run_contended(graph, flows)


def run_alone(make: Make, fineness: Fineness, engine: Engine) -> RunOutcome:
    """Build a step and run it as if links carried everything at once: never slower than `run_step`."""
    built = make(fineness)
    times = run_graph(built.graph, Flows(), engine)
    return RunOutcome(built, times, times.step_s, frozenset(), None)


def run_messages(built: Built, pricing: Pricing, engine: Engine) -> RunOutcome:
    """Run a step whose collectives are messages (`sim.graph.collective_steps`), which meet each other on all links."""
    shared = frozenset(LINKS)
    flows, times = LinkLoads(pricing, shared).flows(built.graph), run_graph(built.graph, Flows(), engine)
    links = overloaded(shared, flows, {}, built, times).links if flows.by_task_kind else frozenset()
    if not links:
        return RunOutcome(built, times, times.step_s, links, None)
    return RunOutcome(built, run_graph(built.graph, flows, engine), times.step_s, links, flows)


def run_step(make: Make, fineness: Fineness, pricing: Pricing, schedule: Schedule, engine: Engine) -> RunOutcome:
    """Build a step and run it, with links shared where that matters."""
    shared = shared_links(pricing, schedule)
    if not shared:
        return run_alone(make, fineness, engine)
    loads = LinkLoads(pricing, shared)
    fineness = replace(fineness, apart=loads.shares)
    built = make(fineness)
    times = run_graph(built.graph, Flows(), engine)
    # Where no link is overloaded this run is the answer. Elsewhere it tells what sharing costs.
    alone_s = times.step_s
    flows, hidden = loads.flows(built.graph), loads.hidden(built.graph)
    overload = overloaded(shared, flows, hidden, built, times)
    if not overload.links:
        return RunOutcome(built, times, alone_s, frozenset(), None)
    for left in reversed(range(ROUNDS)):
        if overload.hiding:
            # Slowed communications may come to overlap with others, so a few rounds find no end: the last expands all.
            more = overload.hiding if left else _whole_on_shared(loads, built)
            fineness = replace(fineness, expanded=fineness.expanded | more)
            built = make(fineness)
            flows, hidden = loads.flows(built.graph), loads.hidden(built.graph)
        times = run_graph(built.graph, flows, engine)
        # Nothing stands whole any more that could hide an overload.
        if not hidden:
            break
        overload = overloaded(shared, flows, hidden, built, times)
        if not overload.hiding:
            break
    return RunOutcome(built, times, alone_s, overload.links, flows)
