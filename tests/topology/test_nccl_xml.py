"""NCCL's topology file of a node."""

from __future__ import annotations

import pytest

from topology.graph_files import TopologyError, parse_xml
from topology.nccl_xml import from_nccl
from topology.presets import CLUSTERS
from topology.recognise import recognise


def node(nvlink: str = '<nvlink target="0000:05:00.0" count="18" tclass="0x068000"/>', sm: int = 90) -> str:
    """Eight GPUs, two to a PCIe switch, four switches to a socket, a NIC of 400 Gbit/s for each GPU."""
    pcie = 'link_speed="32.0 GT/s PCIe" link_width="16"'
    rank, sockets = 0, []
    for socket in range(2):
        switches = []
        for switch in range(2):
            devices = []
            for _ in range(2):
                devices.append(
                    f'<pci busid="0000:{rank:02x}:00.0" class="0x030200" {pcie}>'
                    f'<gpu dev="{rank}" sm="{sm}" rank="{rank}" gdr="1">{nvlink}</gpu></pci>'
                    f'<pci busid="0000:{rank:02x}:01.0" class="0x020700" {pcie}>'
                    f'<nic><net name="mlx5_{rank}" dev="{rank}" speed="400000" gdr="1"/></nic></pci>'
                )
                rank += 1
            bus = f"0000:f{socket}:{switch:02x}.0"
            switches.append(f'<pci busid="{bus}" class="0x060400" {pcie}>{"".join(devices)}</pci>')
        sockets.append(f'<cpu numaid="{socket}" arch="x86_64" vendor="GenuineIntel">{"".join(switches)}</cpu>')
    return f'<system version="1">{"".join(sockets)}</system>'


def test_a_node_of_hopper() -> None:
    cluster = recognise(from_nccl(parse_xml(node())))
    preset = CLUSTERS["dgx-h100"]
    assert cluster.intra_node == preset.intra_node
    assert cluster.gpu == preset.gpu.model_copy(
        update={"host_bandwidth_bytes_per_s": cluster.gpu.host_bandwidth_bytes_per_s}
    )
    assert cluster.gpu.host_bandwidth_bytes_per_s == pytest.approx(preset.gpu.host_bandwidth_bytes_per_s, rel=1e-3)
    assert cluster.inter_node.nics_per_node == 8
    assert cluster.inter_node.nic_bandwidth_bytes_per_s == 50e9


def test_nvlinks_between_gpus_without_a_switch() -> None:
    text = node("").replace('rank="0" gdr="1">', 'rank="0" gdr="1"><nvlink target="0000:01:00.0" count="4"/>')
    wiring = from_nccl(parse_xml(text))
    assert wiring.links["0000:00:00.0", "0000:01:00.0"].bandwidth_bytes_per_s == 100e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system/>", "has no cpu"),
        ("<system><cpu numaid='0'/></system>", "elements gpu: found 0"),
        (node(sm=1), "no shipped GPU has it"),
        (node().replace('rank="3"', 'rank="x"'), "rank: found 'x'"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        from_nccl(parse_xml(text))
