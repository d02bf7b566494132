"""Build links from a node's own description (sysfs, NCCL's topology file).

Bandwidths that such descriptions lack are from NCCL's own table (version 2.21, src/graph/topo.h): of an NVLink by
generation (`topology.architectures`), of the link between two sockets by vendor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from topology.presets import GPUS, gpu_products
from topology.protocols import SIMPLE_NETWORK_S, SIMPLE_NVLINK_S
from topology.wiring import Ends, Link, NetworkDevice, Wiring

_ENCODING = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}
"""Part of a lane's bits that is data, by GT/s (PCI Express base specification)."""
_USUAL_NVLINK_EFFICIENCY = 0.8  # of Volta and Ampere
_MOST_NVLINKS = 18
NIC_EFFICIENCY = 0.96  # 12 GB/s of 100 Gbit/s
PCIE_EFFICIENCY = 6 / (8 * 128 / 130)  # 6 Gbit/s of a lane of 8 GT/s
_SOCKETS_BYTES_PER_S = {"GenuineIntel": 10e9, "AuthenticAMD": 16e9}
_OTHER_SOCKETS_BYTES_PER_S = 6e9

_OTHER_PRODUCT = r"[A-Z0-9]| (?:TI|SUPER|D|LAPTOP)\b"
"""What follows a product's name in that of another product: A10G, RTX 3090 Ti."""


def gpu_by_name(product: str) -> str | None:
    """Return the shipped GPU that a product's name means, or None.

    >>> gpu_by_name("NVIDIA H100 80GB HBM3"), gpu_by_name("Quadro")
    ('h100-sxm', None)
    """
    said = product.upper()
    fits = [w for w in gpu_products() if re.search(rf"(?<![A-Z0-9]){re.escape(w)}(?!{_OTHER_PRODUCT})", said)]
    return gpu_products()[max(fits, key=len)] if fits else None  # the longest, because `H100 PCIE` contains `H100`


def pcie_bytes_per_s(speed: str, width: str | int) -> float | None:
    """Return a PCIe link's bytes/s per direction; None if the text is not a speed ("Unknown").

    >>> round(pcie_bytes_per_s("32.0 GT/s PCIe", 16) / 1e9, 1)
    63.0
    """
    rate = re.match(r"\s*([0-9.]+)\s*GT/s", speed)
    lanes = re.fullmatch(r"\s*x?([0-9]+)\s*", str(width))
    if rate is None or lanes is None or float(rate[1]) not in _ENCODING or not 1 <= int(lanes[1]) <= 32:
        return None
    return float(rate[1]) * 1e9 * int(lanes[1]) * _ENCODING[float(rate[1])] / 8


class NodeParts:
    """Collect the parts and links of one node."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        self.parts: dict[str, NetworkDevice] = {}
        self.links: dict[Ends, Link] = {}

    def add(self, part: NetworkDevice) -> str:
        """Add a part if it is new; return its name."""
        self.parts.setdefault(part.name, part)
        return part.name

    def join(self, a: str, b: str, link: Link) -> None:
        """Join two parts by links in both directions."""
        self.links[a, b] = self.links[b, a] = link

    def join_pcie(self, a: str, b: str, bytes_per_s: float | None) -> None:
        """Join two parts over PCIe; without a known speed at 12 GB/s, as NCCL counts."""
        self.join(a, b, Link(12e9) if bytes_per_s is None else Link(bytes_per_s, 0.0, PCIE_EFFICIENCY))

    def join_sockets(self, vendor: str) -> None:
        """Join every two sockets, at the bandwidth that NCCL counts for the vendor."""
        sockets = [part.name for part in self.parts.values() if part.kind == "cpu"]
        wide = _SOCKETS_BYTES_PER_S.get(vendor, _OTHER_SOCKETS_BYTES_PER_S)
        for i, a in enumerate(sockets):
            for b in sockets[i + 1 :]:
                self.join(a, b, Link(wide))

    def join_nvlink(self, counts: dict[tuple[str, str], int], switched: bool | None = None) -> None:
        """Join GPUs by the number of NVLinks between each two, or to one NVSwitch if `switched`.

        None: to a switch if a GPU would have more links than any GPU has, because tools report a switch's links for
        every pair.
        """
        gpus = [part.name for part in self.parts.values() if part.kind == "gpu"]
        own = {gpu: [n for pair, n in counts.items() if gpu in pair and n] for gpu in gpus}
        if switched is None:
            switched = any(sum(each) > _MOST_NVLINKS for each in own.values())
        if switched:
            hub = self.add(NetworkDevice("nvswitch", "nvswitch"))
            for gpu, each in own.items():
                if each:
                    self.join(gpu, hub, self.nvlink(gpu, max(each), SIMPLE_NVLINK_S / 2))
            return
        for (a, b), count in counts.items():
            if count:
                self.join(a, b, self.nvlink(a, count, SIMPLE_NVLINK_S))

    def nvlink(self, gpu: str, count: int, latency_s: float) -> Link:
        """Return a link of `count` NVLinks of a GPU's generation."""
        chip = GPUS[self.parts[gpu].gpu].chip
        return Link(chip.nvlink_bytes_per_s * count, latency_s, chip.nvlink_efficiency or _USUAL_NVLINK_EFFICIENCY)

    def join_network(self, speeds: Mapping[str, float]) -> None:
        """Join all NICs to one switch at these bytes/s, because a node's description does not contain the network."""
        for nic in [part.name for part in self.parts.values() if part.kind == "nic"]:
            switch = self.add(NetworkDevice("network", "switch", tier="leaf"))
            self.join(nic, switch, Link(speeds[nic], SIMPLE_NETWORK_S / 2, NIC_EFFICIENCY))

    def wiring(self) -> Wiring:
        """Return the node as a network, with ranks in the order in which its GPUs were added."""
        gpus = [part for part in self.parts.values() if part.kind == "gpu"]
        ranked = {part.name: part._replace(rank=i) for i, part in enumerate(gpus)}
        return Wiring(self.parts | ranked, self.links, self.name, self.source)
