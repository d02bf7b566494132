"""Kernels of a GPU that nobody measured: whose they are, how sure they are, and how fast GPUs get with them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.program import Compute, Phase
from sim.inputs.nearest_gpu import measured_gpus, nearest_measured
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import PriceOptions
from sim.prices.kernel_file import kernel_file
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.reference_gpu import OTHER_CHIP_UNCERTAINTY, SAME_MULTIPROCESSORS_UNCERTAINTY
from sim.simulation import simulate
from topology.presets import GPUS
from topology.spec import GpuSpec

SCENARIO = {"model": "gpt2", "training": {"seq_len": 128, "global_batch_size": 4}, "parallelism": {"dp": 2}}
SIZE = 8192
MATMUL = Compute("x", "gemm", (1, SIZE, SIZE, SIZE), "bf16", 2.0 * SIZE**3, 6.0 * SIZE**2, Phase.FORWARD)


def test_kernels_of_another_chip_are_less_certain() -> None:
    own, board, chip = (
        Costs(load_profile("h100-sxm"), GPUS[gpu]).compute(MATMUL) for gpu in ("h100-sxm", "h100-pcie", "mi300x")
    )
    assert own.uncertainty < board.uncertainty < chip.uncertainty
    assert (board.source, chip.source) == ("interpolated", "interpolated")
    same = [SAME_MULTIPROCESSORS_UNCERTAINTY, OTHER_CHIP_UNCERTAINTY]
    for cost, added in zip((board, chip), same, strict=True):
        assert added < cost.uncertainty < added + 0.15


def test_a_chip_with_mxfp8_takes_fp8_points_of_one_without() -> None:
    """At a measured shape too: by the ratio of the two rooflines, each in the format that its chip multiplies in."""
    mi355x, h200 = GPUS["mi355x"], GPUS["h200-sxm"]
    profile = load_profile("h200-sxm")
    costs, (shapes, _, _) = Costs(profile, mi355x), kernel_file(profile.kernels).points("gemm", "fp8")
    points = np.array(shapes.columns())
    largest = tuple(points[:, points.prod(axis=0).argmax()].astype(int).tolist())
    flops = 2.0 * float(np.prod(largest))
    fp8, mxfp8 = (
        costs.compute(Compute("x", "gemm", largest, dtype, flops, 0.0, Phase.FORWARD)) for dtype in ("fp8", "mxfp8")
    )
    assert "mxfp8" not in h200.peak_flops_per_s
    assert mxfp8.seconds == pytest.approx(fp8.seconds, rel=0.01)


def test_a_chip_does_not_need_less_energy_for_a_flop_than_the_measured_one() -> None:
    """By data sheets a B200 does 1.6 times as many FLOPs for a joule as an H100; the power limit takes them."""
    h100, b200 = load_profile("h100-sxm"), GPUS["b200-sxm"]
    limited, burst = (
        Costs(h100, b200, options).compute(MATMUL).seconds for options in (PriceOptions(), PriceOptions(power=False))
    )
    used = MATMUL.flops / (burst * b200.peak_flops_per_s["bf16"])
    joules = (h100.coefficients.power_at_peak - 0.5) * 700 / GPUS["h100-sxm"].peak_flops_per_s["bf16"]
    assert limited / burst == pytest.approx(0.5 + joules * b200.peak_flops_per_s["bf16"] / 1000 * used, rel=1e-3)
    # The B200's own profile, whose figure comes from its own matmuls.
    at_peak = 0.5 + joules * b200.peak_flops_per_s["bf16"] / 1000
    assert at_peak == pytest.approx(load_profile("b200-sxm").coefficients.power_at_peak, rel=0.08)


@pytest.mark.parametrize("gpu", ["a10", "t4"])
def test_a_chip_beside_one_that_never_reaches_its_limit_has_its_architectures_energy(gpu: str) -> None:
    """An A10 and a T4 have an RTX PRO 6000's efficiencies, and an A100's energy for a FLOP."""
    a100, spec = GPUS["a100-sxm"], GPUS[gpu]
    joules = (load_profile("a100-sxm").coefficients.power_at_peak - 0.5) * 400 / a100.peak_flops_per_s["fp16"]
    assert spec.chip.flop_energy_j == pytest.approx(joules, rel=0.01)
    home = load_profile("rtx-pro-6000-server")
    matmul = replace(MATMUL, dtype="fp16")
    limited, burst = (
        Costs(home, spec, options).compute(matmul).seconds for options in (PriceOptions(), PriceOptions(power=False))
    )
    used = matmul.flops / (burst * spec.peak_flops_per_s["fp16"])
    watts = spec.power_limit_w / 2 + spec.chip.flop_energy_j * spec.peak_flops_per_s["fp16"] * used
    assert watts > spec.power_limit_w
    assert limited / burst == pytest.approx(watts / spec.power_limit_w, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "like"),
    [
        ("gh200", "h100-sxm"),
        ("l4", "l40s"),
        ("a30", "a100-sxm"),
        ("rtx-pro-6000", "rtx-pro-6000-server"),
        ("h20", "h200-sxm"),  # the same architecture: libraries choose Hopper's kernels
        ("rtx4090", "l40s"),
        ("rtx5090", "rtx-pro-6000-server"),  # of Blackwells the one with GDDR
        ("a10", "rtx-pro-6000-server"),  # Ampere, but a multiprocessor has less than half of an A100's bandwidth
        ("mi300x", "h100-sxm"),  # an A100's share of bandwidth is nearer, but it has no 8-bit floats
        ("tpu-v5p", "h100-sxm"),
        ("cpu", "roofline"),
    ],
)
def test_the_nearest_measured_gpu(gpu: str, like: str) -> None:
    assert nearest_measured(GPUS[gpu]) == like


def test_a_measured_gpu_is_nearest_to_itself_and_to_its_chip() -> None:
    for name in measured_gpus():
        chip = [other for other in measured_gpus() if GPUS[other].same_multiprocessors(GPUS[name])]
        assert nearest_measured(GPUS[name]) in chip
        rest = nearest_measured(GPUS[name], left_out=chip)
        assert rest not in chip
        assert rest in measured_gpus()


@pytest.mark.parametrize(
    ("stated", "like"),
    [
        ({"architecture": "ampere"}, "a100-sxm"),
        ({"architecture": "hopper"}, "h100-sxm"),
        ({"architecture": "hopper", "memory_bandwidth_bytes_per_s": 5e12}, "h200-sxm"),
        ({}, "h100-sxm"),
        ({"architecture": "cpu"}, "roofline"),
    ],
)
def test_a_gpu_of_one_s_own_has_the_efficiencies_of_the_nearest(stated: dict[str, object], like: str) -> None:
    peaks = {"bf16": 5e14, "fp32": 3e13}
    gpu = {"memory_bytes": 64e9, "memory_bandwidth_bytes_per_s": 3e12, "peak_flops_per_s": peaks, **stated}
    scenario = parse_scenario({**SCENARIO, "cluster": {"gpu": gpu}})
    assert scenario.calibration == like
    assert any("no kernels of GPU 'custom' were measured" in warning for warning in scenario.warnings)
    given = parse_scenario({**SCENARIO, "cluster": {"gpu": gpu}, "calibration": "roofline"})
    assert given.calibration == "roofline"
    assert not any("no kernels" in warning for warning in given.warnings)
    if like != "roofline":
        assert simulate(given).step_time_s < simulate(scenario).step_time_s


def test_another_chip_s_collectives_are_not_taken() -> None:
    data = {**SCENARIO, "cluster": {"gpu": "mi300x"}}
    shares = simulate(parse_scenario(data)).result["provenance"]["shares"]
    assert shares["topology"] > 0
    assert shares["measured"] == 0


def _step_s(gpu: str, precision: str, calibration: str | None = None) -> float:
    training = {"seq_len": 4096, "global_batch_size": 2, "framework": "megatron", "precision": precision}
    model = {"preset": "llama3-8b", "layers": 4}
    return simulate(
        parse_scenario({"model": model, "training": training, "cluster": {"gpu": gpu}, "calibration": calibration})
    ).step_time_s


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_lesser_board_is_not_faster(precision: str) -> None:
    """Of equal multiprocessors: in the order of their number, clock and memory, measured or not."""
    boards = [("h100-pcie", "h100-nvl", "h100-sxm", "gh200", "h200-sxm"), ("l4", "l40s")]
    boards += [("a30", "a100-pcie", "a100-sxm-40g", "a100-sxm")] if precision == "bf16" else []
    for row in boards:
        step_s = [_step_s(gpu, precision) for gpu in row]
        assert step_s == sorted(step_s, reverse=True), row
    # Two editions of one card: 8 % apart in clock.
    assert _step_s("rtx-pro-6000", precision) == pytest.approx(_step_s("rtx-pro-6000-server", precision), rel=0.08)
    # Where both were measured, scaled kernels agree with measured ones.
    assert _step_s("h200-sxm", precision, "h100-sxm") == pytest.approx(_step_s("h200-sxm", precision), rel=0.02)


def test_a_gpu_that_is_better_in_every_figure_is_not_much_slower() -> None:
    """Measured or not: by peak, bandwidth and power limit; measured GPUs of one peak differ by 13 % themselves."""
    gpus = [gpu for gpu in GPUS.values() if gpu.architecture != "cpu" and "bf16" in gpu.peak_flops_per_s]
    step_s = {gpu.name: _step_s(gpu.name, "bf16") for gpu in gpus}
    for better in gpus:
        for worse in gpus:
            pairs = zip(_figures(better), _figures(worse), strict=True)
            if all(one >= other for one, other in pairs):
                assert step_s[better.name] < 1.2 * step_s[worse.name], (better.name, worse.name)


def _figures(gpu: GpuSpec) -> tuple[float, float, float]:
    return gpu.peak_flops_per_s["bf16"], gpu.memory_bandwidth_bytes_per_s, gpu.power_limit_w
