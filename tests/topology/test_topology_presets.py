"""Presets against the vendors' system totals, and what a description left out."""

import pytest
from pydantic import ValidationError

from topology.presets import CLUSTERS, GPUS
from topology.spec import ClusterSpec, InterNode, IntraNode

NAMES = {"v100", "a100-sxm", "a100-pcie", "h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200", "gb300"}
CLUSTER_NAMES = {"dgx-v100", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300"}
CLUSTER_NAMES |= {"cpu-host", "gb200-nvl72", "gb300-nvl72", "vr200-nvl72"}


def test_the_promised_names_are_there_and_each_has_a_source() -> None:
    assert NAMES | {"cpu"} <= set(GPUS)
    assert set(CLUSTERS) >= CLUSTER_NAMES
    for preset in (*GPUS.values(), *CLUSTERS.values()):
        assert preset.source
    for name, gpu in GPUS.items():
        assert gpu.name == name
    for name, cluster in CLUSTERS.items():
        assert cluster.name == name
        assert cluster.gpu in GPUS.values()


@pytest.mark.parametrize(
    ("cluster", "dtype", "system_flops_per_s"),
    [  # printed on the system's data sheet, sparsity taken off where the sheet has it
        ("dgx-a100", "fp16", 5e15 / 2),  # "5 petaFLOPS AI"
        ("dgx-h100", "fp8", 32e15 / 2),  # "32 petaFLOPS FP8"
        ("dgx-b200", "fp8", 72e15 / 2),  # "72 petaFLOPS training"
        ("dgx-b200", "nvfp4", 144e15 / 2),  # "144 petaFLOPS inference"
        ("dgx-b300", "nvfp4", 108e15),  # "108 petaFLOPS dense"
    ],
)
def test_eight_gpus_make_the_peak_printed_for_the_system(cluster: str, dtype: str, system_flops_per_s: float) -> None:
    gpu = CLUSTERS[cluster].gpu
    assert 8 * gpu.peak_flops_per_s[dtype] == pytest.approx(system_flops_per_s, rel=0.02)


@pytest.mark.parametrize(
    ("cluster", "dtype", "rack_flops_per_s"),
    [
        ("gb200-nvl72", "nvfp4", 720e15),
        ("gb200-nvl72", "fp8", 360e15),
        ("gb300-nvl72", "nvfp4", 1080e15),
        ("vr200-nvl72", "nvfp4", 2520e15),
        ("vr200-nvl72", "fp8", 1260e15),
        ("vr200-nvl72", "bf16", 288e15),
    ],
)
def test_72_gpus_make_the_dense_peak_printed_for_the_rack(cluster: str, dtype: str, rack_flops_per_s: float) -> None:
    assert 72 * CLUSTERS[cluster].gpu.peak_flops_per_s[dtype] == pytest.approx(rack_flops_per_s)


def test_engines_run_blackwells_kernels_on_rubin() -> None:
    """Compute capability 10.7 is of the family 10.x, but its matmuls and links are its own."""
    rubin = GPUS["vr200"]
    assert (rubin.architecture, rubin.kernel_architecture) == ("rubin", "blackwell")
    assert GPUS["h100-sxm"].kernel_architecture == "hopper"
    assert not rubin.same_multiprocessors(GPUS["gb300"])


def test_links_add_up_to_the_systems_totals() -> None:
    both_ways = {name: 2 * c.intra_node.bandwidth_bytes_per_s * c.domain_gpus for name, c in CLUSTERS.items()}
    assert both_ways["dgx-b200"] == 14.4e12
    assert both_ways["gb200-nvl72"] == pytest.approx(130e12, rel=0.01)
    assert both_ways["vr200-nvl72"] == pytest.approx(260e12, rel=0.01)
    network = {
        name: c.inter_node.nics_per_node * c.inter_node.nic_bandwidth_bytes_per_s for name, c in CLUSTERS.items()
    }
    assert network["dgx-h100"] == 8 * 400e9 / 8
    assert network["dgx-b300"] == 8 * 800e9 / 8
    assert network["vr200-nvl72"] == 4 * 1.6e12 / 8
    assert network["dgx-v100"] == 4 * 100e9 / 8


def test_precisions_a_gpu_lacks_are_left_out() -> None:
    assert "bf16" not in GPUS["v100"].peak_flops_per_s
    assert "fp8" not in GPUS["a100-sxm"].peak_flops_per_s
    assert "nvfp4" not in GPUS["h100-sxm"].peak_flops_per_s
    assert {"mxfp8", "nvfp4"} <= set(GPUS["b200-sxm"].peak_flops_per_s)


def test_a_domain_left_out_is_the_node() -> None:
    gpu = GPUS["a100-sxm"]
    assert ClusterSpec(gpu=gpu, gpus_per_node=4).nvlink_domain == 4
    assert ClusterSpec(gpu=gpu).nvlink_domain == 8
    assert ClusterSpec(gpu=gpu, gpus_per_node=8, nvlink_domain=2).domain_gpus == 8
    assert ClusterSpec(gpu=gpu, gpus_per_node=4, nvlink_domain=72).domain_gpus == 72


def test_a_domain_of_broken_nodes_is_refused() -> None:
    with pytest.raises(ValidationError, match="nvlink_domain is 6; it must be gpus_per_node"):
        ClusterSpec(gpu=GPUS["a100-sxm"], gpus_per_node=4, nvlink_domain=6)
    with pytest.raises(ValidationError):
        IntraNode(bandwidth_bytes_per_s=0)
    with pytest.raises(ValidationError):
        InterNode(oversubscription=0.5)


@pytest.mark.parametrize("name", ["b200-sxm", "gb200"])
def test_int8_units_of_blackwell_are_as_fast_as_fp8_ones(name: str) -> None:
    """NVIDIA's HGX page and GB200 NVL72 data sheet: 72 and 720 POPS with sparsity, as of FP8; B300 has hardly any."""
    peaks = GPUS[name].peak_flops_per_s
    assert peaks["int8"] == peaks["fp8"]


@pytest.mark.parametrize(("name", "bytes_per_s"), [("gb300-nvl72", 14e12 / 18), ("dgx-b300", 2 * 8 * 6400e6 * 8)])
def test_host_memory_of_blackwell_ultra(name: str, bytes_per_s: float) -> None:
    """Of 18 trays of a rack 14 TB/s; of two sockets eight channels of DDR5-6400 each."""
    assert CLUSTERS[name].host_memory_bandwidth_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
