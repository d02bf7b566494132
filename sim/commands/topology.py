"""`python -m topology.export CLUSTER`: a cluster's network as parts and links, to look at, change and read back."""

from __future__ import annotations

from pathlib import Path

import click

from sim.commands.command import Command
from sim.commands.files_named import OUTPUT
from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source
from sim.inputs.topology_input import with_own_gpu, write_topology
from topology.dragonfly import dragonfly_plus
from topology.graph import wiring_of
from topology.presets import CLUSTERS
from topology.spec import ClusterSpec
from topology.wiring import Wiring

MAX_NODES = 10_000


@click.command("topology", cls=Command)
@click.argument("cluster", metavar="CLUSTER")
@click.option("--nodes", type=int, help="number of nodes; by default 1, or the scenario's", show_default=False)
@click.option("--out", type=OUTPUT, required=True, help="node-link JSON; GraphML if the name ends in .graphml")
@click.option(
    "--groups", type=int, help="connect the nodes as a dragonfly+ with this number of groups", show_default=False
)
def main(cluster: str, nodes: int | None, out: Path, groups: int | None) -> None:
    """Write the network of CLUSTER, a preset or a scenario, as a graph: `cluster: {topology: FILE}` reads it back."""
    if nodes is not None and not 1 <= nodes <= MAX_NODES:
        raise InputError(f"--nodes: found {nodes}; must be from 1 to {MAX_NODES:,}")
    found = _cluster(cluster, nodes)
    wiring = with_own_gpu(wiring_of(found) if groups is None else _dragonfly(found, groups), found)
    write_topology(out, wiring)
    click.echo(
        f"wrote {out}: {counted(len(wiring.ranks), 'GPU')} of {_said(found)}, {counted(len(wiring.parts), 'part')}, "
        f"{counted(len(wiring.links) // 2, 'link')}"
    )


def _said(cluster: ClusterSpec) -> str:
    """A preset's name, or the GPU of a cluster that has none."""
    return cluster.name if cluster.name in CLUSTERS else cluster.gpu.name


def _dragonfly(cluster: ClusterSpec, groups: int) -> Wiring:
    try:
        return dragonfly_plus(cluster, groups)
    except ValueError as error:
        raise InputError(f"--groups: {error}") from None


def _cluster(name: str, nodes: int | None) -> ClusterSpec:
    """A preset, or the cluster of a scenario."""
    if name in CLUSTERS:
        count = nodes or 1
        found = resolve_cluster(name, count * CLUSTERS[name].gpus_per_node, Source("topology.export", {}))
        return found.model_copy(update={"nodes": count})
    from sim.commands.options import SCENARIO
    from sim.inputs.cluster_names import no_such_cluster
    from sim.inputs.scenario import load_scenario
    from sim.inputs.shipped import shipped_scenarios

    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json") and not path.exists() and name not in shipped_scenarios():
        raise InputError(f"{name[:60]}: {no_such_cluster(name)}, and no such scenario")
    found = load_scenario(SCENARIO.convert(name, None, None)).cluster
    if nodes is not None and found.topology is not None:
        raise InputError("--nodes: the scenario's network comes from a file, which says how many nodes there are")
    return found if nodes is None else found.model_copy(update={"nodes": nodes})
