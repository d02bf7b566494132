"""Price an item of a program on a given rank: operators by `Costs`, messages by profile or topology."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property, lru_cache
from itertools import groupby

from msgspec.structs import replace

from sim.core.operator_kinds import ATTENTION, HOST_UPDATE
from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario
from sim.prices.cost import Cost
from sim.prices.operator_prices import Costs
from sim.prices.price import Price, Priced
from sim.prices.profile import HOST_COPIES, Profile
from sim.prices.profiles import load_profile
from sim.ranks.faults import compute_scales, disturbs_links
from sim.ranks.places import aligned
from sim.ranks.plan import Plan
from sim.variants.frameworks.records import framework_of
from topology.network import Network
from topology.presets import machines_of
from topology.protocols import NODE_CHANNELS
from topology.spec import ClusterSpec, GpuSpec

LINK_UNCERTAINTY = 0.2  # real collectives reach 0.6 to 0.95 of closed forms on data-sheet links
SMALL_BYTES = 64.0  # bytes of a message that describes a tensor
# Of the host memory's bandwidth, for AdamW on all cores: STREAM reaches 0.8 of data sheets, and torch's fused AdamW on
# a CPU no less than a copy. The uncertainty is a judgement.
HOST_EFFICIENCY, HOST_UNCERTAINTY = 0.8, 0.25
FEW_CHANNELS, FAST_NIC_BYTES_PER_S = 16, 45e9
BLOCKS_FOR_EACH = ("all_to_all", "gather", "scatter")  # each rank gets S / n, so a node's members get their part only


def _channels(comm: Comm, channels: int) -> int:
    """Return how many of NCCL's channels a collective uses: an all-to-all's sends and receives use a power of two (NCCL
    2.28, src/graph/paths.cc: ncclTopoComputeP2pChannels)."""
    return 1 << (channels - 1).bit_length() if comm.kind == "all_to_all" else channels


def host_copy(costs: Costs, network: Network, kind: str, size_bytes: float, rank: int) -> Priced:
    """Price a copy between a GPU and its host's memory: as measured, else by the link's bandwidth."""
    measured = costs.collective(kind, 1, size_bytes)
    if measured is not None:
        return Priced(*measured)
    return Priced(network.host_copy(size_bytes, rank), "topology", LINK_UNCERTAINTY)


class Pricing:
    """Price items for all ranks of one plan; results are cached. `network`: with the faults of links, if there are any.

    `costs`: of the cluster's most frequent GPU; each of the cluster's `others` has the costs of its own profile.
    """

    def __init__(self, plan: Plan, costs: Costs, network: Network) -> None:
        self.plan, self.costs, self.network = plan, costs, network
        cluster = plan.scenario.cluster
        self._scales = compute_scales(plan.scenario)
        # True: two groups of one name may have different prices, so each rank is priced by itself.
        self._links = disturbs_links(plan.scenario) or cluster.topology is not None
        self._aligned = aligned(plan.scenario)
        waiting = _waiting_ranks(plan.scenario)
        # With disturbed links `GpuPrices.even` makes a network without faults, which scales measured collectives.
        self._usual = GpuPrices(costs, cluster, waiting, None if self._links else network)
        of_others = costs_of_others(plan.scenario)
        self._of_kind = {name: GpuPrices(own, cluster.of_kind(name), waiting) for name, own in of_others.items()}
        training = plan.scenario.training
        self._plain_host = training is not None and framework_of(training).plain_host
        self._small_messages = (0, 0) if training is None else framework_of(training).small_messages
        self._graphs = ""  # whose graphs hold all kernels; what graphs of layers hold says so itself
        captured = plan.scenario.model.program is not None
        if training is not None and training.cuda_graphs != "none" and (captured or not training.graphs_layers):
            self._graphs = training.cuda_graphs
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, int], list[int]] = {}
        # Only simulated ranks are priced again; keeping a group for each of 100,000 members would fill memory.
        self._simulated = frozenset([c.rank for c in plan.classes])
        self._comms: dict[tuple[str, str, float, bool, bool, int | None, int], Priced] = {}
        self._sends: dict[tuple[int, int, float, bool | None], Priced] = {}

    def on(self, rank: int) -> Price:
        """Return the prices on `rank`."""
        scale = self._scales.get(rank, 1.0)

        def price(item: Compute | Comm) -> Priced:
            # Only a slow rank's computations are scaled. Links have their own faults.
            if not isinstance(item, Compute):
                return self.comm(item, rank)
            priced = self.compute(item, rank)
            # Most ranks have no fault and need no copied record at every look-up.
            return priced if scale == 1.0 else priced._replace(seconds=priced.seconds * scale)

        return price

    @cached_property
    def healthy(self) -> Pricing:
        """Return prices without faults, by which a schedule and the order of messages are planned."""
        # A framework plans before a fault is known.
        if not (self._scales or disturbs_links(self.plan.scenario)):
            return self
        plan = replace(self.plan, scenario=self.plan.scenario.unchecked_copy(update={"faults": None}))
        return Pricing(plan, self.costs, Network(plan.scenario.cluster))

    def _gpu_prices(self, rank: int) -> GpuPrices:
        """Return the prices of a rank's GPU."""
        if not self._of_kind:
            return self._usual
        return self._of_kind.get(self.plan.scenario.cluster.kind_of(rank), self._usual)

    def costs_of(self, rank: int) -> Costs:
        """Return the costs of a rank's GPU."""
        return self._gpu_prices(rank).costs

    def compute(self, op: Compute, rank: int = 0) -> Priced:
        """Price an operator, or a measured run of operators, on a rank's GPU."""
        gpu_prices = self._gpu_prices(rank)
        # Cached by kind of GPU, because thousands of ranks have equal GPUs.
        found = gpu_prices.computes.get(op)
        if found is None:
            found = gpu_prices.computes[op] = self._compute(op, gpu_prices)
        return found

    def _compute(self, op: Compute, gpu_prices: GpuPrices) -> Priced:
        named = op.kernel and op.kind in ATTENTION and not op.served  # an engine chooses its own
        if named and self.plan.scenario.model.program is None:  # which names its own
            gpu_prices.costs.check_attention_kernel(op.kernel)
        if op.kind == HOST_UPDATE:
            return Priced(*_on_host(op, self.plan.scenario.cluster, self.plan.scenario.parallelism.ranks))
        return Priced(*gpu_prices.costs.compute(op, gpu_prices.pace), host_s=self._host_s(op, gpu_prices.costs))

    def _host_s(self, op: Compute, costs: Costs) -> float:
        """Return the host's seconds for an operator; 0 if a CUDA graph replays it."""
        # Graphs contain forwards and backwards. The optimizer runs outside.
        replays = op.graphed or (self._graphs and op.kind != "optimizer")
        return 0.0 if replays else costs.host_s(op, self._plain_host)

    def comm(self, comm: Comm, rank: int) -> Priced:
        """Price a collective within the group of `rank`."""
        # The item's name and stream do not change its price.
        key = (comm.kind, comm.group, comm.bytes, comm.within_call, comm.graphed, comm.sms, rank)
        found = self._comms.get(key)
        if found is None:
            found = self._comm(comm, rank)
            # Copies to the host run on copy engines, without multiprocessors and NCCL calls.
            if found.seconds and comm.kind not in HOST_COPIES:
                own = self.costs_of(rank).coefficients
                slows = own.collective_sm_share * self._channel_share(comm, rank)
                host_s = own.group_launch_s if comm.within_call else own.host_collective_s
                host_s = 0.0 if self._graphs or comm.graphed else host_s
                found = found._replace(host_s=host_s, slows=slows)
            self._comms[key] = found
        return found

    def _channel_share(self, comm: Comm, rank: int) -> float:
        """Return a message's multiprocessors ÷ NCCL's channels within a node.

        Between nodes there are two for each NIC that the group uses in a node, and four if NICs are fast and few
        (src/graph/connect.cc: "4 compute channels per search channel").
        """
        if comm.sms is not None:
            return comm.sms / NODE_CHANNELS
        cluster, ranks = self.plan.scenario.cluster, self.group(comm.group, rank)
        if cluster.gpu.sm_count <= 1:
            return 1.0
        # Ranks ascend, so the first and the last rank show whether all share an NVLink domain.
        if ranks[0] // cluster.domain_gpus == ranks[-1] // cluster.domain_gpus:
            return _channels(comm, NODE_CHANNELS) / NODE_CHANNELS
        inter = cluster.inter_node
        channels = 2 * max(1, self._in_first_node(ranks) * inter.nics_per_node // cluster.gpus_per_node)
        if inter.nic_bandwidth_bytes_per_s > FAST_NIC_BYTES_PER_S and channels < FEW_CHANNELS:
            channels *= 2
        # Limited, because `collective_sm_share` was measured with the channels within a node.
        return _channels(comm, min(channels, NODE_CHANNELS)) / NODE_CHANNELS

    def _in_first_node(self, ranks: list[int]) -> int:
        """Count the members of a group (ascending ranks) in its first member's node."""
        per_node = self.plan.scenario.cluster.gpus_per_node
        return bisect_left(ranks, (ranks[0] // per_node + 1) * per_node)

    def context(self, rank: int) -> tuple[object, ...]:
        """Return a key of a rank's prices: equal for ranks of one speed with equal positions in their nodes."""
        scale = self._scales.get(rank, 1.0)
        if self._links:
            return rank, scale
        # All groups of a name have equal positions, so only speed distinguishes ranks.
        if self._aligned:
            return (scale,)
        # If stages are a whole number of nodes, domains and leaves apart, their groups have equal positions, and the
        # rank of the first stage represents all stages.
        cluster, stride = self.plan.scenario.cluster, self.plan.mesh.strides["pp"]
        inter = cluster.inter_node
        if inter.is_torus or any(
            stride % n
            for n in (cluster.gpus_per_node, cluster.domain_gpus, cluster.gpus_per_node * inter.nodes_per_leaf)
        ):
            return rank, scale
        return self.plan.classes[self.plan.class_of(rank) % self.plan.pipelines].rank, scale

    def member_classes(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the simulated classes with members in a rank's group; () if there is only its own."""
        ranks = self.group(name, rank)
        key = (name, ranks[0])
        if key not in self._members:
            classes = sorted({self.plan.class_of(r) for r in ranks})
            self._members[key] = tuple(classes) if len(classes) > 1 else ()
        return self._members[key]

    def group(self, name: str, rank: int) -> list[int]:
        """Return the group's members; see `Plan.group`."""
        key = (name, rank)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self.plan.group(name, rank)
            # All members have the same group, so it is stored for each.
            for member in self._simulated.intersection(found):
                self._groups[name, member] = found
        return found

    def _comm(self, comm: Comm, rank: int) -> Priced:
        if comm.kind in HOST_COPIES:
            return host_copy(self._gpu_prices(rank).costs, self.network, comm.kind, comm.bytes, rank)
        ranks = self.group(comm.group, rank)
        # A group of one rank communicates nothing: no launch, no host time, no slowdown of kernels.
        if len(ranks) == 1:
            return Priced(0.0, "topology", 0.0)
        return self.collective(comm.kind, ranks, comm.bytes)

    def collective(self, kind: str, ranks: list[int], size: float) -> Priced:
        """Price a collective: as measured, if the profile has it for as many ranks of one node; else by the links."""
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
        """Return the measured cost of a collective's part inside a node, in the node with the slowest links and GPUs.

        `here`: number of members in the first node. None if a node has GPUs without such a measurement or of several
        kinds.
        """
        if not self._links:
            return self._usual.measured_collective(kind, ranks[:here], here, size)
        per_node, found = self.plan.scenario.cluster.gpus_per_node, list[Cost]()
        # A fault may be in any node, and the slowest node decides.
        for _, held in groupby(ranks, key=lambda rank: rank // per_node):
            members = list(held)
            gpu_prices, *others = {self._gpu_prices(rank) for rank in members}
            # No profile has measured collectives in a node of two kinds.
            measured = None if others else gpu_prices.measured_collective(kind, ranks[:here], here, size)
            if measured is None:
                return None
            found.append(measured)
            if len(members) > 1:
                lost, even = (n.collective(kind, members, size).seconds for n in (self.network, gpu_prices.even))
                found.append(_slowed(measured, lost, even))
        return max(found, key=lambda cost: cost.seconds)

    def send(self, src: int, dst: int, size: float, forward: bool | None = True) -> Priced:
        """Price a message between two ranks; `forward`: True: a stage's output, False: its gradient, None: other."""
        key = (src, dst, size, forward)
        if key not in self._sends:
            sent = self._send(src, dst, size)  # blocking messages keep host and device waiting for one another
            host_s = 0.0 if self._graphs == "step" else self.costs_of(src).coefficients.host_message_s
            # The ranks do not show what a message is: V-shaped schedules, a second chain, and interleaved schedules
            # send outputs to lower ranks, too.
            beside = 0 if forward is None else self._small_messages[0 if forward else 1]
            small_s = beside * (self._send(src, dst, SMALL_BYTES).seconds + host_s) if beside else 0.0
            self._sends[key] = sent._replace(seconds=sent.seconds + host_s + small_s)
        return self._sends[key]

    def _send(self, src: int, dst: int, size: float) -> Priced:
        per_node, gpu_prices = self.plan.scenario.cluster.gpus_per_node, self._gpu_prices(src)
        alike = src // per_node == dst // per_node and self._gpu_prices(dst) is gpu_prices
        # A profile's messages were measured within one node, between GPUs of one kind.
        measured = gpu_prices.costs.collective("send_recv", 2, size) if alike else None
        if measured is not None:
            if self._links:
                measured = _slowed(measured, self.network.send(src, dst, size), gpu_prices.even.send(src, dst, size))
            return Priced(*measured)
        seconds = self.network.send(src, dst, size)
        # A message has no choice of algorithm, and its bus bandwidth is bytes / seconds.
        return Priced(seconds, "topology", LINK_UNCERTAINTY, None, size / seconds if seconds > 0 else 0.0)


class GpuPrices:
    """Hold the prices of one kind of GPU: its costs, and the network as if all GPUs were of this kind.

    `waiting`: number of ranks that wait for each other. `network`: the real one, if it equals the description.
    """

    def __init__(self, costs: Costs, cluster: ClusterSpec, waiting: int, network: Network | None = None) -> None:
        self.costs, self.pace, self._cluster, self._network = costs, costs.pace(waiting), cluster, network
        self.computes: dict[Compute, Priced] = {}
        self._reference = _measured_on(costs.profile, cluster)

    @cached_property
    def even(self) -> Network:
        """Return the network of the description, without faults and uneven links."""
        return self._network or Network(self._cluster.model_copy(update={"topology": None, "others": ()}))

    def measured_collective(self, kind: str, ranks: list[int], here: int, size: float) -> Cost | None:
        """Price a collective of `here` ranks of a node; None if not measured. `ranks`: the group's first ones."""
        measured = self.costs.collective(kind, here, size)
        if measured is None or self._reference is None:
            return measured
        # Ranks 0 to here - 1: the measurement ran on the first GPUs of a node.
        there = self._reference.collective(kind, list(range(here)), size).seconds
        return _slowed(measured, self.even.collective(kind, ranks, size).seconds, there)


def costs_of_others(scenario: Scenario) -> dict[str, Costs]:
    """Return, by name, the costs of the cluster's other kinds of GPUs."""
    return {
        other.gpu.name: _costs_of(scenario.calibrations[other.gpu.name], other.gpu.model_dump_json()).near(scenario)
        for other in scenario.cluster.others
    }


@lru_cache(maxsize=16)
def _costs_of(profile: str, gpu_json: str) -> Costs:
    """Make costs, once for the many steps of one cluster."""
    return Costs(load_profile(profile, "calibrations"), GpuSpec.model_validate_json(gpu_json))


def _on_host(op: Compute, cluster: ClusterSpec, ranks: int) -> Cost:
    """Price an operator of the host's CPUs, whose memory the ranks of a node share."""
    bandwidth = cluster.host_memory_bandwidth_bytes_per_s
    assert bandwidth is not None  # rules say so
    sharing = min(ranks, cluster.gpus_per_node)
    return Cost(op.bytes * sharing / (bandwidth * HOST_EFFICIENCY), "roofline", HOST_UNCERTAINTY)


def _waiting_ranks(scenario: Scenario) -> int:
    """Count the ranks that wait for each other: in training all; serving replicas only if they share experts."""
    p = scenario.parallelism
    if scenario.inference is None:
        return p.ranks
    # A replica's attention spans tp·cp ranks, its experts ep·expert_tp.
    return p.pp * max(p.tp * p.cp, p.ep * p.expert_tp)


def _machine_of(profile: Profile) -> ClusterSpec | None:
    """Return the preset machine whose collectives a profile has: the first one with its GPU."""
    return next(machines_of(profile.reference), None)


def _measured_on(profile: Profile, cluster: ClusterSpec) -> Network | None:
    """Return the network of the preset machine on which a profile's collectives were measured, if its links inside
    nodes differ from the scenario's; else None, and measured times are used unchanged.

    Efficiencies are not compared, because a cluster described by hand has cautious defaults for them.
    """
    preset = _machine_of(profile)
    if preset is None:
        return None
    ours, theirs = ((c.kind, c.bandwidth_bytes_per_s, c.latency_s) for c in (cluster.intra_node, preset.intra_node))
    return None if ours == theirs else Network(preset)


def efficiencies_not_read(profile: Profile, cluster: ClusterSpec) -> list[str]:
    """Return the written efficiencies of a node's links that change no measured collective, as `_measured_on` says."""
    preset = _machine_of(profile)
    if preset is None or _measured_on(profile, cluster) is not None:
        return []
    ours, theirs = cluster.intra_node, preset.intra_node
    written = [key for key in ("efficiency", "nvls_efficiency") if key in ours.model_fields_set]
    return [key for key in written if getattr(ours, key) != getattr(theirs, key)]


def _slowed(measured: Cost, faulty_s: float, healthy_s: float) -> Cost:
    """Scale a measured cost to other links, by the ratio of the closed forms."""
    return measured if faulty_s == healthy_s else measured._replace(seconds=measured.seconds * faulty_s / healthy_s)
