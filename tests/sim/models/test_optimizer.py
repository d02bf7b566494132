"""What happens to gradients besides their reduction, at the end of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sim.inputs.scenario import parse_scenario
from sim.models.optimizer import gradient_buffer_items, optimizer_items
from sim.simulation import simulate


def test_megatron_checks_averages_and_zeroes_its_gradient_buffer() -> None:
    def passes(style: str, replicas: int) -> dict[str, float]:
        training = SimpleNamespace(framework=style, grad_dtype="fp32", software_date=None)
        return {i.name: i.bytes for i in gradient_buffer_items(10, training, replicas)}

    assert passes("megatron", 8) == {"grad_check": 40.0, "grad_average": 80.0, "grad_zero": 40.0}
    assert "grad_average" not in passes("megatron", 1)
    assert passes("eager", 8) == passes("compiled", 8) == {}


def test_the_buffer_is_whole_where_states_are_sharded() -> None:
    """ZeRO-1 cuts the optimizer's traffic by dp, not that of the gradient buffer. ZeRO-2 and -3 keep whole gradients
    only if they reduce them once a step."""

    def optimizer_s(zero: int, whole: bool = False) -> float:
        scenario = parse_scenario(
            {
                "model": "llama3-8b",
                "training": {"seq_len": 1024, "global_batch_size": 8, "framework": "megatron"},
                "parallelism": {"dp": 8, "zero": zero, "dp_sync": "after_backward", "accumulate_unsharded": whole},
                "cluster": "dgx-b200",
            },
            "test",
        )
        return float(simulate(scenario).result["critical_path"]["OPTIMIZER"])

    whole_s = 16.0 * 8.03e9 / 8e12
    assert whole_s < optimizer_s(1) < optimizer_s(0)
    for zero in (2, 3):
        assert optimizer_s(zero, whole=True) == pytest.approx(optimizer_s(1), rel=1e-5)
        assert optimizer_s(zero) == pytest.approx(optimizer_s(0) / 8, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({}, 4 + 2 * (4 + 8) + 2),
        ({"grad_dtype": "bf16", "optimizer_dtype": "bf16", "master_weights": False}, 2 + 2 * (2 + 4)),
        ({"param_dtype": "fp32", "optimizer_dtype": "bf16"}, 4 + 2 * (4 + 4)),
        ({"optimizer": "sgd"}, 4 + 2 * 4 + 2),
        ({"optimizer": "sgd", "master_weights": False}, 4 + 2 * 2),
        ({"framework": "megatron"}, 4 + 2 * (4 + 8) + (4 + 2)),
        ({"framework": "deepspeed", "grad_dtype": "bf16"}, 2 + 2 * (4 + 8) + (4 + 2)),
        ({"framework": "megatron", "param_dtype": "fp32"}, 4 + 2 * (4 + 8)),
    ],
)
def test_the_optimizer_reads_and_writes_each_state_once(keys: dict[str, object], bytes_each: int) -> None:
    """Gradient read, updated parameter and moments read and written, the 16-bit parameter written beside its copy."""
    scenario = parse_scenario(
        {"model": "llama3-8b", "training": {"seq_len": 512, "global_batch_size": 1, **keys}, "cluster": "dgx-h100"},
        "test",
    )
    assert optimizer_items(1000, scenario.for_training)[0].bytes == 1000 * bytes_each


def test_a_smaller_state_makes_a_shorter_step() -> None:
    """Bound by memory, its seconds follow its bytes; torch's kernel in 16 bits alone is bound by its instructions."""

    def optimizer_s(**keys: object) -> float:
        training = {"seq_len": 512, "global_batch_size": 1, "gradient_clipping": False, **keys}
        scenario = parse_scenario({"model": "llama3-8b", "training": training, "cluster": "dgx-h100"}, "test")
        return float(simulate(scenario).result["critical_path"]["OPTIMIZER"])

    pure = {"grad_dtype": "bf16", "optimizer_dtype": "bf16", "master_weights": False}
    mixed = {**pure, "optimizer_dtype": "fp32"}
    assert optimizer_s(**mixed) / optimizer_s() == pytest.approx(22 / 30, rel=0.03)
    assert 14 / 22 < 0.8 < optimizer_s(**pure) / optimizer_s(**mixed) < 1
