"""Represent a network of any shape as plain data, its parts and links; users write and read this graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct, field

KINDS = ("gpu", "nvswitch", "pcie", "cpu", "nic", "switch")
"""The kinds of parts. `cpu`: a socket with its memory; `switch`: of the network between nodes."""


class Link(NamedTuple):
    """Describe one direction of a link. `efficiency`: the part of the bandwidth that is left for data after headers."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    efficiency: float = 1.0

    @property
    def usable_bytes_per_s(self) -> float:
        """Bandwidth that is left for data."""
        return self.bandwidth_bytes_per_s * self.efficiency


class NetworkDevice(NamedTuple):
    """Describe one GPU, NIC, switch or CPU of the network.

    `gpu`, `rank`: a GPU's preset and rank. `tier`: a switch's label in drawings (leaf, spine, router).
    `nvls_efficiency`: of an NVSwitch, as in `IntraNode`. `rendezvous`, `transport`, `spread`,
    `sharp`, `pat`: of a NIC, as in `InterNode`. None: not stated.
    """

    name: str
    kind: str
    gpu: str = ""
    rank: int = -1
    tier: str = ""
    nvls_efficiency: float | None = None
    rendezvous: bool | None = None
    transport: str = "auto"
    spread: float = 0.0
    sharp: bool = False
    pat: bool | None = None


Ends = tuple[str, str]


class Wiring(Struct, frozen=True, dict=True):
    """Hold the parts by name, and the links by the two parts that they join, one entry per direction.

    `name`, `source`: of the cluster. `gpus`: by name, descriptions of GPUs that are not presets.
    """

    parts: Mapping[str, NetworkDevice]
    links: Mapping[Ends, Link]
    name: str = "custom"
    source: str = ""
    gpus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __hash__(self) -> int:
        # Mappings have no hash, but caches of networks need one.
        return hash((self.name, len(self.parts), len(self.links)))

    @cached_property
    def beside(self) -> dict[str, dict[str, Link]]:
        """For each part, the links that leave it, by the part that they reach."""
        out: dict[str, dict[str, Link]] = {name: {} for name in self.parts}
        for (a, b), each in self.links.items():
            out[a][b] = each
        return out

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Names of the GPUs, by rank."""
        gpus = [part for part in self.parts.values() if part.kind == "gpu"]
        return tuple(part.name for part in sorted(gpus, key=lambda part: part.rank))

    def gpu_of(self, rank: int) -> str:
        """Return the name of a rank's GPU."""
        return self.parts[self.ranks[rank]].gpu

    def kind(self, name: str) -> str:
        """Return the kind of a part."""
        return self.parts[name].kind


def link_word(kind: str, other: str) -> str:
    """Return a link's kind from its parts' kinds: nvlink, peer (GPU to GPU through the host), nic, fabric, pcie.

    >>> link_word("gpu", "nvswitch"), link_word("nic", "switch"), link_word("pcie", "nic")
    ('nvlink', 'nic', 'pcie')
    """
    ends = {kind, other}
    if ends <= {"gpu", "nvswitch"}:
        return "nvlink"
    if ends == {"gpu", "cpu"}:
        return "peer"
    if "switch" in ends or ends == {"nic"}:
        return "fabric" if ends == {"switch"} else "nic"
    return "pcie"


def node_link(wiring: Wiring) -> dict[str, Any]:
    """Return the network in networkx's node-link form; it is directed if a link differs between its two directions."""
    one_way = any(wiring.links.get((b, a)) != each for (a, b), each in wiring.links.items())
    about = {"name": wiring.name, "source": wiring.source, "gpus": {k: dict(v) for k, v in wiring.gpus.items()}}
    seen: set[Ends] = set()
    edges = []
    for (a, b), each in wiring.links.items():
        if one_way or (b, a) not in seen:
            seen.add((a, b))
            edges.append({"source": a, "target": b, **each._asdict()})
    nodes = [{"id": part.name, **_said(part)} for part in wiring.parts.values()]
    graph = {key: value for key, value in about.items() if value}
    return {"directed": one_way, "multigraph": False, "graph": graph, "nodes": nodes, "edges": edges}


def _said(part: NetworkDevice) -> dict[str, Any]:
    """Return the fields of a part that differ from the defaults."""
    usual = NetworkDevice("", "")._asdict()
    return {key: value for key, value in part._asdict().items() if key != "name" and value != usual[key]}
