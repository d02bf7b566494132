"""Slow ranks, slow links and jitter of a scenario's `faults`. What they cost: `sim.results.fault_costs`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sim.inputs.scenario import Scenario
from topology.detours import left_of_cut
from topology.network import Network
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.faults_config import JitterFault, Straggler


def compute_scales(scenario: Scenario) -> dict[int, float]:
    """Return how many times as long computations take, by rank, where that is not once; what is listed twice
    multiplies."""
    scales: dict[int, float] = {}
    for slow in scenario.faults.stragglers if scenario.faults else ():
        for rank in _slow_ranks(scenario, slow):
            scales[rank] = scales.get(rank, 1.0) * slow.compute_scale
    return {rank: scale for rank, scale in scales.items() if scale != 1.0}


def _slow_ranks(scenario: Scenario, slow: Straggler) -> Iterable[int]:
    return (slow.rank,) if slow.rank is not None else _ranks_of(scenario, slow.node_number or 0)


def link_scales(scenario: Scenario) -> dict[tuple[int, int], float]:
    """Return what is left of the bandwidth, by pair of nodes (or one node twice), as `topology.network.Network` takes
    it.

    Of a cut link it is what the detour offers (`topology.detours`).
    """
    scales: dict[tuple[int, int], float] = {}
    for link in scenario.faults.links if scenario.faults else ():
        left = link.bandwidth_scale or left_of_cut(scenario.cluster, *link.nodes)
        scales[link.nodes] = scales.get(link.nodes, 1.0) * left
    return {pair: scale for pair, scale in scales.items() if scale != 1.0}


def nic_scales(scenario: Scenario) -> dict[int, float]:
    """Return what is left of the bandwidth of the NICs that a rank's GPU uses, by rank, where that is not all.

    A GPU's traffic is cut evenly over its NICs, so the slowest of them counts; GPUs that share a NIC all suffer.
    """
    scales: dict[int, float] = {}
    for node, scale in shared_nic_scales(scenario).items():
        scales |= dict.fromkeys(_ranks_of(scenario, node), scale)
    for fault in scenario.faults.nics if scenario.faults else ():
        for rank in _ranks_of(scenario, fault.node_number):
            if fault.nic is None or fault.nic in nics_of(scenario.cluster, rank % scenario.cluster.gpus_per_node):
                scales[rank] = scales.get(rank, 1.0) * fault.bandwidth_scale
    return {rank: scale for rank, scale in scales.items() if scale != 1.0}


def _ranks_of(scenario: Scenario, node: int) -> range:
    """The ranks on a node's GPUs."""
    per_node = scenario.cluster.gpus_per_node
    return range(node * per_node, min(scenario.parallelism.ranks, (node + 1) * per_node))


def nics_of(cluster: ClusterSpec, gpu: int) -> range:
    """The NICs of its node that a GPU uses, dealt out evenly.

    >>> from topology.presets import CLUSTERS
    >>> nics_of(CLUSTERS["dgx-h100"], 3), nics_of(CLUSTERS["dgx-v100"], 3), nics_of(CLUSTERS["p5-efa"], 3)
    (range(3, 4), range(1, 2), range(12, 16))
    """
    nics, gpus = cluster.inter_node.nics_per_node, cluster.gpus_per_node
    first = gpu * nics // gpus
    return range(first, max(first + 1, (gpu + 1) * nics // gpus))


def shared_nic_scales(scenario: Scenario) -> dict[int, float]:
    """Return what other jobs leave of the bandwidth of a node's NICs, by node, where that is not all; see
    `NetworkJitter`."""
    jitter = scenario.faults.network_jitter if scenario.faults else None
    if jitter is None or jitter.sigma == 0:
        return {}
    nodes = -(-scenario.parallelism.ranks // scenario.cluster.gpus_per_node)
    draws = np.random.default_rng(jitter.seed).standard_normal(nodes)
    return {node: math.exp(jitter.sigma * z) for node, z in enumerate(draws.tolist()) if z < 0}


def disturbs_links(scenario: Scenario) -> bool:
    """Tell whether a fault changes what links carry."""
    return bool(link_scales(scenario) or nic_scales(scenario))


def network_of(scenario: Scenario) -> Network:
    """The scenario's network with its faults; draws of what other jobs leave take the place of their median."""
    cluster = scenario.cluster
    if cluster.inter_node.spread and scenario.faults is not None and scenario.faults.network_jitter is not None:
        inter = cluster.inter_node.model_copy(update={"spread": 0.0})
        cluster = cluster.model_copy(update={"inter_node": inter})
    return Network(cluster, link_scales(scenario), nic_scales(scenario))


class Jitter:
    """Factors on the computations of one rank, drawn in the order of its actions.

    Log-normal with mean 1: exp(σz - σ²/2); or one of the measured `factors`, whose mean is 1 as well. So jitter makes
    no rank slower by itself; what it costs is waiting.
    """

    def __init__(self, sigma: float, seed: int, rank: int, factors: tuple[float, ...] = ()) -> None:
        self.sigma, self.factors = sigma, factors
        self.random = np.random.default_rng((seed, rank))

    def draw(self) -> float:
        """The next factor."""
        if self.factors:
            return self.factors[self.random.integers(len(self.factors))]
        return math.exp(self.sigma * float(self.random.standard_normal()) - self.sigma**2 / 2)


def has_jitter(scenario: Scenario) -> bool:
    """Tell whether computations take longer or shorter at random."""
    return _jitter(scenario) is not None


def jitter_of(scenario: Scenario, rank: int) -> Jitter | None:
    """A rank's jitter; None where the scenario has none."""
    found = _jitter(scenario)
    return None if found is None else Jitter(found.sigma, found.seed, rank, found.factors)


def _jitter(scenario: Scenario) -> JitterFault | None:
    found = scenario.faults.jitter if scenario.faults else None
    return found if found is not None and (found.sigma > 0 or found.factors) else None


def disturbs(scenario: Scenario) -> bool:
    """Tell whether a fault changes a step at all."""
    return bool(compute_scales(scenario) or disturbs_links(scenario) or has_jitter(scenario))
