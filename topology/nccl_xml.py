"""Read NCCL's own topology file, which NCCL_TOPO_DUMP_FILE writes: the node as NCCL sees it."""

from __future__ import annotations

from typing import NamedTuple
from xml.etree.ElementTree import Element

from topology.graph_files import TopologyError, check
from topology.node_parts import NodeParts, pcie_bytes_per_s
from topology.presets import gpu_capabilities
from topology.wiring import NetworkDevice, Wiring

_NVSWITCH = "0x0680"  # the PCI class of its bridge
_NIC_BITS_PER_S = 1e6  # the unit of a net's speed


class _Gpu(NamedTuple):
    """Hold a GPU: its rank and bus id, the part above it and the bytes/s of that link, and its XML element."""

    rank: int
    bus: str
    above: str
    pcie_bytes_per_s: float | None
    element: Element


def from_nccl(root: Element, name: str = "node") -> Wiring:
    """Return the network of one node from its XML: `system` holds `cpu`, `cpu` holds `pci`, `pci` holds `gpu`, `nic`.

    Raises:
        TopologyError: for the first thing wrong.
    """
    made = NodeParts(name, "NCCL's topology file")
    cpus = root.findall("cpu")
    if not cpus:
        raise TopologyError("has no cpu: NCCL's topology file is a system of cpu, pci, gpu and nic")
    speeds: dict[str, float] = {}
    found: list[_Gpu] = []
    for cpu in cpus:
        socket = made.add(NetworkDevice(f"cpu{cpu.get('numaid', '0')}", "cpu"))
        for pci in cpu.findall("pci"):
            _pci(made, socket, pci, found, speeds)
        for nic in cpu.findall("nic"):
            _nets(made, socket, nic, None, speeds)
    made.join_sockets(cpus[0].get("vendor", ""))
    gpus = _gpus(made, found)
    _nvlinks(made, gpus)
    made.join_network(speeds)
    wiring = made.wiring()
    if len(gpus) < 2:
        raise TopologyError(f"elements gpu: found {len(gpus)}; a network joins two or more")
    check(wiring)
    return wiring


def _pci(made: NodeParts, above: str, pci: Element, found: list[_Gpu], speeds: dict[str, float]) -> None:
    """Add a device, or a switch with the devices below it."""
    bus = pci.get("busid", "")
    wide = pcie_bytes_per_s(pci.get("link_speed", ""), pci.get("link_width", ""))
    for gpu in pci.findall("gpu"):
        found.append(_Gpu(_integer(gpu, "rank", _integer(gpu, "dev", len(found))), bus, above, wide, gpu))
    for nic in pci.findall("nic"):
        _nets(made, above, nic, wide, speeds)
    below = pci.findall("pci")
    if below:
        switch = made.add(NetworkDevice(f"pcie {bus}", "pcie"))
        made.join_pcie(above, switch, wide)
        for each in below:
            _pci(made, switch, each, found, speeds)


def _nets(made: NodeParts, above: str, nic: Element, wide: float | None, speeds: dict[str, float]) -> None:
    for net in nic.findall("net"):
        name = made.add(NetworkDevice(f"nic {net.get('name', net.get('dev', ''))}", "nic"))
        speeds[name] = _integer(net, "speed", 100_000) * _NIC_BITS_PER_S / 8
        made.join_pcie(above, name, wide)


def _gpus(made: NodeParts, found: list[_Gpu]) -> dict[str, Element]:
    """Add the GPUs in the order of their ranks; return their elements by name."""
    out: dict[str, Element] = {}
    for rank, bus, above, wide, gpu in sorted(found, key=lambda each: each.rank):
        preset = gpu_capabilities().get(_integer(gpu, "sm", 0))
        if preset is None:
            raise TopologyError(f"gpu of rank {rank}: sm: found {gpu.get('sm')}; no shipped GPU has it")
        name = made.add(NetworkDevice(bus, "gpu", preset))
        made.join_pcie(above, name, wide)
        out[name] = gpu
    return out


def _nvlinks(made: NodeParts, gpus: dict[str, Element]) -> None:
    """Add the NVLinks; the target of an `nvlink` is the bus id of another GPU, or a switch, recognised by its class."""
    counts: dict[tuple[str, str], int] = {}
    switched = False
    for name, gpu in gpus.items():
        for nvlink in gpu.findall("nvlink"):
            target, count = nvlink.get("target", ""), _integer(nvlink, "count", 1)
            if nvlink.get("tclass", "").startswith(_NVSWITCH):
                switched = True
                counts[name, "nvswitch"] = counts.get((name, "nvswitch"), 0) + count
            elif target in gpus and (target, name) not in counts:
                counts[name, target] = count
    if counts:
        made.join_nvlink(counts, switched)


def _integer(element: Element, key: str, default: int) -> int:
    text = element.get(key)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise TopologyError(f"{element.tag}: {key}: found '{text}'; must be an integer") from None
