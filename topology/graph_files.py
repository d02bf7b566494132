"""Read networks in networkx's node-link form and GraphML, and check every part and link."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any
from xml.etree import ElementTree

from topology.presets import GPUS
from topology.wiring import KINDS, Ends, Link, NetworkDevice, Wiring, node_link

MAX_PARTS, MAX_NAME = 1_000_000, 200
_GRAPHML = "{http://graphml.graphdrawing.org/xmlns}"
_TYPES: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: text.strip().lower() in ("true", "1"),
    "string": str,
    "int": int,
    "long": int,
    "float": float,
    "double": float,
}


class TopologyError(ValueError):
    """An error in a network: one sentence that names the part or link."""


def from_node_link(data: Any, name: str = "custom") -> Wiring:
    """Return the network from networkx's node-link form (`links` or `edges`); `name` is used if it has none.

    Raises:
        TopologyError: for the first error.
    """
    if not isinstance(data, Mapping):
        raise TopologyError("must be a mapping with nodes and edges (networkx's node_link_data)")
    nodes, edges = data.get("nodes"), data.get("edges", data.get("links"))
    for key, value in (("nodes", nodes), ("edges", edges)):
        if not isinstance(value, list):
            raise TopologyError(f"{key}: must be a list (networkx's node_link_data writes nodes, and edges or links)")
    assert isinstance(nodes, list)
    assert isinstance(edges, list)
    about = data.get("graph") if isinstance(data.get("graph"), Mapping) else {}
    assert isinstance(about, Mapping)
    gpus = _gpus(about.get("gpus"))
    parts = _parts(nodes, gpus)
    links = _links(edges, parts, bool(data.get("directed", False)))
    wiring = Wiring(parts, links, str(about.get("name", name))[:MAX_NAME], str(about.get("source", ""))[:4096], gpus)
    check(wiring)
    return wiring


def from_graphml(root: ElementTree.Element, name: str = "custom") -> Wiring:
    """Return the network from GraphML with the same attributes.

    Raises:
        TopologyError: for the first error.
    """
    keys = {
        k.get("id", ""): (k.get("attr.name", ""), k.get("attr.type", "string")) for k in root.iter(f"{_GRAPHML}key")
    }
    graph = root.find(f"{_GRAPHML}graph")
    if graph is None:
        raise TopologyError("has no graph in GraphML's namespace")

    def data(element: ElementTree.Element) -> dict[str, Any]:
        out = {}
        for item in element.findall(f"{_GRAPHML}data"):
            attribute, kind = keys.get(item.get("key", ""), ("", "string"))
            try:
                out[attribute] = _TYPES.get(kind, str)(item.text or "")
            except ValueError:
                raise TopologyError(f"{attribute}: found '{item.text}'; must be a number") from None
        return out

    about = data(graph)
    try:
        about["gpus"] = json.loads(about.get("gpus", "null"))
    except ValueError:
        raise TopologyError("gpus: must be JSON text: descriptions of GPUs by name") from None
    return from_node_link(
        {
            "directed": graph.get("edgedefault") == "directed",
            "graph": about,
            "nodes": [{**data(node), "id": node.get("id")} for node in graph.findall(f"{_GRAPHML}node")],
            "edges": [
                {**data(edge), "source": edge.get("source"), "target": edge.get("target")}
                for edge in graph.findall(f"{_GRAPHML}edge")
            ],
        },
        name,
    )


def parse_xml(text: str) -> ElementTree.Element:
    """Return the root of an XML text.

    Raises:
        TopologyError: if it is not XML, or declares entities.
    """
    if "<!ENTITY" in text:
        raise TopologyError("declares XML entities, which are not read")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise TopologyError(f"is no XML: {error}") from None


def graphml(wiring: Wiring) -> str:
    """Return the network as GraphML."""
    data = node_link(wiring)
    keys: dict[tuple[str, str], str] = {}
    root = ElementTree.Element("graphml", xmlns=_GRAPHML[1:-1])
    graph = ElementTree.Element("graph", edgedefault="directed" if data["directed"] else "undirected")

    def put(parent: ElementTree.Element, where: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            text = (
                json.dumps(value) if isinstance(value, dict | bool) else repr(value) if value != str(value) else value
            )
            number = keys.setdefault((where, key), f"d{len(keys)}")
            ElementTree.SubElement(parent, "data", key=number).text = text
            types.setdefault((where, key), _type_word(value))

    types: dict[tuple[str, str], str] = {}
    put(graph, "graph", data["graph"])
    for node in data["nodes"]:
        put(ElementTree.SubElement(graph, "node", id=node.pop("id")), "node", node)
    for edge in data["edges"]:
        ends = {key: edge.pop(key) for key in ("source", "target")}
        put(ElementTree.SubElement(graph, "edge", ends), "edge", edge)
    for (where, key), number in keys.items():
        attributes = {"id": number, "for": where, "attr.name": key, "attr.type": types[where, key]}
        ElementTree.SubElement(root, "key", attributes)
    root.append(graph)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _type_word(value: Any) -> str:
    words = {bool: "boolean", int: "long", float: "double"}
    return words.get(type(value), "string")


def _gpus(given: Any) -> dict[str, Mapping[str, Any]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        raise TopologyError("gpus: must be a mapping from names to descriptions of GPUs (keys of cluster.gpu)")
    return {str(key): value for key, value in given.items()}


def _parts(nodes: list[Any], gpus: Mapping[str, Any]) -> dict[str, NetworkDevice]:
    if len(nodes) > MAX_PARTS:
        raise TopologyError(f"has {len(nodes):,} nodes; at most {MAX_PARTS:,}")
    parts: dict[str, NetworkDevice] = {}
    for index, node in enumerate(nodes):
        if not isinstance(node, Mapping) or not isinstance(node.get("id"), str | int) or not str(node["id"]):
            raise TopologyError(f"nodes.{index}: must be a mapping with an id")
        name = str(node["id"])[:MAX_NAME]
        if name in parts:
            raise TopologyError(f"node '{name}': stands twice")
        kind = node.get("kind")
        if kind not in KINDS:
            raise TopologyError(f"node '{name}': kind: found {kind!r:.60}; must be one of {', '.join(KINDS)}")
        parts[name] = NetworkDevice(
            name,
            kind,
            _gpu_name(name, node.get("gpu"), gpus) if kind == "gpu" else "",
            _rank(name, node.get("rank", -1)) if kind == "gpu" else -1,
            str(node.get("tier", ""))[:20],
            _number(f"node '{name}'", "nvls_efficiency", node.get("nvls_efficiency"), None, 0.0, 1.0),
            _flag(name, "rendezvous", node),
            _transport(name, node.get("transport", "auto")),
            _number(f"node '{name}'", "spread", node.get("spread"), 0.0, 0.0, 3.0) or 0.0,
            bool(_flag(name, "sharp", node)),
            _flag(name, "pat", node),
        )
    return _with_ranks(parts)


def _gpu_name(name: str, found: Any, own: Mapping[str, Any]) -> str:
    known = (*own, *GPUS)
    if found in known:
        return str(found)
    # "h100" begins three names, which are nearer than "v100".
    near = [gpu for gpu in known if gpu.startswith(str(found))] or get_close_matches(str(found), known, n=1)
    hint = f"; did you mean {' or '.join(repr(gpu) for gpu in near[:4])}?" if near and found else ""
    also = f"also allowed: {', '.join(own)}; " if own else ""
    listed = f"({also}`stepsim clusters` lists the shipped ones)"
    raise TopologyError(f"node '{name}': gpu: found {found!r:.60}; no such GPU{hint} {listed}")


def _rank(name: str, found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not -1 <= found < MAX_PARTS:
        raise TopologyError(f"node '{name}': rank: found {found!r:.60}; must be an integer from 0 on")
    return found


def _flag(name: str, key: str, node: Mapping[str, Any]) -> bool | None:
    found = node.get(key)
    if found is not None and not isinstance(found, bool):
        raise TopologyError(f"node '{name}': {key}: found {found!r:.60}; must be true or false")
    return found


def _transport(name: str, found: Any) -> str:
    if found not in ("auto", "posted"):
        raise TopologyError(f"node '{name}': transport: found {found!r:.60}; must be auto or posted")
    return str(found)


def _with_ranks(parts: dict[str, NetworkDevice]) -> dict[str, NetworkDevice]:
    """Return the parts with ranks: in the order of the file if no GPU has one; otherwise every rank must occur once."""
    gpus = [part for part in parts.values() if part.kind == "gpu"]
    if len(gpus) < 2:
        raise TopologyError(f"has {len(gpus)} node{'s' * (len(gpus) != 1)} of kind gpu; a network joins two or more")
    if all(part.rank < 0 for part in gpus):
        return parts | {part.name: part._replace(rank=i) for i, part in enumerate(gpus)}
    holder: dict[int, str] = {}
    for part in gpus:
        if part.rank < 0:
            raise TopologyError(f"node '{part.name}': rank: is missing, though other GPUs have one")
        if part.rank in holder:
            raise TopologyError(f"node '{part.name}': rank: found {part.rank}, which '{holder[part.rank]}' has too")
        holder[part.rank] = part.name
    missing = next((rank for rank in range(len(gpus)) if rank not in holder), None)
    if missing is not None:
        raise TopologyError(f"has {len(gpus)} GPUs and none of rank {missing}; ranks are 0 to {len(gpus) - 1}")
    return parts


def _links(edges: list[Any], parts: Mapping[str, NetworkDevice], directed: bool) -> dict[Ends, Link]:
    links: dict[Ends, Link] = {}
    for index, edge in enumerate(edges):
        if not isinstance(edge, Mapping):
            raise TopologyError(f"edges.{index}: must be a mapping with source and target")
        a, b = (str(edge.get(end, ""))[:MAX_NAME] for end in ("source", "target"))
        where = f"edge '{a}' – '{b}'"
        for end in (a, b):
            if end not in parts:
                raise TopologyError(f"{where}: no node has the id '{end}'")
        if a == b:
            raise TopologyError(f"{where}: joins a node to itself")
        bandwidth = _number(where, "bandwidth_bytes_per_s", edge.get("bandwidth_bytes_per_s"), 0.0, 0.0, 1e18)
        if not bandwidth:
            raise TopologyError(f"{where}: bandwidth_bytes_per_s: must be above 0 (leave the edge out where it is cut)")
        latency_s = _number(where, "latency_s", edge.get("latency_s"), 0.0, 0.0, 10.0)
        efficiency = _number(where, "efficiency", edge.get("efficiency"), 1.0, 0.0, 1.0)
        if not efficiency:
            raise TopologyError(f"{where}: efficiency: must be above 0")
        assert latency_s is not None
        for ends in ((a, b),) if directed else ((a, b), (b, a)):
            if ends in links:
                raise TopologyError(f"{where}: stands twice; write one edge with the bandwidth of both")
            links[ends] = Link(bandwidth, latency_s, efficiency)
    for a, b in links:
        if (b, a) not in links:
            raise TopologyError(f"edge '{a}' – '{b}': has no way back; a directed file names both directions")
    return links


def _number(where: str, key: str, found: Any, default: float | None, least: float, most: float) -> float | None:
    if found is None and (default is not None or key == "nvls_efficiency"):
        return default
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
        raise TopologyError(f"{where}: {key}: found {found!r:.60}; must be a number from {least:g} to {most:g}")
    return float(found) if math.isfinite(found) else default


def check(wiring: Wiring) -> None:
    """Check that every GPU has a link and reaches every other.

    Raises:
        TopologyError: for the first GPU that does not; the message names it.
    """
    first = wiring.ranks[0]
    alone = next((name for name in wiring.ranks if not wiring.beside[name]), None)
    if alone is not None:
        raise TopologyError(f"node '{alone}': is a GPU without a link")
    reached = reachable(wiring, first, KINDS)
    far = next((name for name in wiring.ranks if name not in reached), None)
    if far is not None:
        raise TopologyError(f"no way leads from GPU '{first}' to GPU '{far}': the network is in two parts")


def reachable(wiring: Wiring, start: str, kinds: Collection[str]) -> set[str]:
    """Return `start` and the parts of these kinds that can be reached from it through one another."""
    seen, left = {start}, [start]
    while left:
        for other in wiring.beside[left.pop()]:
            if other not in seen and wiring.kind(other) in kinds:
                seen.add(other)
                left.append(other)
    return seen
