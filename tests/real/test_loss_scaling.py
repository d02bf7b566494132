"""fp16 with loss scaling on real ranks: one device's losses, and an overflow leaves out the step on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from calibrate.parallel.loss_scale import GROWTH_STEPS, LossScale, square_sum
from tests.real.conftest import small
from tests.real.ranks import on_ranks

LAYOUTS = {
    "dp": {"dp": 2, "bucket_bytes": 50_000},
    "zero 2": {"dp": 2, "zero": 2, "bucket_bytes": 50_000},
    "zero 3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2, "schedule": "1f1b"},
    "sp": {"tp": 2, "sp": True},
}


def _fp16(parallelism: dict[str, Any]) -> dict[str, Any]:
    """The layout alone: the worker makes parameters and gradients fp16 (the simulator knows no CPU's fp16 peak)."""
    return small(parallelism, m=4 // parallelism.get("dp", 1), vocab=256)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fp16")
    cases = {name: {"scenario": _fp16(p), "scale": 1024.0} for name, p in LAYOUTS.items()}
    cases |= {f"overflow, {name}": {"scenario": _fp16(p), "scale": 2.0**26} for name, p in LAYOUTS.items()}
    return on_ranks("fp16_worker", cases, folder, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_one_device(found: Any, name: str) -> None:
    """Four steps' losses, each after the updates before it; as near as sums in another order are in fp16."""
    alone = found[name]["alone"]
    assert alone["moved"] == [True] * 4
    for rank in found[name]["ranks"]:
        assert rank["scales"] == [1024.0] * 4
        assert rank["losses"] == pytest.approx(alone["losses"], rel=2e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_overflow_leaves_out_the_step_everywhere(found: Any, name: str) -> None:
    ranks, alone = found[f"overflow, {name}"]["ranks"], found[f"overflow, {name}"]["alone"]
    assert not ranks[0]["moved"][0]
    for rank in ranks:
        assert rank["scales"] == ranks[0]["scales"]
        assert rank["moved"] == ranks[0]["moved"]
        assert [b < a for a, b in zip([2.0**26, *rank["scales"]], rank["scales"], strict=False)] == [
            not moved for moved in rank["moved"]
        ]
    assert not alone["moved"][0]
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])


def test_the_factor() -> None:
    scale = LossScale(1024.0)
    scale.found(torch.tensor(4096.0), 1.0)  # a norm of 4 without the factor, clipped to 1
    assert scale.apply == pytest.approx(1 / 4 / 1024, rel=1e-5)
    scale.found(torch.tensor(math.inf), 1.0)
    scale.stepped()
    assert (scale.apply, scale.value, scale.skipped) == (None, 512.0, 1)
    scale.found(torch.tensor(1.0), 1.0)
    for _ in range(GROWTH_STEPS):
        scale.stepped()
    assert scale.value == 1024.0
    assert float(square_sum(torch.full((4,), 300.0, dtype=torch.float16))) == 360_000.0
