"""The host's wait for each micro-batch's loss: what it issues afterwards is not hidden behind the output layer."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.program import BLOCK_END, Compute
from sim.inputs.scenario import Scenario
from sim.models.frameworks import FRAMEWORKS
from sim.models.head import head_block
from sim.prices.operator_prices import Costs
from sim.simulation import simulate
from sim.validation.prediction import profile_named
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
    assert record.kernels == FRAMEWORKS["megatron"].kernels_after_loss_check == 8


@pytest.mark.parametrize("changes", [{"software_date": "2023-05"}, {"framework": "megatron_bridge"}])
def test_releases_and_trainers_that_do_not_look_do_not_wait(changes: dict[str, Any]) -> None:
    assert BLOCK_END not in head_block(scenario(**changes)).forward


def test_a_micro_batch_more_waits_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps that differ in four micro-batches differ by four waits, each of the host's time for eight kernels."""

    def four_s() -> float:
        return float(simulate(scenario(8)).result["step_time_s"] - simulate(scenario(4)).result["step_time_s"])

    with_wait = four_s()
    s = scenario()
    record = head_block(s).forward[-1]
    assert isinstance(record, Compute)
    wait_s = Costs(profile_named("b200-sxm"), s.cluster.gpu).host_s(record)
    monkeypatch.setitem(FRAMEWORKS, "megatron", replace(FRAMEWORKS["megatron"], kernels_after_loss_check=0))
    assert with_wait - four_s() == pytest.approx(4 * wait_s, rel=0.02)
