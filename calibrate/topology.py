"""Writes the graph of this node: its GPUs, PCIe tree, sockets, NVLink and NICs.

    python -m calibrate.topology --out FILE [--profile PROFILE.json]

It reads sysfs and, if there is one, nvidia-smi. Bandwidths between two ranks from a profile of `calibrate.run` replace
data-sheet bandwidths inside the node. It needs no torch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click

from sim.commands.command import Command, run_command
from sim.commands.files_named import OUTPUT
from sim.inputs.topology_input import write_topology
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from topology.node_parts import NodeParts, gpu_by_name, pcie_bytes_per_s
from topology.presets import GPUS
from topology.timing import timing_of
from topology.wiring import Link, NetworkDevice, Wiring, link_word

_GPU, _NIC = ("0x0300", "0x0302", "0x1200"), ("0x0200", "0x0207")  # PCI classes
_FALLBACK_NIC_BYTES_PER_S = 1.25e9
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Device:
    """A PCIe device of sysfs: its bus id, the bridges above it, its NUMA node, its link's bandwidth in bytes/s."""

    bus: str
    above: tuple[str, ...]
    numa: int
    pcie_bytes_per_s: float | None
    kind: str


def devices(sysfs: Path) -> list[Device]:
    """Return GPUs and NICs in the order of their bus ids."""
    out = []
    for entry in sorted((sysfs / "bus/pci/devices").glob("*")):
        kind = "gpu" if _text(entry / "class").startswith(_GPU) else "nic" if _is_nic(entry) else ""
        if kind:
            way = entry.resolve().parts
            above = tuple(
                part for part in way[:-1] if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9]", part)
            )
            out.append(Device(entry.name, above, max(0, _whole(entry / "numa_node", 0)), _pcie(entry), kind))
    return out


def _is_nic(entry: Path) -> bool:
    return _text(entry / "class").startswith(_NIC)


def _pcie(entry: Path) -> float | None:
    """Return the link's maximum bytes/s, as its current speed may be that of a sleeping link."""
    return pcie_bytes_per_s(_text(entry / "max_link_speed"), _text(entry / "max_link_width"))


def nic_speeds(sysfs: Path) -> dict[str, float]:
    """Return the bytes/s of NICs by bus id, of InfiniBand ports or else of network interfaces."""
    out: dict[str, float] = {}
    for rate in sorted((sysfs / "class/infiniband").glob("*/ports/*/rate")):
        found = re.match(r"([0-9.]+) Gb/sec", _text(rate))
        if found:
            bus = (rate.parents[2] / "device").resolve().name
            out[bus] = max(out.get(bus, 0.0), float(found[1]) * 1e9 / 8)
    for speed in sorted((sysfs / "class/net").glob("*/speed")):
        way = (speed.parent / "device").resolve()
        bus = next((p for p in reversed(way.parts) if re.fullmatch(r"[0-9a-f]{4}:.*\.[0-9]", p)), "")
        megabits = _whole(speed, -1)
        if bus and megabits > 0 and bus not in out:
            out[bus] = megabits * 1e6 / 8
    return out


def node_wiring(sysfs: Path, cpu_vendor: str, run: Run | None) -> Wiring:
    """Return the node as sysfs shows it; `run` runs nvidia-smi with arguments, None if there is none."""
    made = NodeParts("this-node", "calibrate.topology: sysfs" + (" and nvidia-smi" if run else ""))
    for node in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        made.add(NetworkDevice(f"cpu{int(node.name.removeprefix('node'))}", "cpu"))
    found = devices(sysfs)
    names = _gpu_names(run) if run else {}
    gpus = [d for d in found if d.kind == "gpu" and d.bus in names]
    nics = [d for d in found if d.kind == "nic"]
    bridges = _shared_bridges([*gpus, *nics])
    for device in gpus + nics:
        top = made.add(NetworkDevice(f"cpu{device.numa}", "cpu"))
        for bridge in device.above:
            if bridge in bridges:
                switch = made.add(NetworkDevice(f"pcie {bridge}", "pcie"))
                made.join_pcie(top, switch, _pcie(sysfs / "bus/pci/devices" / bridge))
                top = switch
        gpu = names.get(device.bus, "")
        name = made.add(NetworkDevice(f"gpu {device.bus}" if gpu else f"nic {device.bus}", device.kind, gpu))
        made.join_pcie(top, name, device.pcie_bytes_per_s)
    made.join_sockets(cpu_vendor)
    if run and gpus:
        made.join_nvlink(_nvlinks(run(["topo", "-m"]), [f"gpu {bus}" for bus in names if f"gpu {bus}" in made.parts]))
    speeds = nic_speeds(sysfs)
    made.join_network({f"nic {d.bus}": speeds.get(d.bus, _FALLBACK_NIC_BYTES_PER_S) for d in nics})
    return made.wiring()


