"""Prices of attention: its pairs, its masks, its kernels."""

import numpy as np
import pytest

from sim.core.attention_pairs import attended_pairs
from sim.core.errors import InputError
from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute, Phase
from sim.inputs.scenario import parse_scenario
from sim.prices.operator_prices import Costs
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from tests.sim.priced_gemms import H100
from topology.presets import GPUS


def test_attention_flops_are_counted_pair_by_pair() -> None:
    for q, kv, causal in ((5, 5, True), (3, 7, True), (7, 3, True), (4, 6, False)):
        pairs = sum(1 for i in range(q) for j in range(kv) if not causal or j <= i + kv - q)
        assert attended_pairs(q, kv, causal) == pairs
        first = sum(1 for i in range(q) for j in range(kv) if not causal or j <= i)
        assert attended_pairs(q, kv, causal, "first") == first
        columns = [np.array([float(n)] * 2) for n in (q, kv, causal)]
        assert attended_pairs(*columns, "first").tolist() == [first] * 2
    shape = (2, 8, 2, 128, 128, 64, 32, 0)
    forward = 2 * 2 * 8 * 128 * 128 * (64 + 32)
    assert shape_flops("attention_forward", shape) == forward
    assert shape_flops("attention_backward", shape) == 2 * 2 * 8 * 128 * 128 * (3 * 64 + 2 * 32)


def test_attention_points_serve_their_own_mask_alone() -> None:
    shape = (1, 8, 8, 4096, 4096, 128, 128, 1)
    points = PointTable(
        "attention_forward",
        "bf16",
        np.array([shape]),
        np.array([1e-3]),
        np.zeros(1),
        np.ones(1, dtype=np.int64),
    )
    costs = Costs(Profile("p", "t", reference="h100-sxm", points=(points,)), H100)

    def price(kind: str, causal: int, s: int = 4096) -> tuple[float, str]:
        at = (1, 8, 8, s, s, 128, 128, causal)
        cost = costs.compute(Compute("a", kind, at, "bf16", shape_flops(kind, at), 0.0, Phase.FORWARD))
        return cost.seconds, cost.source

    assert price("attention_forward", 1) == (1e-3, "measured")
    full, source = price("attention_forward", 0)  # the other mask's efficiency, and a doubt
    assert source == "interpolated"
    assert full == pytest.approx(1e-3 * 4096**2 / attended_pairs(4096, 4096, True), rel=1e-6)
    longer, source = price("attention_forward", 1, 8192)
    assert source == "interpolated"
    ratio = attended_pairs(8192, 8192, True) / attended_pairs(4096, 4096, True)
    assert longer == pytest.approx(1e-3 * ratio, rel=1e-6)
    assert price("attention_backward", 1)[0] == pytest.approx(2.5e-3, rel=1e-3)  # forward's efficiency, 2.5 x flops


def test_an_attention_kernel_can_be_named() -> None:
    def step_s(cluster: str, kernel: str | None) -> float:
        return simulate(
            parse_scenario(
                {
                    "version": 1,
                    "name": "x",
                    "model": "llama3-8b",
                    "cluster": cluster,
                    "training": {"seq_len": 8192, "global_batch_size": 8, "attention_kernel": kernel},
                    "parallelism": {"tp": 8},
                }
            )
        ).step_time_s

    chosen, flash2, cudnn, flash3 = (step_s("dgx-h100", k) for k in (None, "flash2", "cudnn", "flash3"))
    assert flash3 < cudnn < flash2, "as the kernels were published"
    assert chosen == cudnn  # what torch picks
    with pytest.raises(InputError, match=r"training.attention_kernel: found 'flash3'; profile a100-sxm has: .*flash2"):
        step_s("dgx-a100", "flash3")


def test_heads_between_the_sizes_of_a_library_take_the_time_of_the_next_size() -> None:
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])

    def seconds(kernel: str, d: int, kind: str = "attention_forward") -> float:
        at = (4, 32, 32, 8192, 8192, d, d, 1)  # bound by its matmuls
        op = Compute("a", kind, at, "bf16", shape_flops(kind, at), 0.0, Phase.FORWARD, kernel=kernel)
        return costs.compute(op).seconds

    # Numbers that fill up a head draw less power, so the limit slows the larger heads a little more.
    for kernel in ("flash2", "flash3"):  # multiples of 32
        assert seconds(kernel, 80) == pytest.approx(seconds(kernel, 96), rel=0.03)
        assert seconds(kernel, 104) == pytest.approx(seconds(kernel, 128), rel=0.03)
        assert seconds(kernel, 160) == pytest.approx(seconds(kernel, 136), rel=0.03)
    for kernel in ("flash1", "triton"):  # 64 and 128
        assert seconds(kernel, 80) == pytest.approx(seconds(kernel, 128), rel=0.03)
    assert seconds("cudnn", 96) < seconds("cudnn", 128)
    backward = [seconds("cudnn", d, "attention_backward") for d in (96, 128)]
    assert backward[0] == pytest.approx(backward[1], rel=0.03)


@pytest.mark.parametrize("name", ["b200-sxm", "gb200", "b300-sxm", "gb300"])
def test_narrow_heads_on_blackwell_are_as_much_slower_as_measured_ones(name: str) -> None:
    """A multiprocessor's exponentials take as long for a score of a head of 64 as for one of 128."""
    costs = Costs(load_profile(name), GPUS[name])
    ratios = []
    for heads, tokens in ((32, 2048), (32, 4096), (32, 8192), (64, 2048), (64, 4096), (64, 8192)):
        seconds = {}
        for d in (64, 128):
            shape = (4, heads, 8, tokens, tokens, d, d, 1)
            flops = shape_flops("attention_forward", shape)
            op = Compute("a", "attention_forward", shape, "bf16", flops, 1.0, Phase.FORWARD, served=True)
            seconds[d] = costs.compute(op).seconds
        ratios.append(seconds[128] / seconds[64] / 2)
    speed = costs.coefficients.attention["attention"]
    assert speed.efficiency_64 is not None
    assert speed.efficiency_128 is not None
    assert speed.efficiency_64 / speed.efficiency_128 == pytest.approx(np.median(ratios), rel=0.12)
