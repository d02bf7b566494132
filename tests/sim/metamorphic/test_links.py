"""What faster links may and may not do to a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sim.core.shipped import shipped_profiles
from tests.sim.metamorphic.laws import SMALL, run, vary
from topology.network import Network
from topology.presets import CLUSTERS, GPUS

MEASURED = [name for name, gpu in GPUS.items() if (gpu.variant_of or name) in shipped_profiles()]
TENSOR = {**SMALL, "parallelism": {"tp": 8, "sp": True}}


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72"])
def test_links_inside_a_node_matter_where_its_collectives_were_measured(cluster: str) -> None:
    tp = 4 if cluster.startswith("gb") else 8
    links = [{"bandwidth_bytes_per_s": 50e9}, {"bandwidth_bytes_per_s": 200e9}, {}, {"bandwidth_bytes_per_s": 4e12}]
    steps = [
        vary(TENSOR, cluster={"preset": cluster, "intra_node": x}, parallelism__tp=tp)["exposed_comm_s"] for x in links
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 2.5 * steps[1]
    assert steps[2] > 1.1 * steps[3]


def in_16_bits(gpu: str) -> dict[str, Any]:
    """Return the small training in bf16, or in fp16 on a GPU without it."""
    return {**SMALL["training"], "precision": "bf16" if "bf16" in GPUS[gpu].peak_flops_per_s else "fp16"}


@pytest.mark.parametrize("gpu", MEASURED)
def test_every_measured_gpu_by_name_brings_a_profile(gpu: str) -> None:
    result = run(**{**SMALL, "cluster": {"gpu": gpu}, "training": in_16_bits(gpu)})
    assert result["provenance"]["shares"]["roofline"] < 0.5 or gpu == "cpu"
    assert 0.2 < result["mfu"] < (1.0 if gpu == "cpu" else 0.8)


@pytest.mark.parametrize("gpu", [name for name in GPUS if name not in MEASURED])
def test_a_roofline_that_was_asked_for_prices_a_gpu_and_says_so(gpu: str) -> None:
    result = run(**{**SMALL, "cluster": {"gpu": gpu}, "calibration": "roofline", "training": in_16_bits(gpu)})
    assert result["provenance"]["shares"]["roofline"] > 0.5
    assert any("roofline" in warning for warning in result["warnings"])


def test_a_node_described_by_hand_is_the_preset_of_its_links() -> None:
    links = {"kind": "nvswitch", "bandwidth_bytes_per_s": 450e9, "latency_s": 3.4e-6}
    by_hand = {"gpu": "h100-sxm", "gpus_per_node": 8, "intra_node": links}
    assert run(**{**TENSOR, "cluster": by_hand})["step_time_s"] == pytest.approx(run(**TENSOR)["step_time_s"], rel=1e-3)


def test_pcie_in_a_node_is_slower_than_nvlink() -> None:
    pcie = {"preset": "dgx-h100", "intra_node": {"kind": "pcie", "bandwidth_bytes_per_s": 25e9}}
    assert vary(TENSOR, cluster=pcie)["exposed_comm_s"] > 5 * vary(TENSOR)["exposed_comm_s"]


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100", "gb200-nvl72"])
@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_larger_messages_take_longer_but_for_changes_of_protocol(cluster: str, nodes: int, kind: str) -> None:
    spec = CLUSTERS[cluster].model_copy(update={"nodes": nodes})
    network, ranks = Network(spec), list(range(nodes * spec.gpus_per_node))
    costs = [network.collective(kind, ranks, 2.0 ** (e / 2)) for e in range(20, 64)]
    for smaller, larger in pairwise(costs):
        assert larger.seconds > smaller.seconds * (0.99 if larger.algorithm == smaller.algorithm else 0.35)
