"""Kinds of networks: nodes, switches and links of a scenario's own graph, as dark as its step keeps them busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs.figures.svg import COLOURS, FAINT, INK, WIDTH
from sim.core.units import percent, rate, seconds
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.views.link_traffic import step_traffic
from sim.views.topology_page import shade
from topology.graph import wiring_of
from topology.loads import link_loads
from topology.recognise import node_of
from topology.spec import ClusterSpec
from topology.torus import torus_position, torus_shape
from topology.wiring import Wiring

SCENARIOS = Path(__file__).parents[2] / "scenarios"
NETWORKS = {
    "network_fat_tree": ("contention_spine", "Fat tree, a quarter of the bandwidth above the leaves"),
    "network_rail_only": ("network_rail_only", "Rails alone: a switch for each GPU of a node, no spine"),
    "network_dragonfly": ("network_dragonfly", "Dragonfly+: groups of leaves and spines, spines joined to their like"),
    "network_torus_2d": ("network_torus_2d", "A 2D torus of nodes"),
    "network_torus_3d": ("network_torus", "A 3D torus of nodes"),
    "network_full_mesh": ("network_full_mesh", "A full mesh: each of eight chips linked to each other"),
    "network_chip_torus": ("network_chip_torus", "A 3D torus of chips"),
    "network_nvl72_racks": ("network_nvl72_racks", "Two racks of NVL72: one NVSwitch a rack, NICs from rack to rack"),
    "network_workstation": ("network_workstation", "A PCIe workstation: four GPUs on one host, no NVLink"),
    "network_mixed": ("network_mixed", "Nodes of two kinds under one spine"),
}
LEFT, TOP, ROW = 74, 92, 86
LAYERS = ("spine", "leaf", "host", "node", "NVSwitch")  # from above
FILLS = {"spine": "#cc79a7", "leaf": "#d55e00", "host": "#6b7280", "NVSwitch": "#009e73"}  # as on the topology page
Spot = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    """Vertices of a drawing by layer, where they stand, and what joins them: bytes/s a direction, part busy."""

    layers: Mapping[str, str]
    spots: Mapping[str, Spot]
    links: Mapping[tuple[str, str], tuple[float, float]]


def draw_network(picture: str) -> str:
    """The network of a scenario under its step."""
    name, title = NETWORKS[picture]
    simulation = simulate(load_scenario(SCENARIOS / f"{name}.yaml"))
    cluster, step_s = simulation.scenario.cluster, simulation.step_time_s
    wiring = wiring_of(cluster)
    loads = link_loads(cluster, step_traffic(simulation), step_s)
    drawn = _drawn(cluster, wiring, loads)
    bottom = max(y for _, y in drawn.spots.values())
    facts = _facts(drawn)
    height = bottom + 62 + 18 * len(facts)
    note = f"stepsim run {name}: a step of {seconds(step_s)}. Links are as wide as fast, as dark as busy."
    body = [
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        _text(LEFT, 22, title, 15, INK, ' font-weight="600"'),
        _text(LEFT, 42, note, 12, FAINT),
    ]
    body += _kinds(cluster)
    body += [_line(drawn, ends, *each) for ends, each in sorted(drawn.links.items(), key=lambda item: item[1][1])]
    body += [_vertex(cluster, wiring, drawn, vertex) for vertex in drawn.spots]
    rows = {layer: drawn.spots[vertex][1] for vertex, layer in drawn.layers.items()}
    if len(rows) > 1:
        body += [_text(8, y + 4, layer, 12, FAINT) for layer, y in rows.items()]
    body += [_text(LEFT, bottom + 52 + 18 * i, fact, 12, INK) for i, fact in enumerate(facts)]
    label = escape(f"{title}. {'; '.join(facts)}", quote=True)
    head = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}"'
    font = "font-family=\"Inter, 'Segoe UI', system-ui, sans-serif\""
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} {font}>\n' + "\n".join(body) + "\n</svg>\n"


def _drawn(cluster: ClusterSpec, wiring: Wiring, loads: Mapping[tuple[str, str], float]) -> Drawn:
    """A vertex for each node, NVSwitch and switch; of a single node one for each GPU, and its host."""
    vertex, layers = _vertices(cluster, wiring)
    links: dict[tuple[str, str], tuple[float, float]] = {}
    for (a, b), each in wiring.links.items():
        ends = vertex.get(a), vertex.get(b)
        if ends[0] is None or ends[1] is None or ends[0] >= ends[1]:
            continue
        bytes_per_s, busy = links.get((ends[0], ends[1]), (0.0, 0.0))
        most = max(loads.get((a, b), 0.0), loads.get((b, a), 0.0))
        links[ends[0], ends[1]] = (bytes_per_s + each.usable_bytes_per_s, max(busy, most))
    torus = cluster.inter_node.is_torus
    return Drawn(layers, _on_a_torus(cluster, layers) if torus else _in_rows(layers), links)


def _vertices(cluster: ClusterSpec, wiring: Wiring) -> tuple[dict[str, str], dict[str, str]]:
    """The vertex of each part, and the layer of each vertex."""
    home = node_of(wiring)
    several = len(set(home.values())) > 1
    vertex, layers = dict[str, str](), dict[str, str]()
    for name, part in wiring.parts.items():
        below = sorted({home[other] for other in wiring.beside[name] if other in home})
        if not several:
            found = {"gpu": (name, "node"), "cpu": (name, "host"), "nvswitch": (name, "NVSwitch")}.get(part.kind)
        elif name in home:
            found = (f"node{home[name]}", "node")
        elif part.kind == "nvswitch":
            found = None if cluster.inter_node.is_torus else (name, "NVSwitch")
        elif part.tier == "router":
            found = (f"node{below[0]}", "node")
        elif len(below) == 1:  # all leaves of one node are drawn as one
            found = (f"leaf of node {below[0]}", "leaf")
        else:
            found = (name, "leaf" if below else "spine")
        if found is not None:
            vertex[name] = found[0]
            layers[found[0]] = found[1]
    return vertex, layers


def _in_rows(layers: Mapping[str, str]) -> dict[str, Spot]:
    """A row for each layer."""
    rows = [[vertex for vertex, own in layers.items() if own == layer] for layer in LAYERS]
    return {
        vertex: (LEFT + (WIDTH - LEFT - 16) * (i + 0.5) / len(row), TOP + 24 + ROW * y)
        for y, row in enumerate(each for each in rows if each)
        for i, vertex in enumerate(row)
    }


def _on_a_torus(cluster: ClusterSpec, layers: Mapping[str, str]) -> dict[str, Spot]:
    """Nodes at their places; a third dimension goes back into the picture."""
    shape = torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)
    spots = {}
    for node in range(cluster.nodes):
        depth, y, x = (0, 0, *torus_position(node, shape))[-3:]
        top = TOP + 34 * (shape[0] if len(shape) == 3 else 1)
        spots[f"node{node}"] = (LEFT + 90 + 150 * x + 66 * depth, top + 80 * y - 34.0 * depth)
    return {vertex: spots[vertex] for vertex in layers}


def _line(drawn: Drawn, ends: tuple[str, str], bytes_per_s: float, busy: float) -> str:
    """A link; an arc within a row, past what stands between."""
    fastest = max(each for each, _ in drawn.links.values())
    (x, y), (u, v) = (drawn.spots[end] for end in ends)
    across, up = abs(v - y) < 1, abs(u - x) < 1
    rows = len(set(drawn.layers.values())) > 1
    path = f"M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}"
    if (across and (rows or abs(u - x) > 160)) or (up and not rows and abs(v - y) > 120):
        dx, dy = (0.0, -14 - abs(u - x) * 0.16) if across else (-14 - abs(v - y) * 0.2, 0.0)
        path = f"M{x:.1f} {y:.1f}Q{(x + u) / 2 + dx:.1f} {(y + v) / 2 + dy:.1f} {u:.1f} {v:.1f}"
    width = 0.8 + 4.2 * (bytes_per_s / fastest) ** 0.5
    return f'<path d="{path}" fill="none" stroke="{shade(busy)}" stroke-width="{width:.1f}"/>'


def _vertex(cluster: ClusterSpec, wiring: Wiring, drawn: Drawn, vertex: str) -> str:
    """A node with its GPUs as dots, or a switch."""
    x, y = drawn.spots[vertex]
    if drawn.layers[vertex] != "node":
        fill = FILLS[drawn.layers[vertex]]
        return f'<rect x="{x - 7:.1f}" y="{y - 7:.1f}" width="14" height="14" rx="2" fill="{fill}" stroke="{INK}"/>'
    if vertex in wiring.parts:
        ranks = [wiring.ranks.index(vertex)]
    else:
        node = int(vertex.removeprefix("node"))
        ranks = list(range(node * cluster.gpus_per_node, (node + 1) * cluster.gpus_per_node))
    across = 4 if len(ranks) >= 8 else 2 if len(ranks) > 1 else 1
    down = -(-len(ranks) // across)
    w, h = across * 7 + 4, down * 7 + 4
    names = [gpu.name for gpu in cluster.gpus]
    box = f'x="{x - w / 2:.1f}" y="{y - h / 2:.1f}" width="{w}" height="{h}" rx="3"'
    out = [f'<rect {box} fill="#ffffff" stroke="{INK}"/>']
    for i, rank in enumerate(ranks):
        cx, cy = x - w / 2 + 5.5 + 7 * (i % across), y - h / 2 + 5.5 + 7 * (i // across)
        colour = COLOURS[names.index(cluster.kind_of(rank))]
        out.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.6" fill="{colour}"/>')
    return "".join(out)


def _kinds(cluster: ClusterSpec) -> list[str]:
    """What the dots are."""
    out, x = [], float(LEFT)
    for gpu, colour in zip(cluster.gpus, COLOURS, strict=False):
        out.append(f'<circle cx="{x + 5:.1f}" cy="60" r="4" fill="{colour}"/>')
        out.append(_text(x + 14, 64, gpu.name, 12, INK))
        x += 40 + 7 * len(gpu.name)
    return out


def _facts(drawn: Drawn) -> list[str]:
    """A line for each pair of layers that links join: their bandwidth, and how busy the busiest is."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for ends, each in drawn.links.items():
        first, second = sorted((drawn.layers[end] for end in ends), key=LAYERS.index, reverse=True)
        rows.setdefault((first, second), []).append(each)
    out = []
    for (first, second), links in rows.items():
        speeds = sorted({each for each, _ in links})
        said = " or ".join(rate(each, "B/s") for each in (speeds[0], speeds[-1])[: len(speeds)])
        most = percent(max(busy for _, busy in links))
        out.append(f"{first} to {second}: {said} a direction, the busiest for {most} of the step")
    return out


def _text(x: float, y: float, text: str, size: int, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{more}>{escape(text)}</text>'
