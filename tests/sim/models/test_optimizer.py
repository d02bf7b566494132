"""What happens to gradients besides their reduction, at the end of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm
from sim.inputs.scenario import parse_scenario
from sim.models.optimizers.step import clip_items, gradient_buffer_items, optimizer_items, prepared_gradients
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.programs.step_end import epilogue
from sim.results.states import States, states
from sim.simulation import Prepared, prepare, simulate


def test_megatron_checks_averages_and_zeroes_its_gradient_buffer() -> None:
    def passes(style: str, replicas: int) -> dict[str, float]:
        training = SimpleNamespace(
            framework=style, grad_dtype="fp32", software_date=None, calculate_per_token_loss=False
        )
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
                "training": {"seq_len": 1024, "global_batch_size": 16, "micro_batch_size": 1, "framework": "megatron"},
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
        ({"framework": "megatron", "grad_dtype": "bf16"}, 4 + 2 * (4 + 8) + (4 + 2)),  # from a copy in fp32
        ({"framework": "megatron", "grad_dtype": "bf16", "optimizer_dtype": "bf16"}, 2 + 2 * (4 + 4) + (4 + 2)),
    ],
)
def test_the_optimizer_reads_and_writes_each_state_once(keys: dict[str, object], bytes_each: int) -> None:
    """Gradient read, updated parameter and moments read and written, the 16-bit parameter written beside its copy."""
    scenario = parse_scenario(
        {"model": "llama3-8b", "training": {"seq_len": 512, "global_batch_size": 1, **keys}, "cluster": "dgx-h100"},
        "test",
    )
    assert optimizer_items(1000, scenario.for_training)[0].bytes == 1000 * bytes_each


def test_remainders_of_fp32_copies_take_half_their_memory() -> None:
    """One kernel reads and writes a bf16 parameter and the 16 bits that it lacks; 16-bit gradients are not copied."""

    def of(master: str | None, **keys: object) -> Prepared:
        training = {"seq_len": 512, "global_batch_size": 8, "framework": "megatron", "master_weights": master, **keys}
        layout = {"dp": 8, "zero": 1}
        data = {"model": "llama3-8b", "training": training, "parallelism": layout, "cluster": "dgx-h100"}
        scenario = parse_scenario(data, "test")
        return prepare(scenario, Costs(load_profile("h100-sxm"), scenario.cluster.gpu))

    half, whole = of("remainders"), of(None)
    assert optimizer_items(1000, half.plan.scenario.for_training)[0].bytes == 1000 * (4 + 2 * (4 + 8))
    assert prepared_gradients(1000, of("remainders", grad_dtype="bf16").plan.scenario.for_training) == ()
    kept = [states(p.plan, [*p.stages[0].values()]).optimizer for p in (whole, half)]
    assert kept[1] == pytest.approx(kept[0] * 10 / 12)
    for keys, needed in (
        ({"framework": "eager"}, "framework megatron, megatron_bridge or nemo"),
        ({"precision": "fp8", "fp8_recipe": "tensorwise"}, "fp8 with delayed scaling"),
    ):
        with pytest.raises(InputError, match=needed):
            of("remainders", **keys)


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


FP16 = {"precision": "fp16", "param_dtype": "fp16", "grad_dtype": "fp16"}


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({"framework": "megatron", **FP16}, {"grad_widen": 2 + 4, "grad_unscale": 4 + 4}),
        ({"framework": "megatron", **FP16, "grad_dtype": "fp32"}, {"grad_unscale": 4 + 4}),
        ({"framework": "megatron", "grad_dtype": "bf16"}, {"grad_widen": 2 + 4}),
        ({"framework": "megatron", "grad_dtype": "bf16", "optimizer_dtype": "bf16"}, {}),
        ({"framework": "megatron"}, {}),
        ({"framework": "megatron", "software_date": "2023-07-01", **FP16}, {}),
        ({"framework": "eager", "precision": "fp16", "param_dtype": "fp32"}, {"grad_unscale": 4 + 4}),
        ({"framework": "eager", "precision": "bf16", "param_dtype": "fp32"}, {}),
        ({"framework": "eager", **FP16}, {}),  # which torch's scaler refuses
        ({"framework": "deepspeed", **FP16}, {}),  # clips and divides in one pass
    ],
)
def test_gradients_are_made_fp32_and_freed_of_the_losses_scale(
    keys: dict[str, object], bytes_each: dict[str, int]
) -> None:
    """Megatron-LM clips and applies an fp32 copy of 16-bit gradients; fp16 scales the loss, and so the gradients."""
    scenario = parse_scenario(
        {"model": "llama3-8b", "training": {"seq_len": 512, "global_batch_size": 1, **keys}, "cluster": "dgx-h100"},
        "test",
    )
    t = scenario.for_training
    assert {i.name: i.bytes / 1000 for i in prepared_gradients(1000, t)} == bytes_each
    read = 4 if "grad_widen" in bytes_each or t.grad_dtype == "fp32" else 2
    norm, scaling = clip_items(1000, t)
    assert [i.bytes / 1000 for i in norm] == [read]
    assert [i.bytes / 1000 for i in scaling] == [2 * read]
    assert prepared_gradients(0, t) == ()


def prepared(**keys: object) -> Prepared:
    scenario = parse_scenario(
        {
            "model": "llama3-8b",
            "training": {"seq_len": 128, "global_batch_size": 4, "framework": "megatron", **keys},
            "parallelism": {"tp": 2, "pp": 2},
            "cluster": "dgx-b200",
        },
        "test",
    )
    return prepare(scenario, Costs(load_profile(scenario.calibration), scenario.cluster.gpu))


def test_the_fp32_copy_of_gradients_takes_memory_at_the_end() -> None:
    """Four bytes for each parameter of the rank, behind its last backward."""

    def held(**keys: object) -> States:
        ready = prepared(**keys)
        return states(ready.plan, list(ready.stages[0].values()))

    with_copy, without = held(grad_dtype="bf16"), held(grad_dtype="fp32")
    assert with_copy.at_end == pytest.approx(2 * with_copy.gradients)
    assert without.at_end == 0
    assert held(grad_dtype="bf16", optimizer_dtype="bf16").at_end == 0


@pytest.mark.parametrize(("precision", "expected"), [("fp16", ["model"]), ("bf16", [])])
def test_ranks_agree_whether_a_gradient_is_infinite(precision: str, expected: list[str]) -> None:
    """One number over the ranks that hold other parts of the model, where the loss is scaled."""
    ready = prepared(precision=precision, grad_dtype="fp32")
    items = epilogue(tuple(ready.stages[0].values()), ready.plan, True)
    found = [i for i in items if isinstance(i, Comm) and i.name == "gradient overflow"]
    assert [i.group for i in found] == expected
    assert all(i.bytes == 4 for i in found)
