"""AdamW in one kernel, and in one for each operator over all tensors."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.training_config import Training
from sim.models.optimizers.step import optimizer_items
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_of


def scenario(**training: Any) -> Scenario:
    """One step on eight H200."""
    given = {"seq_len": 128, "global_batch_size": 8, "param_dtype": "fp32", **training}
    return parse_scenario({"model": "gpt2", "training": given, "parallelism": {"dp": 8}, "cluster": "dgx-h200"})


def update(n_params: int, t: Training) -> Compute:
    (step,) = optimizer_items(n_params, t)
    assert isinstance(step, Compute)
    return step


@pytest.mark.parametrize("framework", ["eager", "compiled"])
def test_torchtitan_s_kernels_before_its_pull_request_881(framework: str) -> None:
    dates = ("2025-02", "2025-03", None)
    moved = [update(1000, scenario(framework=framework, software_date=d).for_training).bytes for d in dates]
    assert moved == [80_000.0, 28_000.0, 28_000.0]


def test_bytes_of_each_number() -> None:
    """torch/optim/adam.py, `_multi_tensor_adam`: 20 accesses of fp32, where the fused kernel has 7."""
    moved = {k: update(1000, scenario(adamw_kernels=k).for_training).bytes for k in ("fused", "foreach")}
    assert moved == {"fused": 28_000.0, "foreach": 80_000.0}


@pytest.mark.parametrize(
    ("elements", "dtype", "measured_s"),
    [
        (2 * 256_000 * 4096, "fp32", 0.04425),
        (24 * 4096 * 14_336, "fp32", 0.02986),
        (2 * 256_000 * 4096, "bf16", 0.02594),
        (24 * 4096 * 14_336, "bf16", 0.01755),
    ],
)
def test_time_of_lists_as_measured_on_an_h200(elements: int, dtype: str, measured_s: float) -> None:
    """`adamw foreach` without clipping, in scenarios/measured/gpu_kernels/h200.json."""
    wide = {"param_dtype": dtype, "grad_dtype": dtype, "optimizer_dtype": dtype}
    own = scenario(adamw_kernels="foreach", **wide, **({} if dtype == "fp32" else {"master_weights": False}))
    costs = costs_of(own, load_profile(own.calibration))
    assert costs.compute(update(elements, own.for_training)).seconds == pytest.approx(measured_s, rel=0.08)


@pytest.mark.parametrize(
    ("framework", "date", "kernels"),
    [("transformers", None, 1), ("transformers", "2025-07", 8), ("deepspeed", "2025-07", 1), ("eager", "2025-03", 1)],
)
def test_transformers_fuses_from_torch_2_8_on(framework: str, date: str | None, kernels: int) -> None:
    assert update(1000, scenario(framework=framework, software_date=date).for_training).kernels == kernels


@pytest.mark.parametrize("framework", ["megatron", "composer", "deepspeed"])
def test_other_libraries_have_their_own(framework: str) -> None:
    with pytest.raises(InputError, match=f"found 'foreach' with framework {framework}; it has an AdamW of its own"):
        scenario(framework=framework, adamw_kernels="foreach")
