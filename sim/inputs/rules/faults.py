"""Rules between faults and the cluster they befall: ranks, nodes and NICs that exist, and a way around a cut link."""

from __future__ import annotations

from sim.inputs.faults_config import Faults, LinkFault, numbered
from sim.inputs.input_source import Problems, show
from sim.inputs.sections import Sections
from sim.inputs.yaml_input import KeyPath
from topology.detours import joined, left_of_cut
from topology.spec import ClusterSpec


def fault_problems(sections: Sections, faults: Faults) -> Problems:
    """Return what is wrong with faults of this cluster."""
    ranks, cluster = sections.parallelism.ranks, sections.cluster
    for index, straggler in enumerate(faults.stragglers):
        if straggler.node is not None:
            yield from _of_node(straggler.node, cluster, ("faults", "stragglers", index, "node"))
        if straggler.rank is not None and straggler.rank >= ranks:
            why = f"must be below the number of ranks ({ranks})"
            yield ("faults", "stragglers", index, "rank"), f"found {straggler.rank}; {why}"
    for index, link in enumerate(faults.links):
        for place, name in enumerate(link.between):
            yield from _of_node(name, cluster, ("faults", "links", index, "between", place))
        if link.bandwidth_scale == 0:
            yield from _of_cut(cluster, index, link)
    nics = cluster.inter_node.nics_per_node
    for index, fault in enumerate(faults.nics):
        yield from _of_node(fault.node, cluster, ("faults", "nics", index, "node"))
        if fault.nic is not None and fault.nic >= nics:
            yield ("faults", "nics", index, "nic"), f"found {fault.nic}; a node has NICs 0 to {nics - 1}"


def _of_node(name: str, cluster: ClusterSpec, path: KeyPath) -> Problems:
    try:
        known = numbered(name) < cluster.nodes
    except ValueError:
        known = False
    if not known:
        nodes = "node0 alone" if cluster.nodes == 1 else f"node0 to node{cluster.nodes - 1}"
        yield path, f"found {show(name)}; the cluster has {nodes}"


def _of_cut(cluster: ClusterSpec, index: int, link: LinkFault) -> Problems:
    """A cut link must have a detour."""
    a, b = link.nodes
    if left_of_cut(cluster, a, b) == 0:
        where = f"inside node{a}" if a == b else f"between node{a} and node{b}"
        far = cluster.inter_node.is_torus and not joined(cluster, a, b)
        why = "no link joins them (only neighbours)" if far and a != b else "there is no other way"
        yield ("faults", "links", index, "bandwidth_scale"), f"found 0: {where} {why}; must be above 0 there"
