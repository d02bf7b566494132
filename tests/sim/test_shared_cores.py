"""More ranks than cores: a profile that says what that costs is read so, any other as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.coefficients import Coefficients
from sim.prices.operator_prices import Costs
from sim.prices.profile import CollectiveTable, Profile
from sim.prices.profile_input import profile_from
from sim.prices.shared_cores import on_shared_cores
from sim.simulation import simulate

SIZES = np.array([1e3, 1e6])


def table(op: str, ranks: int, seconds: float, ranks_per_core: float = 1.0) -> CollectiveTable:
    return CollectiveTable(op, ranks, SIZES, np.full(2, seconds), np.zeros(2), ranks_per_core)


PROFILE = Profile(
    "two cores",
    "by hand",
    hardware={"device": "cpu", "cores": 2},
    coefficients=Coefficients(
        launch_overhead_s=0.0,
        memory_bandwidth_bytes_per_s=1e9,
        peak_flops_per_s={"fp32": 1e10},
        operator_in_model_s=1e-5,
        core_sharing_slowdown=1.1,
    ),
    collectives=(table("all_reduce", 2, 1e-3), table("all_reduce", 2, 4e-3, 2.0), table("all_reduce", 4, 9e-3, 2.0)),
)


def scenario(dp: int) -> Scenario:
    """As many micro-batches on each rank, whatever dp is."""
    return parse_scenario(
        {
            "model": {"layers": 2, "hidden": 64, "heads": 2, "vocab": 128},
            "training": {"seq_len": 64, "global_batch_size": 2 * dp, "precision": "fp32", "gradient_clipping": False},
            "parallelism": {"dp": dp, "dp_sync": "after_backward"},
            "cluster": "cpu-host",
        }
    )


def test_a_rank_for_each_core_changes_nothing() -> None:
    assert on_shared_cores(PROFILE, 2) is PROFILE


@pytest.mark.parametrize(
    "change",
    [
        {"coefficients": dataclasses.replace(PROFILE.coefficients, core_sharing_slowdown=None)},
        {"hardware": {"device": "cuda"}},
        {"reference": "h100"},
    ],
)
def test_a_profile_that_does_not_say_is_left_alone(change: dict[str, object]) -> None:
    other = replace(PROFILE, **change)
    assert on_shared_cores(other, 4) is other


def test_computing_takes_turns_and_messages_have_their_own_tables() -> None:
    """The step of four ranks on two cores: twice 1.1 times the computing of one rank, and the all-reduce that was
    measured while cores were shared."""
    alone, shared = (simulate(scenario(dp), PROFILE).step_time_s for dp in (1, 4))
    assert shared == pytest.approx(2.2 * alone + 9e-3, rel=1e-9)


def test_two_ranks_do_not_read_what_was_measured_with_shared_cores() -> None:
    alone, two = (simulate(scenario(dp), PROFILE).step_time_s for dp in (1, 2))
    assert two == pytest.approx(alone + 1e-3, rel=1e-9)
    cost = Costs(on_shared_cores(PROFILE, 4), scenario(4).cluster.gpu).collective("all_reduce", 2, 1e4)
    assert cost is not None
    assert cost.seconds == pytest.approx(4e-3)


def test_a_saved_profile_reads_back_the_same() -> None:
    again = profile_from(PROFILE.to_json())
    assert [t.ranks_per_core for t in again.collectives] == [1.0, 2.0, 2.0]
    assert again.coefficients.core_sharing_slowdown == 1.1
