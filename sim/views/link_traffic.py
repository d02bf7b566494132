"""The drawing of a cluster under a step's traffic: what the step sends, group by group, and how busy each link is."""

from __future__ import annotations

from itertools import pairwise

from sim.core.timeline import HOST
from sim.programs.stages import stage_input_bytes
from sim.simulation import Simulation
from sim.views.topology_page import topology_page
from topology.loads import Traffic, link_loads
from topology.recognise import first_nodes

MAX_RANKS = 512  # a drawing shows the first nodes alone


def step_traffic(simulation: Simulation) -> list[Traffic]:
    """Every collective and message of a step among the first `MAX_RANKS` ranks, bytes summed over the step."""
    plan = simulation.plan
    out: list[Traffic] = []
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for c, traffic in zip(plan.classes, simulation.built.traffic, strict=True):
        for (kind, group), size in traffic.items():
            if group == HOST:
                continue
            for rank in (r for r in c.ranks if r < MAX_RANKS):
                members = tuple(plan.group(group, rank))
                if len(members) > 1 and (kind, group, members) not in seen:
                    seen.add((kind, group, members))
                    out.append(Traffic(kind, members, size))
    return out + _messages(simulation)


def _messages(simulation: Simulation) -> list[Traffic]:
    """Activations forward and their gradients back, between the ranks of neighbouring stages."""
    plan, schedule = simulation.plan, simulation.schedule
    stride = plan.mesh.strides["pp"]
    count = schedule.micro_batches // len(schedule.chains)
    lanes = [r for c in plan.classes if c.pipeline_rank == 0 for r in c.ranks if r < MAX_RANKS]
    out = []
    for chain in schedule.chains:
        for before, after in pairwise(chain):
            a, b = (schedule.rank_of_stage[s] * stride for s in (before, after))
            size = stage_input_bytes(plan, schedule.part_of_stage[after])
            if a != b:
                # Each of the two sends to the other.
                out += [Traffic("send_recv", (rank + a, rank + b), size, count) for rank in lanes]
    return out


def topology_drawing(simulation: Simulation) -> str:
    """HTML of the cluster with the part of the step for which each link is busy."""
    cluster = simulation.scenario.cluster
    drawn = first_nodes(cluster, -(-MAX_RANKS // cluster.gpus_per_node))
    loads = link_loads(drawn, step_traffic(simulation), simulation.step_time_s)
    return topology_page(cluster, loads)
