"""The host's waits for each micro-batch's loss and for its batch: what it issues afterwards is not hidden."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.program import BLOCK_END, Compute
from sim.inputs.scenario import Scenario
from sim.models.output.head import head_block
from sim.models.source import source_of
from sim.prices.operator_prices import Costs
from sim.simulation import Simulation, simulate
from sim.validation.prediction import profile_named
from sim.variants.frameworks.records import FRAMEWORKS
from tests.sim.cases import scenario_with


def scenario(global_batch_size: int = 4, **training: Any) -> Scenario:
    return scenario_with(
        {
            "seq_len": 8192,
            "global_batch_size": global_batch_size,
            "framework": "megatron",
            "cross_entropy": "fused",
            **training,
        },
        model={"preset": "llama3-8b", "layers": 2},
        cluster="dgx-b200",
        calibration="b200-sxm",
    )


def test_what_follows_the_wait_is_a_block_of_its_own() -> None:
    *_, end, record = head_block(scenario()).forward
    assert end is BLOCK_END
    assert isinstance(record, Compute)
    assert record.kernels == FRAMEWORKS["megatron"].kernels_after_loss_check == 20


@pytest.mark.parametrize("changes", [{"software_date": "2023-05"}, {"framework": "megatron_bridge"}])
def test_releases_and_trainers_that_do_not_look_do_not_wait(changes: dict[str, Any]) -> None:
    assert BLOCK_END not in head_block(scenario(**changes)).forward


def test_a_micro_batch_more_waits_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps that differ in four micro-batches differ by four waits, each of the host's time for twenty kernels."""

    def four_s() -> float:
        return float(simulate(scenario(8)).result["step_time_s"] - simulate(scenario(4)).result["step_time_s"])

    with_wait = four_s()
    s = scenario()
    record = head_block(s).forward[-1]
    assert isinstance(record, Compute)
    wait_s = Costs(profile_named("b200-sxm"), s.cluster.gpu).host_s(record)
    monkeypatch.setitem(FRAMEWORKS, "megatron", replace(FRAMEWORKS["megatron"], kernels_after_loss_check=0))
    assert with_wait - four_s() == pytest.approx(4 * wait_s, rel=0.02)


def test_megatron_of_2023_waits_for_the_sizes_of_each_batch_on_every_stage() -> None:
    """A micro-batch more takes longer by the host's time for what follows the wait: broadcast_data on all stages."""
    before = source_of(scenario(software_date="2023-05")).before_forward()
    made, end = before
    assert end is BLOCK_END
    assert isinstance(made, Compute)
    assert made.kernels == 9
    assert source_of(scenario(software_date="2024-01")).before_forward() == ()


@pytest.mark.parametrize("pp", [1, 2])
def test_the_wait_for_a_batch_counts_once_for_each_forward(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline of equal stages each micro-batch more takes one such wait longer, not one for each stage."""

    def run(global_batch_size: int) -> Simulation:
        training = {"seq_len": 8192, "global_batch_size": global_batch_size, "framework": "megatron"}
        return simulate(
            scenario_with(
                {**training, "software_date": "2023-05"},
                {"pp": pp, "dp": 1},
                model={"preset": "llama3-8b", "layers": 4, "vocab": 1024},
                cluster="dgx-a100",
                calibration="a100-sxm",
            )
        )

    def of_a_micro_batch_s() -> float:
        return (run(16).step_time_s - run(8).step_time_s) / 8

    s = run(8).plan.scenario
    made, _ = source_of(s).before_forward()
    assert isinstance(made, Compute)
    wait_s = Costs(profile_named("a100-sxm"), s.cluster.gpu).host_s(made)
    with_wait = of_a_micro_batch_s()
    old = FRAMEWORKS["megatron"]
    former = tuple(f._replace(facts={**f.facts, "kernels_after_batch_sizes": 0}) for f in old.former)
    monkeypatch.setitem(FRAMEWORKS, "megatron", replace(old, former=former))
    assert with_wait - of_a_micro_batch_s() == pytest.approx(wait_s, rel=0.1)


def test_transformers_trainer_waits_for_each_backward() -> None:
    """transformers/trainer.py: `torch.isnan(loss) or torch.isinf(loss)`, of which Python asks both."""
    for name in ("transformers", "transformers_compiled", "deepspeed"):
        made, end = source_of(scenario(framework=name)).before_forward()
        assert end is BLOCK_END
        assert isinstance(made, Compute)
        assert (made.kernels, made.plain_host) == (4, True)
    assert source_of(scenario(framework="eager")).before_forward() == ()


@pytest.mark.parametrize(
    ("training", "copied"),
    [
        ({"param_dtype": "fp32"}, True),
        ({}, False),
        ({"param_dtype": "fp32", "precision": "fp32"}, False),
        ({"lora": {"rank": 8}}, True),
        ({"param_dtype": "fp32", "framework": "deepspeed"}, False),
        ({"param_dtype": "fp32", "cross_entropy": "chunked"}, False),
    ],
)
def test_a_model_under_autocast_returns_its_logits_in_fp32(training: dict[str, Any], copied: bool) -> None:
    """accelerate/utils/operations.py: convert_outputs_to_fp32; 2 bytes read and 4 written for each logit."""
    s = scenario(**{"framework": "transformers", "cross_entropy": "unfused", **training})
    assert returned(s) == [6.0 * s.for_training.seq_len * s.model.vocab] * copied


def test_fsdp2_has_no_autocast_and_returns_the_logits_as_they_are() -> None:
    """accelerate/accelerator.py: `_prepare_fsdp2` does not call `prepare_model`, which wraps the forward."""
    training = {"seq_len": 4096, "global_batch_size": 8, "framework": "transformers", "param_dtype": "fp32"}
    assert returned(scenario_with(training, {"dp": 8, "zero": 3}, model="llama3-8b", cluster="dgx-h100")) == []


def returned(s: Scenario) -> list[float]:
    return [i.bytes for i in head_block(s).forward if isinstance(i, Compute) and i.name == "returned_logits"]