def _shared_bridges(found: Sequence[Device]) -> set[str]:
    """Return the bridges with several devices below them, which are switches; a bridge with one device is its link."""
    below: dict[str, set[str]] = {}
    for device in found:
        way = (*device.above, device.bus)
        for bridge, next_one in pairwise(way):
            below.setdefault(bridge, set()).add(next_one)
    return {bridge for bridge, ways in below.items() if len(ways) > 1}


def _gpu_names(run: Run) -> dict[str, str]:
    """Return the shipped GPUs' names by bus id in nvidia-smi's order; other devices are left out with a message."""
    out: dict[str, str] = {}
    for line in run(["--query-gpu=pci.bus_id,name", "--format=csv,noheader"]).splitlines():
        bus, _, product = line.partition(",")
        name = gpu_by_name(product)
        if name is None:
            click.echo(f"left out: {product.strip()} at {bus.strip()}: no shipped GPU has that name", err=True)
        else:
            out[bus.strip().lower()[-12:]] = name
    return out


def _nvlinks(matrix: str, gpus: Sequence[str]) -> dict[tuple[str, str], int]:
    """Return the number of NVLinks between each two GPUs; NV18 in row GPU0 and column GPU1 of `matrix` means 18."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        own = re.fullmatch(r"GPU([0-9]+)", row[0]) if row else None
        if own is None or len(row) <= len(gpus) or row[1].startswith("GPU"):
            continue
        for other in range(int(own[1]) + 1, len(gpus)):
            link = re.fullmatch(r"NV([0-9]+)", row[1 + other])
            if link:
                counts[gpus[int(own[1])], gpus[other]] = int(link[1])
    return counts


def with_measured(wiring: Wiring, profile: Profile) -> Wiring:
    """Return the node with links between GPUs as fast as the profile's messages between two ranks.

    The simulator assumes that kernels sustain a share of an NVLink's bandwidth, so NVLinks get the measured bandwidth
    divided by that share.
    """
    tables = [t for t in profile.collectives if t.op == "send_recv" and t.ranks == 2]
    rates = [size / seconds for t in tables for size, seconds in zip(t.bytes, t.seconds, strict=True) if seconds > 0]
    if not rates or not wiring.ranks:
        return wiring
    links = dict(wiring.links)
    words = {ends: link_word(*(wiring.kind(end) for end in ends)) for ends in links}
    wanted = ("nvlink",) if "nvlink" in words.values() else ("pcie", "peer")
    share = timing_of(GPUS[wiring.parts[wiring.ranks[0]].gpu]).direct.share if "nvlink" in wanted else 1.0
    for ends, each in links.items():
        if words[ends] in wanted and "gpu" in (wiring.kind(ends[0]), wiring.kind(ends[1])):
            links[ends] = Link(float(max(rates)) / share, each.latency_s, 1.0)
    return Wiring(wiring.parts, links, wiring.name, f"{wiring.source}, profile {profile.name}", wiring.gpus)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _whole(path: Path, default: int) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else default


def _nvidia_smi() -> Run | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None

    def run(arguments: Sequence[str]) -> str:
        try:
            done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""

    return run


def _cpu_vendor() -> str:
    found = re.search(r"vendor_id\s*:\s*(\w+)", _text(Path("/proc/cpuinfo")))
    return found[1] if found else ""


@click.command("topology", cls=Command)
@click.option("--out", type=OUTPUT, required=True, help="node-link JSON, or GraphML where the name ends in .graphml")
@click.option("--profile", metavar="FILE", help="calibrate.run's profile; its messages set bandwidths within the node")
def main(out: Path, profile: str | None) -> None:
    """Write the graph of this node; with two GPUs or more, `cluster: {topology: FILE}` reads it."""
    measured = load_profile(profile) if profile else None
    wiring = node_wiring(Path("/sys"), _cpu_vendor(), _nvidia_smi())
    if measured is not None:
        wiring = with_measured(wiring, measured)
    write_topology(out, wiring)
    count = {kind: sum(part.kind == kind for part in wiring.parts.values()) for kind in ("gpu", "cpu", "pcie", "nic")}
    click.echo(
        f"wrote {out}: {count['gpu']} GPUs, {count['cpu']} sockets or NUMA nodes, {count['pcie']} PCIe switches, "
        f"{count['nic']} NICs"
    )
    if count["gpu"] < 2:
        click.echo(
            f"nvidia-smi names {'one GPU' if count['gpu'] else 'no GPU'} of this machine: a scenario's "
            "cluster.topology needs two GPUs or more"
        )


if __name__ == "__main__":
    run_command(main)
