"""A cluster's network from a file, and into one: node-link JSON and GraphML; NCCL's topology file is read too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sim.core.errors import InputError
from sim.core.files import MAX_JSON_BYTES, read_json, read_text, write_text
from sim.inputs.file_kinds import refuse_other_kind
from topology.graph_files import TopologyError, from_graphml, from_node_link, graphml, parse_xml
from topology.nccl_xml import from_nccl
from topology.presets import GPUS
from topology.recognise import recognise
from topology.spec import ClusterSpec
from topology.wiring import Wiring, node_link

ReadT = TypeVar("ReadT")
XML = (".graphml", ".xml")


def read_topology(path: str) -> ClusterSpec:
    """The cluster that a file of parts and links describes.

    Raises:
        InputError: for a file that cannot be read, and for the first thing wrong with the network.
    """
    return _named(path, lambda: recognise(_wiring(Path(path))))


def given_topology(data: Any, where: str) -> Wiring:
    """The network of a mapping in node-link form, as results carry it.

    Raises:
        InputError: for the first thing wrong with it.
    """
    return _named(where, lambda: from_node_link(data))


def write_topology(path: str | Path, wiring: Wiring) -> None:
    """Write a network: GraphML where the name ends so, else node-link JSON.

    Raises:
        InputError: where the file cannot be written.
    """
    file = Path(path)
    xml = file.suffix.lower() in XML
    write_text(file, graphml(wiring) if xml else json.dumps(node_link(wiring), indent=1, allow_nan=False) + "\n")


def with_own_gpu(wiring: Wiring, cluster: ClusterSpec) -> Wiring:
    """The network with its GPU's description, unless that is a preset's."""
    gpu = cluster.gpu
    if GPUS.get(gpu.name) == gpu:
        return wiring
    described = gpu.model_dump(mode="json", exclude_none=True)
    return Wiring(wiring.parts, wiring.links, wiring.name, wiring.source, {**wiring.gpus, gpu.name: described})


def _named(where: str, read: Callable[[], ReadT]) -> ReadT:
    try:
        return read()
    except TopologyError as error:
        raise InputError(f"{where}: {error}") from None


def _wiring(path: Path) -> Wiring:
    if path.suffix.lower() in XML:
        root = parse_xml(read_text(path, MAX_JSON_BYTES))
        return from_nccl(root, path.stem) if root.tag == "system" else from_graphml(root, path.stem)
    data = read_json(path)
    refuse_other_kind(path, data, "a network's nodes and edges are wanted")
    return from_node_link(data, path.stem)
