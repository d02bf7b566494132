"""AMD's boards have kernels of their own: AITER's records, and what an engine does beside them."""

from __future__ import annotations

import numpy as np
import pytest

from sim.core.operator_kinds import shape_flops
from sim.core.program import Comm, Compute, Phase
from sim.core.quantization import TABLE_FORMATS
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import PriceOptions
from sim.prices.kernel_file import kernel_file
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_bytes
from sim.serve.prices.costs import iteration_costs
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from topology.presets import GPUS

BOARDS = ("mi300x", "mi325x", "mi355x")
BURSTS = PriceOptions(power=False, host=False)
BLOCKS = "fp8_block"


def seconds(gpu: str, kind: str, shape: tuple[float, ...], dtype: str, form: str = "") -> float:
    op = Compute(
        "x",
        kind,
        tuple(int(size) for size in shape),
        dtype,
        shape_flops(kind, shape),
        shape_bytes(kind, shape, dtype, TABLE_FORMATS.get(form)),
        Phase.FORWARD,
        kernel=form,
        served=True,
    )
    return Costs(load_profile(gpu), GPUS[gpu], BURSTS).compute(op).seconds


@pytest.mark.parametrize("gpu", BOARDS)
def test_a_board_trains_and_serves_with_its_own_profile(gpu: str) -> None:
    cluster = {"cluster": {"gpu": gpu}, "model": "llama3-8b"}
    step = {
        "training": {"seq_len": 4096, "global_batch_size": 8, "framework": "megatron"},
        "parallelism": {"dp": 8, "zero": 1},
    }
    trained = parse_scenario({**cluster, **step})
    served = parse_scenario(
        {**cluster, "inference": {"engine": "sglang", "requests": {"prompt_len": 1000, "output_len": 10, "count": 1}}}
    )
    for scenario in (trained, served):
        assert scenario.calibration == gpu
        assert not any("no kernels of GPU" in warning for warning in scenario.warnings)
    assert 0.25 < simulate(trained).result["mfu"] < 0.6
    assert simulate_serving(served).result


@pytest.mark.parametrize("gpu", ["mi300x", "mi355x"])
def test_a_measured_kernel_takes_what_it_took(gpu: str) -> None:
    kinds = {
        "gemm": ("bf16", "fp8"),
        f"gemm:{BLOCKS}": ("fp8",),
        f"moe_layer:{BLOCKS}": ("fp8",),
        "moe_layer": ("bf16",),
    }
    for name, dtypes in kinds.items():
        for dtype in dtypes:
            points, *_ = kernel_file(gpu).table(name, dtype, "AITER")
            some = np.random.default_rng(1).permutation(len(points.seconds))[:40]
            kind, _, form = name.partition(":")
            found = [seconds(gpu, kind, tuple(points.shapes[i].tolist()), dtype, form) for i in some]
            assert np.array(found) == pytest.approx(points.seconds[some], rel=0.02), (name, dtype)


def test_an_mi325xs_matmuls_are_faster_by_its_bandwidth_and_by_nothing_else() -> None:
    """The floor of a kernel and the time of one bound by its flops are an MI300X's."""
    own = GPUS["mi325x"].memory_bandwidth_bytes_per_s / GPUS["mi300x"].memory_bandwidth_bytes_per_s
    for kind, dtype, form in (("gemm", "bf16", ""), ("gemm", "fp8", BLOCKS)):
        slow, fast = (seconds(gpu, kind, (1, 16, 36864, 7168), dtype, form) for gpu in ("mi300x", "mi325x"))
        assert slow / fast == pytest.approx(own, rel=0.05)
        slow, fast = (seconds(gpu, kind, (1, 16384, 7168, 16384), dtype, form) for gpu in ("mi300x", "mi325x"))
        assert slow == pytest.approx(fast, rel=0.01)


def test_weights_without_a_record_have_the_default_kernel() -> None:
    """AITER looks a kernel up by the sizes of its weights, at any number of tokens; other libraries do not."""
    slower = load_profile("mi300x").coefficients.untuned_slowdown
    points, *_ = kernel_file("mi300x").table(f"gemm:{BLOCKS}", "fp8", "AITER")
    n, k = (7168, 2048)
    assert ((points.shapes[:, 2] == n) & (points.shapes[:, 3] == k)).any()
    times = {
        name: seconds("mi300x", "gemm", (1, 3000, size, k), "fp8", BLOCKS)
        for name, size in (("own", n), ("near", n - 128))
    }
    assert times["near"] / times["own"] == pytest.approx(slower, rel=0.15)
    of_vendor = [seconds("mi300x", "gemm", (1, 3000, size, k), "bf16") for size in (n, n - 128)]
    assert of_vendor[1] / of_vendor[0] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("engine", "tp", "gpu", "own_kernel"),
    [("sglang", 4, "mi300x", True), ("sglang", 8, "mi300x", False), ("vllm-0.28", 8, "mi355x", True)],
)
def test_engines_own_all_reduces_are_of_as_many_ranks_as_were_measured(
    engine: str, tp: int, gpu: str, own_kernel: bool
) -> None:
    inference = {"engine": engine, "precision": "fp16", "requests": {"prompt_len": 8, "output_len": 8, "count": 1}}
    data = {"model": "llama3-70b", "cluster": {"gpu": gpu}, "parallelism": {"tp": tp}, "inference": inference}
    prices = iteration_costs(parse_scenario(data), load_profile(gpu)).prices
    curves = {c.ranks: c for c in load_profile(gpu).collectives if c.source}
    curve = curves[max(curves)]
    below = curve.bytes < 8 << 20  # larger ones are left to RCCL
    for size, measured_s in zip(curve.bytes[below].tolist(), curve.seconds[below].tolist(), strict=True):
        comm = Comm("sum", "all_reduce", "tp", size, Phase.FORWARD)
        own_s, rccl_s = prices.priced((comm,)).seconds, prices.pricing.comm(comm, 0).seconds
        assert own_s == (pytest.approx(measured_s, rel=0.02) if own_kernel else rccl_s)
