"""The graph of a node from sysfs and nvidia-smi, of machines that are files here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from calibrate.topology import main, node_wiring, with_measured
from sim.inputs.topology_input import read_topology, write_topology
from sim.prices.profile import CollectiveTable, Profile
from tests.processes import exit_code
from topology.network import Network

BUSES = ("0000:17:00.0", "0000:3d:00.0", "0000:a1:00.0", "0000:c7:00.0")


def add_device(sysfs: Path, way: str, kind: str, numa: int, **files: str) -> Path:
    """A device at its place in the tree, and its link by bus id."""
    place = sysfs / "devices" / way
    place.mkdir(parents=True, exist_ok=True)
    speed = {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16"}
    for name, text in {"class": kind, "numa_node": str(numa), **speed, **files}.items():
        (place / name).write_text(text + "\n")
    by_bus = sysfs / "bus/pci/devices" / place.name
    by_bus.parent.mkdir(parents=True, exist_ok=True)
    by_bus.symlink_to(place)
    return place


@pytest.fixture
def workstation(tmp_path: Path) -> Path:
    """Four GPUs at two sockets, each behind a port of its own, and one NIC of 25 Gbit/s."""
    sysfs = tmp_path / "sys"
    for numa in (0, 1):
        (sysfs / f"devices/system/node/node{numa}").mkdir(parents=True)
    for i, bus in enumerate(BUSES):
        port = f"pci0000:{bus[5:7]}/0000:{bus[5:7]}:01.0"
        add_device(sysfs, port, "0x060400", i // 2)
        add_device(sysfs, f"{port}/{bus}", "0x030000", i // 2)
    nic = add_device(sysfs, "pci0000:40/0000:40:01.0/0000:41:00.0", "0x020000", 0, max_link_width="8")
    interface = sysfs / "class/net/eth0"
    interface.mkdir(parents=True)
    (interface / "speed").write_text("25000\n")
    (interface / "device").symlink_to(nic)
    return sysfs


def smi(matrix: str, product: str = "NVIDIA GeForce RTX 4090") -> Callable[[Sequence[str]], str]:
    def run(arguments: Sequence[str]) -> str:
        return matrix if arguments[0] == "topo" else "".join(f"0000{bus.upper()}, {product}\n" for bus in BUSES)

    return run


ALL_PCIE = "\tGPU0\tGPU1\tGPU2\tGPU3\n" + "".join(
    f"GPU{i}\t" + "\t".join(" X " if i == j else "NODE" if i // 2 == j // 2 else "SYS" for j in range(4)) + "\n"
    for i in range(4)
)


def test_a_workstation_without_nvlink(workstation: Path, tmp_path: Path) -> None:
    wiring = node_wiring(workstation, "AuthenticAMD", smi(ALL_PCIE))
    assert [wiring.parts[name].gpu for name in wiring.ranks] == ["rtx4090"] * 4
    assert wiring.beside["gpu 0000:17:00.0"].keys() == {"cpu0"}
    assert wiring.links["cpu0", "cpu1"].bandwidth_bytes_per_s == 16e9
    assert wiring.links["nic 0000:41:00.0", "network"].bandwidth_bytes_per_s == pytest.approx(25e9 / 8)
    write_topology(tmp_path / "here.json", wiring)
    cluster = read_topology(str(tmp_path / "here.json"))
    assert (cluster.gpus_per_node, cluster.intra_node.kind) == (4, "pcie")
    network = Network(cluster)
    assert network.path(0, 1).bytes_per_s == pytest.approx(24e9)
    assert network.path(0, 2).bytes_per_s == pytest.approx(8e9)  # 0 and 1 both cross between the sockets
    assert network.group(range(2)).ring_bytes_per_s == pytest.approx(24e9)
    assert network.group(range(4)).ring_bytes_per_s == pytest.approx(16e9)


@pytest.mark.parametrize(("links", "hub"), [(12, False), (4, False), (18, True)])
def test_nvlinks_are_of_a_switch_where_a_gpu_has_not_that_many(workstation: Path, links: int, hub: bool) -> None:
    pairs = [(0, 1), (2, 3)] if links == 12 else [(i, j) for i in range(4) for j in range(4) if i < j]
    matrix = "\tGPU0\tGPU1\tGPU2\tGPU3\n" + "".join(
        f"GPU{i}\t" + "\t".join(f"NV{links}" if tuple(sorted((i, j))) in pairs else "SYS" for j in range(4)) + "\n"
        for i in range(4)
    )
    wiring = node_wiring(workstation, "GenuineIntel", smi(matrix, "NVIDIA A100-SXM4-80GB"))
    assert ("nvswitch" in wiring.parts) is hub
    end = "nvswitch" if hub else wiring.ranks[1]
    assert wiring.links[wiring.ranks[0], end].bandwidth_bytes_per_s == links * 25e9


def test_what_was_measured_between_two_ranks_is_their_links_bandwidth(workstation: Path) -> None:
    sizes, seconds = np.array([1 << 20, 1 << 28]), np.array([1e-3, (1 << 28) / 20e9])
    table = CollectiveTable("send_recv", 2, sizes, seconds, np.zeros(2))
    measured = Profile("mine", "a test", collectives=(table,))
    wiring = with_measured(node_wiring(workstation, "", smi(ALL_PCIE)), measured)
    assert wiring.links["gpu 0000:17:00.0", "cpu0"].bandwidth_bytes_per_s == pytest.approx(20e9)
    assert "profile mine" in wiring.source


def test_this_machine_is_written_whatever_it_has(tmp_path: Path) -> None:
    assert exit_code(main, "--out", str(tmp_path / "here.json")) == 0
    kinds = {node["kind"] for node in json.loads((tmp_path / "here.json").read_text())["nodes"]}
    assert "cpu" in kinds or "gpu" in kinds


def test_without_gpus_it_says_so(workstation: Path) -> None:
    wiring = node_wiring(workstation, "GenuineIntel", None)
    assert {part.kind for part in wiring.parts.values()} == {"cpu", "nic", "switch"}
