"""torch's memory-efficient attention, which runs with a mask that learns and with heads that other kernels lack."""

from __future__ import annotations

import json
import statistics

import pytest

from sim.core.program import Compute, Phase
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_flops
from tests.modules import ROOT
from topology.presets import GPUS

NAMED = ":efficient"  # as a profile's file names the kernel of its points


def ratios(dtype: str) -> list[float]:
    """Return measured ÷ predicted seconds of all measured shapes."""
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
    found = []
    for points in json.loads((ROOT / "scenarios" / "cuda" / "h200.json").read_text())["points"]:
        if not points["op"].endswith(NAMED) or points["dtype"] != dtype:
            continue
        kind = points["op"].removesuffix(NAMED)
        for shape, seconds in zip(points["shape"], points["seconds"], strict=True):
            given = tuple(shape)
            op = Compute("x", kind, given, dtype, shape_flops(kind, given), 0.0, Phase.FORWARD, kernel="efficient")
            found.append(seconds / costs.compute(op).seconds)
    return found


@pytest.mark.parametrize(("dtype", "count", "most"), [("bf16", 80, 0.03), ("fp16", 2, 0.06), ("fp32", 2, 0.25)])
def test_it_takes_as_long_as_measured_on_an_h200(dtype: str, count: int, most: float) -> None:
    """16 bits have coefficients of their own. fp32 has none; it is computed from three products in tf32."""
    found = ratios(dtype)
    assert len(found) == count
    assert statistics.median(found) == pytest.approx(1.0, abs=most)
    assert all(0.75 < x < 1.4 for x in found)
