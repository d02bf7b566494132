"""More ranks than cores: a profile that says what that costs is read so, any other as it is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sim.commands.options import Study
from sim.commands.sweep import run_sweep
from sim.core.program import Compute, Phase
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.prices.coefficients import Coefficients
from sim.prices.profile import CollectiveTable, Profile
from sim.prices.profile_input import profile_from
from sim.prices.shared_cores import costs_on, on_shared_cores, ranks_on_node
from sim.simulation import simulate
from tests.sim.search.search_spaces import run_search
from topology.presets import GPUS

HOST = GPUS["cpu"]
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


def written(dp: int, cluster: object = "cpu-host") -> dict[str, Any]:
    """As many micro-batches on each rank, whatever dp is."""
    return {
        "model": {"layers": 2, "hidden": 64, "heads": 2, "vocab": 128},
        "training": {"seq_len": 64, "global_batch_size": 2 * dp, "precision": "fp32", "gradient_clipping": False},
        "parallelism": {"dp": dp, "dp_sync": "after_backward"},
        "cluster": cluster,
    }


def scenario(dp: int, cluster: object = "cpu-host") -> Scenario:
    return parse_scenario(written(dp, cluster))


def test_a_rank_for_each_core_changes_nothing() -> None:
    assert on_shared_cores(PROFILE, 2, HOST) is PROFILE


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
    assert on_shared_cores(other, 4, HOST) is other


def test_computing_takes_turns_and_messages_have_their_own_tables() -> None:
    """The step of four ranks on two cores: twice 1.1 times the computing of one rank, and the all-reduce that was
    measured while cores were shared."""
    alone, shared = (simulate(scenario(dp), PROFILE).step_time_s for dp in (1, 4))
    assert shared == pytest.approx(2.2 * alone + 9e-3, rel=1e-9)


def test_ranks_share_the_cores_of_their_own_node() -> None:
    """Four ranks on two nodes of two cores: computing takes as long as alone, and no table holds for two nodes."""
    apart = {"preset": "cpu-host", "gpus_per_node": 2, "nodes": 2}
    alone, two = (simulate(scenario(*given), PROFILE).outcome.mean_rank.compute_s for given in ((1,), (4, apart)))
    assert two == pytest.approx(alone, rel=1e-9)
    assert ranks_on_node(scenario(4, apart).cluster, 4) == 2


def test_searches_and_sweeps_find_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(PROFILE.to_json()), encoding="utf-8")
    file = tmp_path / "four.yaml"
    file.write_text(json.dumps({**written(4), "calibration": "two.json"}), encoding="utf-8")
    step_s = simulate(load_scenario(file)).step_time_s
    only = [f"{k}={v}" for k, v in {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "micro_batch_size": 1}.items()]
    (best,) = run_search(file, [], [*only, "recompute=none"], gpus=4).best
    assert best.step_time_s == pytest.approx(step_s, rel=1e-9)
    rows = run_sweep(file, ["parallelism.dp=2,4"], Study(workers=1)).rows
    assert rows[1].figures["step_time_s"] == pytest.approx(step_s, rel=1e-9)
    once = on_shared_cores(PROFILE, 4, HOST)
    assert on_shared_cores(once, 4, HOST).coefficients == once.coefficients


def test_sharing_makes_no_rank_faster_than_its_share() -> None:
    """A slowdown below 1, which a measurement may come out with, counts as 1."""
    quick, even = (
        replace(PROFILE, coefficients=dataclasses.replace(PROFILE.coefficients, core_sharing_slowdown=x))
        for x in (0.9, 1.0)
    )
    assert on_shared_cores(quick, 4, HOST).coefficients == on_shared_cores(even, 4, HOST).coefficients


@pytest.mark.parametrize(("kind", "size"), [("gemm", 512), ("copy", 4096), ("copy", 1)])
def test_what_the_data_sheet_says_is_shared_too(kind: str, size: int) -> None:
    """A profile that measured no rate: a matmul, a long copy and a short one, which is a launch, take as many turns."""
    bare = replace(PROFILE, coefficients=Coefficients(core_sharing_slowdown=1.1))
    op = Compute("x", kind, (1, size, size, size), "bf16", 2.0 * size**3, 4.0 * size**2, Phase.FORWARD)
    alone, shared = (costs_on(HOST, bare, ranks).compute(op).seconds for ranks in (2, 4))
    assert shared == pytest.approx(2.2 * alone, rel=1e-9)


def test_two_ranks_do_not_read_what_was_measured_with_shared_cores() -> None:
    alone, two = (simulate(scenario(dp), PROFILE).step_time_s for dp in (1, 2))
    assert two == pytest.approx(alone + 1e-3, rel=1e-9)
    cost = costs_on(HOST, PROFILE, 4).collective("all_reduce", 2, 1e4)
    assert cost is not None
    assert cost.seconds == pytest.approx(4e-3)


def test_a_saved_profile_reads_back_the_same() -> None:
    again = profile_from(PROFILE.to_json())
    assert [t.ranks_per_core for t in again.collectives] == [1.0, 2.0, 2.0]
    assert again.coefficients.core_sharing_slowdown == 1.1
