"""The standalone page of a cluster: its GPUs, switches and links, and how busy a run kept each link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.core.units import count, counted, n_bytes, percent, rate, seconds
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION
from sim.views.scatter import DIVIDERS
from topology.graph import build_graph, link
from topology.recognise import first_nodes
from topology.spec import ClusterSpec
from topology.torus import torus_shape
from topology.wiring import Link

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource

    from topology.graph import Graph

MAX_GPUS = 144  # drawn: two NVL72 racks; more would be a smear
Loads = Mapping[tuple[str, str], float]

# From the network down to the GPUs; what stands on one line, and its colour (Okabe and Ito). See `layer_of`.
_LAYERS = (
    ("spine", "Spine", PURPLE),
    ("leaf", "Leaf switch", VERMILION),
    ("router", "Router", VERMILION),
    ("nic", "NIC", ORANGE),
    ("cpu", "Host", "#6b7280"),
    ("pcie", "PCIe switch", GREY),
    ("gpu", "GPU", BLUE),
    ("nvswitch", "NVSwitch", GREEN),
)
_LINK_NAMES = {
    "nvlink": "NVLink",
    "peer": "GPU to GPU through the host",
    "nic": "NIC to switch",
    "fabric": "between switches",
    "pcie": "PCIe",
}
_IDLE = "#c3ccd6"
BUSY = ("#7d8792", "#e8300a")  # of an idle link and of one that is always busy, on a light and on a dark page


def topology_page(cluster: ClusterSpec, loads: Loads | None = None) -> str:
    """HTML of a page that opens without network.

    `loads`: by the graph's directed edges, the part of the step for which each link was busy (`topology.loads`). Of a
    large cluster the first nodes are drawn, the page says how many.
    """
    # As many nodes as can be told apart: whole domains where they fit.
    shown = first_nodes(cluster, max(1, MAX_GPUS // cluster.gpus_per_node))
    if _is_smaller_torus(cluster, shown):
        loads = None  # fewer nodes close to a torus of their own, whose links are others
    graph = build_graph(shown)
    return still_page(
        "topology.html",
        f"Cluster {cluster.name}",
        {"topology": _figure(graph, shown, loads)},
        what=_size(cluster, shown),
        source=cluster.source,
        headline=_headline(cluster),
        keys=[
            (colour, label) for kind, label, colour in _LAYERS if any(layer_of(graph, name) == kind for name in graph)
        ],
        loaded=loads is not None,
        links=_links(graph, loads),
    )


def _is_smaller_torus(cluster: ClusterSpec, shown: ClusterSpec) -> bool:
    return cluster.inter_node.is_torus and shown.nodes < cluster.nodes


def _size(cluster: ClusterSpec, shown: ClusterSpec) -> str:
    gpus = cluster.nodes * cluster.gpus_per_node
    rest = f"; the first {counted(shown.nodes, 'node')} are drawn" if shown.nodes < cluster.nodes else ""
    if _is_smaller_torus(cluster, shown):
        rest = f"; a torus of {counted(shown.nodes, 'node')} is drawn in its place, without loads"
    kinds = " or ".join(gpu.name for gpu in cluster.gpus)
    return f"{counted(cluster.nodes, 'node')} of {count(cluster.gpus_per_node)} {kinds}, {counted(gpus, 'GPU')}{rest}"


def _headline(cluster: ClusterSpec) -> tuple[Number, ...]:
    intra, inter = cluster.intra_node, cluster.inter_node
    return (
        Number("Inside a domain", rate(intra.bandwidth_bytes_per_s, "B/s"), f"a GPU, per direction; {intra.kind}"),
        Number("NVLink domain", f"{counted(cluster.domain_gpus, 'GPU')}", "reach each other without a NIC"),
        Number("NIC", rate(inter.nic_bandwidth_bytes_per_s, "B/s"), f"per direction, {inter.nics_per_node} a node"),
        Number("Network", inter.kind.replace("_", " "), f"oversubscription {inter.oversubscription:g}"),
        Number("Latency per hop", seconds(intra.latency_s), f"inside; {seconds(inter.latency_s)} between nodes"),
        *(Number("GPU memory", n_bytes(gpu.memory_bytes), gpu.name) for gpu in cluster.gpus),
    )


def _links(graph: Graph, loads: Loads | None) -> list[tuple[str, ...]]:
    """A row per kind and speed of link; of PCIe also per what it joins, since only some of it carries messages."""
    rows: dict[tuple[str, float, float], list[float]] = {}
    for a, b, each in _edges(graph):
        name = _LINK_NAMES[graph.edges[a, b]["kind"]]
        if graph.edges[a, b]["kind"] == "pcie":
            ends = {layer_of(graph, end) for end in (a, b)}
            name = "PCIe: " + " to ".join(label for layer, label, _ in reversed(_LAYERS) if layer in ends)
        key = (name, each.usable_bytes_per_s, each.latency_s)
        rows.setdefault(key, []).append(_busy(loads, a, b))
    return [
        (
            name,
            count(len(busy)),
            rate(bandwidth, "B/s"),
            seconds(latency_s),
            *((percent(max(busy)), percent(sum(busy) / len(busy))) if loads is not None else ()),
        )
        for (name, bandwidth, latency_s), busy in rows.items()
    ]


def layer_of(graph: Graph, name: str) -> str:
    """The page's line for a part: its kind; of a switch its tier, or leaf if a NIC is beside it, else spine."""
    data = graph.nodes[name]
    if data["kind"] != "switch":
        return str(data["kind"])
    if data["tier"] in {layer for layer, _, _ in _LAYERS}:
        return str(data["tier"])
    return "leaf" if any(graph.nodes[other]["kind"] == "nic" for other in graph[name]) else "spine"


