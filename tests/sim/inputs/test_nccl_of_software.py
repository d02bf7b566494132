"""The NCCL that a scenario's software brings decides what its cluster leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.explain import explain
from sim.inputs.nccl_input import nccl_of
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.simulation import simulate


def scenario(cluster: Any = "dgx-h100", **training: Any) -> Any:
    """Return a scenario of two GPUs of data parallelism, on nodes of `cluster`."""
    return parse_scenario(
        {
            "model": "gpt2",
            "training": {"seq_len": 64, "global_batch_size": 2, **training},
            "parallelism": {"dp": 2},
            "cluster": cluster,
        }
    )


@pytest.mark.parametrize(
    ("framework", "date", "version"),
    [
        ("compiled", "2024-12-23", "2.21.5"),
        ("compiled", "2025-05", "2.26.2"),
        ("megatron", "2024-12", "2.23.4"),
        ("nemo", "2024-07", "2.22.3"),
        ("megatron_bridge", "2025-09", "2.27.5"),
        ("meta_llama3", None, "2.20.5"),
        ("eager", None, "2.30.7"),
    ],
)
def test_the_trainer_and_its_month_say_which_nccl_ran(framework: str, date: str | None, version: str) -> None:
    read = scenario(framework=framework, software_date=date)
    assert nccl_of(read.training).version == version
    assert read.cluster.inter_node.pat == (tuple(map(int, version.split("."))) >= (2, 23))


@pytest.mark.parametrize("stated", [True, False])
def test_what_is_stated_stays(stated: bool) -> None:
    cluster = {"preset": "dgx-h100", "inter_node": {"pat": stated}}
    for date in ("2023-01", "2026-06", None):
        assert scenario(cluster, software_date=date).cluster.inter_node.pat is stated


def test_a_cluster_that_only_serves_has_the_newest() -> None:
    assert nccl_of(None).pat
    read = load_scenario("serve_llama8b")
    assert read.training is None
    assert read.cluster.inter_node.pat is True


def test_a_date_before_pat_changes_the_gathers_of_one_gpu_a_node() -> None:
    """ZeRO-3 of a small model over 16 nodes beside tensor parallelism 8: its layers' gathers are below 10 MiB."""
    steps = []
    for pat in (None, True, False):
        read = parse_scenario(
            {
                "model": "gpt2",
                "training": {"seq_len": 64, "global_batch_size": 16, "software_date": "2025-01"},
                "parallelism": {"dp": 16, "tp": 4, "zero": 3},
                "cluster": {"preset": "dgx-h100", "gpus_per_node": 4, "inter_node": {"pat": pat}},
            }
        )
        steps.append(simulate(read).result["step_time_s"])
    assert steps[0] == steps[2] != steps[1]


def test_explain_says_where_nccl_comes_from() -> None:
    said = explain("cluster.inter_node.pat")
    assert "software_date" in said
    assert "2.23" in said
