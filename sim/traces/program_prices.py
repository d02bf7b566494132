"""Price a captured rank's work: operators by the profile, collectives by measured tables or the network."""

from __future__ import annotations

import math
from collections import Counter

from sim.core.collectives import POINT_TO_POINT
from sim.inputs.calibration_input import profile_of
from sim.inputs.program_file import CapturedOperator, HostCopy
from sim.inputs.script_program import Collective
from sim.models.captured.bytes import written_bytes
from sim.models.captured.operators import computes_of, copy_kind, known
from sim.prices.coefficients import BURST_S
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import host_copy
from topology.network import Network
from topology.spec import ClusterSpec


class ProgramPrices:
    """Price work on one cluster in seconds.

    `unknown`: number of launches of operators priced by their bytes alone. `unmeasured`: number of calls of Python of a
    kind whose time the profile does not state.
    """

    def __init__(self, cluster: ClusterSpec, calibration: str | None = None) -> None:
        self.cluster, self.calibration = cluster, calibration or profile_of(cluster.gpu)
        self.costs = Costs(load_profile(self.calibration, "--calibration"), cluster.gpu)
        self.network = Network(cluster)
        self.unknown: Counter[str] = Counter()
        self.unmeasured: Counter[str] = Counter()
        self._operators: dict[CapturedOperator, tuple[float, float]] = {}

    @property
    def name(self) -> str:
        """Return GPU and profile in words."""
        return f"{self.cluster.gpu.name}, profile {self.calibration}"

    @property
    def on_host(self) -> bool:
        """Tell whether the host computes itself, so that nothing is issued ahead."""
        return self.cluster.gpu.chip.is_host

    def operator(self, op: CapturedOperator) -> tuple[float, float]:
        """Return the seconds of an operator on the device, and of the host that issues it."""
        found = self._operators.get(op)
        if not known(op.name):
            self.unknown[op.name] += 1
        if found is None:
            items = computes_of(op, not self.on_host)
            issued = () if self.on_host or op.graphed else items
            host_s = sum(self.costs.host_s(item, plain=True) for item in issued)
            found = self._operators[op] = sum(self.costs.compute(item).seconds for item in items), host_s
        return found

    def host_copy(self, op: CapturedOperator, copy: HostCopy, rank: int) -> tuple[float, float]:
        """Return the seconds of a copy between the host's memory and a GPU's, and of the host that issues it."""
        priced = host_copy(self.costs, self.network, copy_kind(copy), written_bytes(op), rank)
        return priced.seconds, self.operator(op)[1]

    def host_work(self, kind: str) -> float:
        """Return the host seconds of one call of a kind of Python; 0 if the profile does not state them."""
        found = self.costs.coefficients.host_work_s.get(kind)
        if found is None:
            self.unmeasured[kind] += 1
        return found or 0.0

    def rank_skew_s(self, computed_s: float) -> float:
        """Return the seconds for which CPU ranks wait for the last at a collective; on GPUs 0.

        Ranks that compute the same differ by many small independent delays. Their sum, a random walk, grows with the
        square root of the time computed since they last met (central limit theorem). The measured collectives hold
        the wait after `BURST_S`, so this is what comes on top of it.
        """
        longer = math.sqrt(computed_s / BURST_S) - 1.0
        return self.costs.coefficients.rank_skew_s * max(0.0, longer) if self.on_host else 0.0

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Return by how much computation and communication slow each other where the host does both; 1: not at all."""
        c = self.costs.coefficients
        if not self.on_host:
            return 1.0, 1.0
        return max(1.0, c.overlap_compute_slowdown or 1.0), max(1.0, c.overlap_comm_slowdown or 1.0)

    @property
    def collective_host_s(self) -> float:
        """Return the seconds in which the host issues a collective."""
        return 0.0 if self.on_host else self.costs.coefficients.host_collective_s

    def collective(self, found: Collective) -> float:
        """Return the seconds of a collective or message, from its last member's arrival on.

        They are the profile's measured ones, if it has them for as many ranks of one node, else follow from the links.
        """
        kind, ranks, size = found.kind, found.ranks, float(found.bytes)
        if kind == "barrier":
            kind, size = "all_reduce", 4.0
        message = kind in POINT_TO_POINT
        if len({r // self.cluster.gpus_per_node for r in ranks}) == 1 and len(ranks) > 1:
            measured = self.costs.collective("send_recv" if message else kind, len(ranks), size)
            if measured is not None:
                return measured.seconds
        if message:
            return self.network.send(ranks[0], ranks[-1], size)
        return self.network.collective(kind, ranks, size).seconds
