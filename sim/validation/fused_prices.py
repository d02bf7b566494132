"""Seconds of a row's fused kernel: by points of its own profile, of another GPU's, or of the operators in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from msgspec.structs import replace

from sim.core.program import Compute
from sim.prices.cost import Cost
from sim.prices.operator_prices import Costs
from sim.validation.fused_rows import fused_kernel
from sim.validation.prediction import profile_named
from topology.presets import GPUS

LENDERS = ("h100-sxm", "a100-sxm")  # the profiles with points of fused kernels
BORROWED_UNCERTAINTY = 0.2


def fused_costs(op: str, data: Mapping[str, Any], costs: Costs) -> list[Cost]:
    """Price a fused kernel by the profile's own points; else by another GPU's points of this provider's kernel, scaled
    by the GPUs' memory bandwidths."""
    items = fused_kernel(op, data, _measured(costs))
    if len(items) == 1 and items[0].kernel not in _measured(costs) and data.get("provider") and costs.profile.kernels:
        for item, lender in product((items[0], _twin(items[0])), LENDERS):
            if item.kernel in _measured(_lender(lender)):
                cost, bandwidth = _lender(lender).compute(item), GPUS[lender].memory_bandwidth_bytes_per_s
                seconds = cost.seconds * bandwidth / costs.gpu.memory_bandwidth_bytes_per_s
                return [Cost(seconds, "interpolated", math.hypot(cost.uncertainty, BORROWED_UNCERTAINTY))]
    return [costs.compute(item) for item in items]


@lru_cache(maxsize=4)
def _lender(name: str) -> Costs:
    return Costs(profile_named(name), GPUS[name])


def _measured(costs: Costs) -> set[str]:
    return {table.op.removeprefix("elementwise:") for table in costs.profile.points}


def _twin(item: Compute) -> Compute:
    """Give a kernel its other name: tables call one chain of torch's kernels torch or huggingface."""
    op, provider, which = item.kernel.split(":", 2)
    other = {"torch": "huggingface", "huggingface": "torch"}.get(provider, provider)
    return replace(item, kernel=f"{op}:{other}:{which}")
