"""Seconds of an item of a program on a given rank: operators from `Costs`, messages from profile or topology."""

from __future__ import annotations

from sim.costs import Costs
from sim.plan import Plan
from sim.program import Comm, Compute
from sim.template import Price, Priced
from topology.network import Network

LINK_UNCERTAINTY = 0.2  # closed forms on data-sheet links: real collectives reach 0.6 to 0.95 of them
HOST_COPIES = ("offload", "reload")


class Pricing:
    """Prices for all ranks of one plan; answers are kept."""

    def __init__(self, plan: Plan, costs: Costs, network: Network) -> None:
        self.plan, self.costs, self.network = plan, costs, network
        self._lanes = max(1, len(plan.classes) // plan.scenario.parallelism.pp)
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, int], list[int]] = {}
        self._comms: dict[tuple[str, str, float, int], Priced] = {}
        self._sends: dict[tuple[int, int, float], Priced] = {}

    def on(self, rank: int) -> Price:
        """The prices that hold on `rank`."""

        def price(item: Compute | Comm) -> Priced:
            return self.compute(item) if isinstance(item, Compute) else self.comm(item, rank)

        return price

    def compute(self, op: Compute) -> Priced:
        """An operator's price, or a measured block's (named `key#phase#run`)."""
        if op.kind == "block":
            key, phase, run = op.name.split("#")
            block = self.costs.block(key, phase, int(run))
            assert block is not None, op.name
            return Priced(*block)
        return Priced(*self.costs.compute(op))

    def comm(self, comm: Comm, rank: int) -> Priced:
        """A collective's price within the group that `rank` is in."""
        key = (comm.kind, comm.group, comm.bytes, rank)
        found = self._comms.get(key)
        if found is None:
            found = self._comms[key] = self._comm(comm, rank)
        return found

    def context(self, rank: int) -> int:
        """Ranks of equal context pay equal prices: those of different stages that sit alike in their nodes."""
        cluster, stride = self.plan.scenario.cluster, self.plan.mesh.strides["pp"]
        inside = self.plan.classes[self.plan.class_of(rank) % self._lanes].rank
        if cluster.inter_node.kind == "torus" or stride % cluster.gpus_per_node or stride % cluster.domain_gpus:
            return rank
        return inside

    def member_classes(self, name: str, rank: int) -> tuple[int, ...]:
        """The simulated classes that a rank's group reaches into; () if its own alone."""
        key = (name, rank)
        if key not in self._members:
            classes = sorted({self.plan.class_of(r) for r in self.group(name, rank)})
            self._members[key] = tuple(classes) if len(classes) > 1 else ()
        return self._members[key]

    def group(self, name: str, rank: int) -> list[int]:
        """The group's members; see `Plan.group`."""
        key = (name, rank)
        if key not in self._groups:
            self._groups[key] = self.plan.group(name, rank)
        return self._groups[key]

    def _comm(self, comm: Comm, rank: int) -> Priced:
        if comm.kind in HOST_COPIES:
            return Priced(self.network.host_copy(comm.bytes), "topology", LINK_UNCERTAINTY)
        ranks = self.group(comm.group, rank)
        if len(ranks) == 1:
            return Priced(0.0, "topology", 0.0)
        return self.collective(comm.kind, ranks, comm.bytes)

    def collective(self, kind: str, ranks: list[int], size: float) -> Priced:
        """Measured if the profile has this collective for as many ranks and these share a node; else from the links."""
        per_node = self.plan.scenario.cluster.gpus_per_node
        here = sum(r // per_node == ranks[0] // per_node for r in ranks)
        measured = self.costs.collective(kind, here, size) if here > 1 else None
        if measured is not None and here == len(ranks):
            return Priced(*measured)
        cost = self.network.collective(kind, ranks, size)
        seconds, algorithm = cost.seconds, cost.algorithm
        if measured is not None and measured.seconds > seconds:  # links outside cannot make the part inside faster
            return Priced(measured.seconds, measured.source, measured.uncertainty, algorithm)
        return Priced(seconds, "topology", LINK_UNCERTAINTY, algorithm, cost.bus_bandwidth_bytes_per_s)

    def send(self, src: int, dst: int, size: float) -> Priced:
        """A message between two ranks."""
        key = (src, dst, size)
        if key not in self._sends:
            self._sends[key] = self._send(src, dst, size)
        return self._sends[key]

    def _send(self, src: int, dst: int, size: float) -> Priced:
        per_node = self.plan.scenario.cluster.gpus_per_node
        measured = self.costs.collective("send_recv", 2, size) if src // per_node == dst // per_node else None
        if measured is not None:
            return Priced(*measured)
        seconds = self.network.send(src, dst, size)
        return Priced(seconds, "topology", LINK_UNCERTAINTY, "send", size / seconds if seconds > 0 else 0.0)