def _edges(graph: Graph) -> list[tuple[str, str, Link]]:
    """Every link once, by its first direction."""
    seen: set[frozenset[str]] = set()
    found = []
    for a, b in graph.edges:
        if frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            found.append((a, b, link(graph, a, b)))
    return found


def _busy(loads: Loads | None, a: str, b: str) -> float:
    return max(loads.get((a, b), 0.0), loads.get((b, a), 0.0)) if loads else 0.0


def positions(graph: Graph, cluster: ClusterSpec) -> dict[str, tuple[float, float]]:
    """Where each part stands: one line a kind, from the network down; a mesh's GPUs on two lines, and a torus's
    routers on one for each of its rows, to show their links."""
    lines = {
        rank: [name for name in graph if layer_of(graph, name) == kind] for rank, (kind, _, _) in enumerate(_LAYERS)
    }
    spots: dict[str, tuple[float, float]] = {}
    for rank, names in lines.items():
        for index, name in enumerate(names):
            spots[name] = ((index + 0.5) / len(names) * 2 - 1, -float(rank))
    if cluster.intra_node.meshed:
        for index, name in enumerate(lines[6]):
            half = max(1, cluster.gpus_per_node // 2)
            spots[name] = (spots[name][0], spots[name][1] - 0.9 * (index // half % 2))
    if cluster.inter_node.is_torus:
        columns = torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)[-1]
        rows = -(-len(lines[2]) // columns)
        for index, name in enumerate(lines[2]):
            row, column = divmod(index, columns)
            slant = 0.4 / columns * (row % 2)  # lest a link over several rows hide those between
            spots[name] = ((column + 0.4) / columns * 2 - 1 + slant, -2.2 * row / max(1, rows - 1))
    return spots


def _figure(graph: Graph, cluster: ClusterSpec, loads: Loads | None) -> Any:
    from bokeh.models import HoverTool, Range1d
    from bokeh.plotting import figure

    spots = positions(graph, cluster)
    low = min(y for _, y in spots.values())
    plot = figure(
        name="topology",
        height=620,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,reset,save",
        active_scroll="wheel_zoom",
        x_range=Range1d(start=-1.1, end=1.1),
        y_range=Range1d(start=low - 0.6, end=0.6),
        toolbar_location="right",
        border_fill_color=None,  # of a white one a line is left at the edges of a dark page
    )
    plot.toolbar.logo = None
    plot.toolbar.stylesheets = [DIVIDERS]
    plot.axis.visible = plot.grid.visible = False
    plot.outline_line_color = None
    lines = plot.segment(
        "x0", "y0", "x1", "y1", source=_link_columns(graph, spots, loads), line_width="width", line_color="colour"
    )
    lines.name = "links"
    plot.add_tools(HoverTool(renderers=[lines], tooltips=[("", "@text")], line_policy="interp"))
    for kind, _, colour in _LAYERS:
        names = [name for name in graph if layer_of(graph, name) == kind]
        if names:
            where = {"x": [spots[n][0] for n in names], "y": [spots[n][1] for n in names], "name": names}
            size = max(5, min(16, 700 // len(names)))
            dots = plot.scatter("x", "y", source=where, size=size, color=colour, line_color=INK)
            dots.name = kind
            plot.add_tools(HoverTool(renderers=[dots], tooltips=[("", "@name")]))
    return plot


def _link_columns(graph: Graph, spots: Mapping[str, tuple[float, float]], loads: Loads | None) -> ColumnDataSource:
    from bokeh.models import ColumnDataSource

    edges = _edges(graph)
    fastest = max((each.usable_bytes_per_s for _, _, each in edges), default=1.0)
    busy = [_busy(loads, a, b) for a, b, _ in edges]
    return ColumnDataSource(
        {
            "x0": [spots[a][0] for a, _, _ in edges],
            "y0": [spots[a][1] for a, _, _ in edges],
            "x1": [spots[b][0] for _, b, _ in edges],
            "y1": [spots[b][1] for _, b, _ in edges],
            "width": [1 + 4 * (each.usable_bytes_per_s / fastest) ** 0.5 for _, _, each in edges],
            "colour": [_IDLE if loads is None else shade(part, *BUSY) for part in busy],
            "text": [
                f"{a} – {b}: {_LINK_NAMES[graph.edges[a, b]['kind']]}, {rate(each.usable_bytes_per_s, 'B/s')}"
                + ("" if loads is None else f", busy {percent(part)}")
                for (a, b, each), part in zip(edges, busy, strict=True)
            ],
        }
    )


def shade(part: float, idle: str = "#e3e8ee", busy: str = "#8c1400") -> str:
    """From the colour of an idle link to that of one that is busy all the time.

    >>> shade(0.0), shade(1.0)
    ('#e3e8ee', '#8c1400')
    """
    root = max(0.0, min(1.0, part)) ** 0.5
    a, b = (bytes.fromhex(colour[1:]) for colour in (idle, busy))
    return "#" + "".join(f"{round(x + (y - x) * root):02x}" for x, y in zip(a, b, strict=True))
