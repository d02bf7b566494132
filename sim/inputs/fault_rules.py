"""Rules between faults and the cluster they befall: ranks, nodes and NICs that exist, and a way around a cut link."""

from __future__ import annotations

from sim.inputs.input_source import Source, show
from sim.inputs.sections import Sections
from sim.inputs.workloads import Faults, LinkFault, numbered
from sim.inputs.yaml_input import KeyPath
from topology.detours import joined, left_of_cut
from topology.spec import ClusterSpec


def check_faults(sections: Sections, faults: Faults, source: Source) -> None:
    """Raise InputError for the first rule broken."""
    ranks, cluster = sections.parallelism.ranks, sections.cluster
    for index, straggler in enumerate(faults.stragglers):
        if straggler.rank >= ranks:
            raise source.error(
                ("faults", "stragglers", index, "rank"),
                f"found {straggler.rank}; must be below the number of ranks ({ranks})",
            )
    for index, link in enumerate(faults.links):
        for place, name in enumerate(link.between):
            _check_node(name, cluster, ("faults", "links", index, "between", place), source)
        if link.bandwidth_scale == 0:
            _check_cut(cluster, index, link, source)
    nics = cluster.inter_node.nics_per_node
    for index, fault in enumerate(faults.nics):
        _check_node(fault.node, cluster, ("faults", "nics", index, "node"), source)
        if fault.nic is not None and fault.nic >= nics:
            raise source.error(("faults", "nics", index, "nic"), f"found {fault.nic}; a node has NICs 0 to {nics - 1}")


def _check_node(name: str, cluster: ClusterSpec, path: KeyPath, source: Source) -> None:
    try:
        known = numbered(name) < cluster.nodes
    except ValueError:
        known = False
    if not known:
        raise source.error(path, f"found {show(name)}; the cluster has node0 to node{cluster.nodes - 1}")


def _check_cut(cluster: ClusterSpec, index: int, link: LinkFault, source: Source) -> None:
    """A cut link must have a detour."""
    a, b = link.nodes
    if left_of_cut(cluster, a, b) == 0:
        where = f"inside node{a}" if a == b else f"between node{a} and node{b}"
        far = cluster.inter_node.kind == "torus" and not joined(cluster, a, b)
        why = "no link joins them (only neighbours)" if far and a != b else "there is no other way"
        raise source.error(
            ("faults", "links", index, "bandwidth_scale"), f"found 0: {where} {why}; must be above 0 there"
        )
