"""Seconds of an item of a program on a given rank: operators from `Costs`, messages from profile or topology."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property, lru_cache
from itertools import groupby

from msgspec.structs import replace

from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario
from sim.models.frameworks import framework_of
from sim.prices.cost import Cost
from sim.prices.operator_prices import Costs
from sim.prices.price import Price, Priced
from sim.prices.profile import HOST_COPIES, Profile
from sim.prices.profiles import load_profile
from sim.prices.roofline import ATTENTION
from sim.ranks.faults import compute_scales, disturbs_links
from sim.ranks.places import aligned
from sim.ranks.plan import Plan
from topology.network import Network
from topology.presets import CLUSTERS
from topology.spec import ClusterSpec, GpuSpec

LINK_UNCERTAINTY = 0.2  # closed forms on data-sheet links: real collectives reach 0.6 to 0.95 of them
CHANNELS_IN_NODE = 24  # what `collective_sm_share` stands for
SMALL_BYTES = 64.0  # of a message that describes a tensor
FEW_CHANNELS, FAST_NIC_BYTES_PER_S = 16, 45e9
BLOCKS_FOR_EACH = ("all_to_all", "gather", "scatter")  # of S each rank gets its n-th: here's members only their part


class Pricing:
    """Prices for all ranks of one plan; answers are kept. `network` holds the faults of links, if there are any.

    `costs` are those of the cluster's usual GPU; of its `others` each has those of its own profile.
    """

    def __init__(self, plan: Plan, costs: Costs, network: Network) -> None:
        self.plan, self.costs, self.network = plan, costs, network
        cluster = plan.scenario.cluster
        self._scales = compute_scales(plan.scenario)
        # True: two groups of one name may pay different prices, and each rank is asked by itself.
        self._links = disturbs_links(plan.scenario) or cluster.topology is not None
        self._aligned = aligned(plan.scenario)
        waiting = _waiting_ranks(plan.scenario)
        # With disturbed links `GpuSort.even` makes a network without them, which measured collectives are scaled by.
        self._usual = GpuSort(costs, cluster, waiting, None if self._links else network)
        of_others = costs_of_others(plan.scenario)
        self._sorts = {name: GpuSort(own, cluster.of_kind(name), waiting) for name, own in of_others.items()}
        training = plan.scenario.training
        self._plain_host = training is not None and framework_of(training).plain_host
        self._small_messages = (0, 0) if training is None else framework_of(training).small_messages
        self._graphs = "" if training is None or training.cuda_graphs == "none" else training.cuda_graphs
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, int], list[int]] = {}
        # Ranks that are asked about again. A group kept for each of 100,000 members would fill memory.
        self._simulated = frozenset([c.rank for c in plan.classes])
        self._comms: dict[tuple[str, str, float, int], Priced] = {}
        self._sends: dict[tuple[int, int, float, bool | None], Priced] = {}

    def on(self, rank: int) -> Price:
        """The prices that hold on `rank`."""

        def price(item: Compute | Comm) -> Priced:
            return self.compute(item, rank) if isinstance(item, Compute) else self.comm(item, rank)

        # A slow rank computes more slowly. Its messages are priced by links, which have faults of their own.
        def scaled(item: Compute | Comm) -> Priced:
            if not isinstance(item, Compute):
                return self.comm(item, rank)
            priced = self.compute(item, rank)
            return priced._replace(seconds=priced.seconds * scale)

        # Most ranks have no fault, and these are spared a copied record at every look-up.
        scale = self._scales.get(rank, 1.0)
        return price if scale == 1.0 else scaled

    @cached_property
    def healthy(self) -> Pricing:
        """Prices without the faults, by which a schedule and the order of messages are planned."""
        # A framework chooses its schedule before anybody knows of a fault, so planning must not see it.
        if not (self._scales or disturbs_links(self.plan.scenario)):
            return self
        plan = replace(self.plan, scenario=self.plan.scenario.model_copy(update={"faults": None}))
        return Pricing(plan, self.costs, Network(plan.scenario.cluster))

    def _sort(self, rank: int) -> GpuSort:
        """What a rank's GPU is priced by."""
        if not self._sorts:
            return self._usual
        return self._sorts.get(self.plan.scenario.cluster.kind_of(rank), self._usual)

    def costs_of(self, rank: int) -> Costs:
        """The costs of a rank's GPU."""
        return self._sort(rank).costs

    def compute(self, op: Compute, rank: int = 0) -> Priced:
        """An operator's price on a rank's GPU, or that of a measured run of them."""
        sort = self._sort(rank)
        # Kept by sort and not by rank: thousands of ranks of equal GPUs share one look-up.
        found = sort.computes.get(op)
        if found is None:
            found = sort.computes[op] = self._compute(op, sort)
        return found

    def _compute(self, op: Compute, sort: GpuSort) -> Priced:
        if op.kernel and op.kind in ATTENTION and self.plan.scenario.model.program is None:  # which names its own
            sort.costs.check_attention_kernel(op.kernel)
        return Priced(*sort.costs.compute(op, sort.pace), host_s=self._host_s(op, sort.costs))

    def _host_s(self, op: Compute, costs: Costs) -> float:
        """Of what a CUDA graph replays nothing."""
        # Graphs hold forwards and backwards. The optimizer's step runs outside of them.
        return 0.0 if self._graphs and op.kind != "optimizer" else costs.host_s(op, self._plain_host)

    def comm(self, comm: Comm, rank: int) -> Priced:
        """A collective's price within the group that `rank` is in."""
        # The item's name and stream are left out, as they cannot change its price.
        key = (comm.kind, comm.group, comm.bytes, rank)
        found = self._comms.get(key)
        if found is None:
            found = self._comm(comm, rank)
            # Copies to the host run on copy engines. They take no multiprocessors and are no NCCL call.
            if found.seconds and comm.kind not in HOST_COPIES:
                own = self.costs_of(rank).coefficients
                slows = own.collective_sm_share * self._channel_share(self.group(comm.group, rank))
                host_s = 0.0 if self._graphs else own.host_collective_s
                found = found._replace(host_s=host_s, slows=slows)
            self._comms[key] = found
        return found

    def _channel_share(self, ranks: list[int]) -> float:
        """NCCL's channels for a group, in parts of those within a node: two for each NIC that it uses in a node, four
        where NICs are fast and few (src/graph/connect.cc: "4 compute channels per search channel").
        """
        cluster = self.plan.scenario.cluster
        # Ranks ascend, so the first and the last tell whether all share an NVLink domain.
        if ranks[0] // cluster.domain_gpus == ranks[-1] // cluster.domain_gpus or cluster.gpu.sm_count <= 1:
            return 1.0
        inter = cluster.inter_node
        channels = 2 * max(1, self._in_first_node(ranks) * inter.nics_per_node // cluster.gpus_per_node)
        if inter.nic_bandwidth_bytes_per_s > FAST_NIC_BYTES_PER_S and channels < FEW_CHANNELS:
            channels *= 2
        # More channels than within a node would claim more multiprocessors than was measured.
        return min(1.0, channels / CHANNELS_IN_NODE)

    def _in_first_node(self, ranks: list[int]) -> int:
        """Count the members of a group (ascending ranks) in its first member's node."""
        per_node = self.plan.scenario.cluster.gpus_per_node
        return bisect_left(ranks, (ranks[0] // per_node + 1) * per_node)

    def context(self, rank: int) -> tuple[object, ...]:
        """Ranks of equal context pay equal prices: of one speed, and lying alike in their nodes."""
        scale = self._scales.get(rank, 1.0)
        if self._links:
            return rank, scale
        # The quick way: all groups of a name lie alike, so speed alone tells ranks apart.
        if self._aligned:
            return (scale,)
        # A whole number of nodes, domains and leaves from stage to stage moves every group to an equal place. The rank
        # of the first stage then stands for all stages.
        cluster, stride = self.plan.scenario.cluster, self.plan.mesh.strides["pp"]
        inter = cluster.inter_node
        if inter.kind == "torus" or any(
            stride % n
            for n in (cluster.gpus_per_node, cluster.domain_gpus, cluster.gpus_per_node * inter.nodes_per_leaf)
        ):
            return rank, scale
        return self.plan.classes[self.plan.class_of(rank) % self.plan.lanes].rank, scale

    def member_classes(self, name: str, rank: int) -> tuple[int, ...]:
        """The simulated classes that a rank's group reaches into; () if its own alone."""
        ranks = self.group(name, rank)
        key = (name, ranks[0])
        if key not in self._members:
            classes = sorted({self.plan.class_of(r) for r in ranks})
            self._members[key] = tuple(classes) if len(classes) > 1 else ()
        return self._members[key]

    def group(self, name: str, rank: int) -> list[int]:
        """The group's members; see `Plan.group`."""
        key = (name, rank)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self.plan.group(name, rank)
            # All members have the same group. Storing it for each spares them working it out again.
            for member in self._simulated.intersection(found):
                self._groups[name, member] = found
        return found

    def _comm(self, comm: Comm, rank: int) -> Priced:
        if comm.kind in HOST_COPIES:
            measured = self._sort(rank).costs.collective(comm.kind, 1, comm.bytes)
            if measured is not None:
                return Priced(*measured)
            return Priced(self.network.host_copy(comm.bytes, rank), "topology", LINK_UNCERTAINTY)
        ranks = self.group(comm.group, rank)
        # A group of one is no communication: neither launch nor host time, and nothing that slows kernels.
        if len(ranks) == 1:
            return Priced(0.0, "topology", 0.0)
        return self.collective(comm.kind, ranks, comm.bytes)

    def collective(self, kind: str, ranks: list[int], size: float) -> Priced:
        """Measured if the profile has this collective for as many ranks and these share a node; else from the links."""
        here = self._in_first_node(ranks)
        inside = size * here / len(ranks) if kind in BLOCKS_FOR_EACH else size
        measured = self._measured_inside(kind, ranks, here, inside) if here > 1 else None
        if measured is not None and here == len(ranks):
            return Priced(*measured)
        cost = self.network.collective(kind, ranks, size)
        if measured is not None and measured.seconds > cost.seconds:  # links outside cannot make the part inside faster
            return Priced(measured.seconds, measured.source, measured.uncertainty, cost.choice)
        return Priced(cost.seconds, "topology", LINK_UNCERTAINTY, cost.choice, cost.bus_bandwidth_bytes_per_s)

    def _measured_inside(self, kind: str, ranks: list[int], here: int, size: float) -> Cost | None:
        """A collective's part inside a node, where it was measured: as it is where links and GPUs are slowest.

        `here`: members in the first node. None where some node's GPUs have none measured, or are of several sorts.
        """
        if not self._links:
            return self._usual.measured_collective(kind, ranks[:here], here, size)
        per_node, found = self.plan.scenario.cluster.gpus_per_node, list[Cost]()
        # A fault may lie in any node, and a collective ends with its slowest part. Each node is therefore priced.
        for _, held in groupby(ranks, key=lambda rank: rank // per_node):
            members = list(held)
            sorts = {id(self._sort(rank)): self._sort(rank) for rank in members}
            sort = sorts.popitem()[1]
            # After the pop a sort is left only if the node has two: no profile has measured such a mixture.
            measured = None if sorts else sort.measured_collective(kind, ranks[:here], here, size)
            if measured is None:
                return None
            found.append(measured)
            if len(members) > 1:
                lost, even = (n.collective(kind, members, size).seconds for n in (self.network, sort.even))
                found.append(_slowed(measured, lost, even))
        return max(found, key=lambda cost: cost.seconds)

    def send(self, src: int, dst: int, size: float, forward: bool | None = True) -> Priced:
        """A message between two ranks. `forward`: a stage's output; else its gradient; None: a message of neither."""
        key = (src, dst, size, forward)
        if key not in self._sends:
            sent = self._send(src, dst, size)  # blocking messages keep host and device waiting for one another
            host_s = 0.0 if self._graphs == "step" else self.costs_of(src).coefficients.host_message_s
            # Numbers of ranks do not say what a message is. A V, a second chain and an interleaved schedule's way from
            # the last rank to the first all send outputs to lower ranks.
            beside = 0 if forward is None else self._small_messages[0 if forward else 1]
            small_s = beside * (self._send(src, dst, SMALL_BYTES).seconds + host_s) if beside else 0.0
            self._sends[key] = sent._replace(seconds=sent.seconds + host_s + small_s)
        return self._sends[key]

    def _send(self, src: int, dst: int, size: float) -> Priced:
        per_node, sort = self.plan.scenario.cluster.gpus_per_node, self._sort(src)
        alike = src // per_node == dst // per_node and self._sort(dst) is sort
        # A profile's messages were measured within one node, between GPUs of one kind.
        measured = sort.costs.collective("send_recv", 2, size) if alike else None
        if measured is not None:
            if self._links:
                measured = _slowed(measured, self.network.send(src, dst, size), sort.even.send(src, dst, size))
            return Priced(*measured)
        seconds = self.network.send(src, dst, size)
        # A message has no algorithm to choose and its bus bandwidth is its algorithm bandwidth.
        return Priced(seconds, "topology", LINK_UNCERTAINTY, None, size / seconds if seconds > 0 else 0.0)


class GpuSort:
    """What ranks of one sort of GPU are priced by: the costs of that GPU, and the network as if all were of its sort.

    `waiting`: ranks that wait for each other. `network`: the real one, where it is as the description says.
    """

    def __init__(self, costs: Costs, cluster: ClusterSpec, waiting: int, network: Network | None = None) -> None:
        self.costs, self.pace, self._cluster, self._network = costs, costs.pace(waiting), cluster, network
        self.computes: dict[Compute, Priced] = {}
        self._reference = _measured_on(costs.profile, cluster)

    @cached_property
    def even(self) -> Network:
        """The network that the description says, with no faults and nothing uneven."""
        return self._network or Network(self._cluster.model_copy(update={"topology": None, "others": ()}))

    def measured_collective(self, kind: str, ranks: list[int], here: int, size: float) -> Cost | None:
        """A collective of `here` ranks of a node, where the profile has it; `ranks`: the group's first ones."""
        measured = self.costs.collective(kind, here, size)
        if measured is None or self._reference is None:
            return measured
        # Ranks 0 to here - 1: the measurement ran on the first GPUs of a node.
        there = self._reference.collective(kind, list(range(here)), size).seconds
        return _slowed(measured, self.even.collective(kind, ranks, size).seconds, there)


def costs_of_others(scenario: Scenario) -> dict[str, Costs]:
    """By name, the costs of the sorts of GPUs that a cluster has besides its usual one."""
    return {
        other.gpu.name: _costs_of(scenario.calibrations[other.gpu.name], other.gpu.model_dump_json())
        for other in scenario.cluster.others
    }


@lru_cache(maxsize=16)
def _costs_of(profile: str, gpu_json: str) -> Costs:
    """Kept, since many steps of one cluster ask for the same."""
    return Costs(load_profile(profile, "calibrations"), GpuSpec.model_validate_json(gpu_json))


def _waiting_ranks(scenario: Scenario) -> int:
    """Count the ranks that wait for each other: in training all; serving replicas only where they share experts."""
    p = scenario.parallelism
    if scenario.inference is None:
        return p.ranks
    # Attention of one replica spans tp·cp ranks, its experts ep·expert_tp. Replicas that share experts wait together.
    return p.pp * max(p.tp * p.cp, p.ep * p.expert_tp)


def _measured_on(profile: Profile, cluster: ClusterSpec) -> Network | None:
    """The preset machine whose collectives a shipped profile holds, where the links inside the scenario's nodes are
    others; what was measured on the simulated machine itself stands as it is. Efficiencies are not compared: a cluster
    described by hand has cautious defaults for what was measured here."""
    preset = next((c for c in CLUSTERS.values() if c.gpu.name == profile.reference), None)
    if preset is None:
        return None
    ours, theirs = ((c.kind, c.bandwidth_bytes_per_s, c.latency_s) for c in (cluster.intra_node, preset.intra_node))
    return None if ours == theirs else Network(preset)


def _slowed(measured: Cost, faulty_s: float, healthy_s: float) -> Cost:
    """A measured cost where links are others: as many times what was measured as the closed forms say."""
    return measured if faulty_s == healthy_s else measured._replace(seconds=measured.seconds * faulty_s / healthy_s)
