"""A GPU is one record: with it a scenario runs, warns of nothing, finds its profile and draws its roofline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core import shipped as shipped_files
from sim.core.shipped import shipped_profiles
from sim.inputs.nearest_gpu import measured_gpus
from sim.inputs.scenario import parse_scenario
from sim.prices.unvectorized import sm_clocks_per_s
from sim.results.states import matmul_workspace
from sim.simulation import simulate
from sim.views.roofline_svg import roofline_svg
from topology.presets import CLUSTERS, GPUS
from topology.spec import GpuSpec
from topology.timing import timing_of

RECORD = {
    "name": "x900",
    "architecture": "ampere",
    "memory_bytes": 64e9,
    "memory_bandwidth_bytes_per_s": 3e12,
    "peak_flops_per_s": {"fp32": 3e13, "bf16": 5e14, "fp8": 1e15},
    "sm_count": 120,
    "nvlink": False,
    "host_bandwidth_bytes_per_s": 4e10,
    "sm_sram_bytes": 200 << 10,
    "sm_flops_per_clock": 2048,
}
SCENARIO = {"model": "gpt2", "training": {"seq_len": 128, "global_batch_size": 4}, "parallelism": {"dp": 2}}


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GpuSpec:
    """The record among the presets, and a profile of its name among the shipped ones."""
    gpu = GpuSpec.model_validate(RECORD)
    monkeypatch.setitem(GPUS, gpu.name, gpu)
    monkeypatch.setattr(shipped_files, "PROFILES", tmp_path)
    coefficients = {"matmul_efficiency": {"value": 0.5, "source": "made up"}}
    data = {"format": "profile/1", "name": gpu.name, "reference": gpu.name, "coefficients": coefficients}
    (tmp_path / f"{gpu.name}.json").write_text(json.dumps(data))
    return gpu


def test_a_shipped_record_is_all_that_a_gpu_needs(shipped: GpuSpec) -> None:
    scenario = parse_scenario({**SCENARIO, "cluster": {"gpu": shipped.name}})
    assert scenario.calibration == shipped.name
    assert not any("GPU" in warning for warning in scenario.warnings)
    assert scenario.cluster.intra_node.kind == "pcie"
    assert scenario.cluster.intra_node.bandwidth_bytes_per_s == 4e10
    half = simulate(scenario).step_time_s
    assert half > simulate(scenario.unchecked_copy(update={"calibration": "roofline"})).step_time_s > 0
    assert timing_of(scenario.cluster.gpu) is timing_of(GPUS["a100-sxm"])
    assert matmul_workspace(shipped) == matmul_workspace(GPUS["a100-sxm"])  # 8 bits do not make it a Hopper
    assert "SRAM" in roofline_svg(shipped)


def test_a_gpu_of_no_stated_architecture_is_taken_for_hopper_and_said_to_be() -> None:
    unknown = {**RECORD, "name": "b900", "architecture": "other", "sm_sram_bytes": 0}
    scenario = parse_scenario({**SCENARIO, "cluster": {"gpu": unknown}})
    assert any("architecture: none is stated for GPU 'b900'" in warning for warning in scenario.warnings)
    assert timing_of(scenario.cluster.gpu) is timing_of(GPUS["h100-sxm"])
    assert "SRAM" not in roofline_svg(scenario.cluster.gpu)


@pytest.mark.parametrize(("cluster", "measured"), [("gaudi3-node", "no"), ("mi300x-node", "not all")])
def test_a_shipped_gpu_without_an_architecture_asks_for_no_key(cluster: str, measured: str) -> None:
    """A user cannot state the architecture of an MI300X: which collectives were measured is what is said."""
    said = parse_scenario({**SCENARIO, "cluster": cluster}).warnings
    gpu = cluster.removesuffix("-node")
    assert any(f"cluster.gpu: {measured} collectives of GPU '{gpu}' were measured" in warning for warning in said)
    assert not any("none is stated" in warning for warning in said)


def test_a_description_in_full_of_a_shipped_gpu_is_still_that_chip() -> None:
    full = GPUS["gb200"].model_dump(
        include={"name", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s"}
    )
    gpu = parse_scenario({**SCENARIO, "cluster": {"gpu": full}}).cluster.gpu
    assert timing_of(gpu) is timing_of(GPUS["gb200"])
    assert gpu.architecture == "blackwell"


def test_a_variant_has_the_machine_and_the_profile_of_its_gpu() -> None:
    gpu = {"preset": "h100-sxm", "name": "h100-96g", "memory_bytes": 96e9, "variant_of": "h100-sxm"}
    scenario = parse_scenario({**SCENARIO, "cluster": {"gpu": gpu}})
    assert scenario.calibration == "h100-sxm"
    assert scenario.cluster.intra_node == CLUSTERS["dgx-h100"].intra_node


@pytest.mark.parametrize("cluster", [{"gpu": "h800-sxm"}, {"preset": "dgx-h100", "gpu": "h800-sxm"}, "hgx-h800"])
def test_an_h800_has_all_of_an_h100_but_its_nvlink(cluster: Any) -> None:
    scenario = parse_scenario({**SCENARIO, "cluster": cluster})
    assert scenario.calibration == "h100-sxm"
    of_h100 = CLUSTERS["dgx-h100"].intra_node
    assert scenario.cluster.intra_node == of_h100.model_copy(update={"bandwidth_bytes_per_s": 200e9})
    assert scenario.cluster.gpu.peak_flops_per_s == GPUS["h100-sxm"].peak_flops_per_s


def test_a_bandwidth_that_is_stated_is_used_before_that_of_the_gpus_own_links() -> None:
    stated = {"gpu": "h800-sxm", "intra_node": {"bandwidth_bytes_per_s": 150e9}}
    assert parse_scenario({**SCENARIO, "cluster": stated}).cluster.intra_node.bandwidth_bytes_per_s == 150e9


UNMEASURED = [gpu for gpu in GPUS.values() if not gpu.variant_of and gpu.name not in shipped_profiles()]


@pytest.mark.parametrize("gpu", UNMEASURED, ids=lambda gpu: gpu.name)
def test_a_gpu_of_a_data_sheet_runs_and_says_what_prices_it(gpu: GpuSpec) -> None:
    """One matmul-bound step: as efficient as on measured GPUs, with an interval that says what it does not know."""
    precision = "bf16" if "bf16" in gpu.peak_flops_per_s else "fp16"
    training = {"seq_len": 4096, "global_batch_size": 16, "framework": "megatron", "precision": precision}
    model = {"preset": "llama3-8b", "layers": 4}
    scenario = parse_scenario({"model": model, "training": training, "cluster": {"gpu": gpu.name}})
    like = GPUS[scenario.calibration]
    assert like.name in measured_gpus()
    (warning,) = (w for w in scenario.warnings if f"no kernels of GPU '{gpu.name}' were measured" in w)
    assert like.name in warning
    result = simulate(scenario).result
    assert 0.3 < result["mfu"] < 0.7
    assert result["provenance"]["shares"]["measured"] == 0
    low_s, high_s = result["step_time_interval_s"]
    if not gpu.same_multiprocessors(like):
        assert high_s / low_s > 1.5
    assert gpu.source


@pytest.mark.parametrize(
    ("gpu", "kind", "gb_per_s"),
    [
        ("mi300x", "full_mesh", 448),
        ("trainium2", "nvswitch", 640),
        ("rtx4090", "pcie", 31.5),
        ("h100-pcie", "pcie", 63),
    ],
)
def test_links_come_with_the_gpu(gpu: str, kind: str, gb_per_s: float) -> None:
    links = parse_scenario({**SCENARIO, "cluster": {"gpu": gpu}}).cluster.intra_node
    assert (links.kind, links.bandwidth_bytes_per_s) == (kind, gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("gpu", "sms", "clock_hz", "flops"),
    [
        # Tensor flops a clock and multiprocessor: Ada whitepaper table 2 (GeForce: 512 with fp32 sums), boost 2,520 MHz
        # RTX Blackwell whitepaper, boost 2,407 MHz; H100 PCIe: 4,096 at 1,620 MHz
        ("rtx4090", 128, 2.52e9, 512),
        ("rtx5090", 170, 2.407e9, 512),
        ("h100-pcie", 114, 1.62e9, 4096),
        ("l40s", 142, 2.49e9, 1024),
        ("mi300x", 304, 2.1e9, 2048),
        ("a10", 72, 1.695e9, 1024),
    ],
)
def test_peaks_are_multiprocessors_times_clock(gpu: str, sms: int, clock_hz: float, flops: int) -> None:
    assert GPUS[gpu].sm_count == sms
    assert GPUS[gpu].peak_flops_per_s["bf16"] == pytest.approx(sms * clock_hz * flops, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "clock_hz"),
    [
        ("a30", 1.44e9),
        ("a10", 1.695e9),
        ("a10g", 1.71e9),
        ("t4", 1.59e9),
        ("l40", 2.49e9),
        ("l4", 2.04e9),
        ("l40s", 2.49e9),
        ("rtx4090", 2.52e9),
        ("rtx5090", 2.407e9),
        ("rtx-pro-6000", 2.617e9),
        ("rtx-pro-6000-server", 2.43e9),
        ("mi300x", 2.1e9),
        ("mi325x", 2.1e9),
        ("mi355x", 2.4e9),
    ],
)
def test_rates_of_multiprocessors_give_the_peak_at_the_data_sheet_s_clock(gpu: str, clock_hz: float) -> None:
    """Boost clocks as the makers publish them."""
    spec = GPUS[gpu]
    assert sm_clocks_per_s(spec) / spec.sm_count == pytest.approx(clock_hz, rel=0.002)


def test_a_blackwell_s_multiprocessor_does_twice_what_a_hopper_s_does() -> None:
    for gpu in ("b200-sxm", "b300-sxm", "gb200", "gb300"):
        assert GPUS[gpu].sm_flops_per_clock == 2 * GPUS["h100-sxm"].sm_flops_per_clock
        assert 1.6e9 < sm_clocks_per_s(GPUS[gpu]) / GPUS[gpu].sm_count < 2.1e9
