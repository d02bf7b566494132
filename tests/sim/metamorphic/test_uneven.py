"""Ranks whose programs differ still meet in every collective; backwards that are split keep what their halves need."""

from __future__ import annotations

import pytest

from tests.sim.metamorphic.laws import SMALL, run, vary


@pytest.mark.parametrize("recompute", ["selective_op", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_recomputation_never_costs_memory_and_owed_weight_gradients_keep_what_it_brought_back(
    recompute: str, schedule: str
) -> None:
    scenario = {
        "model": {"preset": "llama2-7b", "layers": 16},
        "cluster": "dgx-h100",
        "training": {"seq_len": 8192, "global_batch_size": 16, "cross_entropy": "fused"},
        "parallelism": {"pp": 4, "schedule": schedule},
    }
    none, less = run(**scenario), vary(scenario, training__recompute=recompute)
    saved = [a["activations"] - b["activations"] for a, b in zip(none["memory"], less["memory"], strict=True)]
    assert min(saved) > -1e-6 * none["peak_memory_bytes"]
    if schedule == "zb_h2":  # the last rank owes most of them
        assert saved[-1] < 0.25 * saved[0]


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("uneven", ["split", "experts"])
def test_paired_actions_of_uneven_ranks_agree_on_the_order_of_messages(schedule: str, zero: int, uneven: str) -> None:
    moe = {"moe": {"imbalance": {"seed": 0, "zipf": 1.0}}} if uneven == "experts" else {}
    result = run(
        model={"preset": "qwen3-30b-a3b", "layers": 4, **moe},
        cluster="dgx-a100",
        training={"seq_len": 32768, "global_batch_size": 8},
        parallelism={
            "dp": 2,
            "cp": 4,
            "pp": 2,
            "ep": 4,
            "zero": zero,
            "schedule": schedule,
            "ep_overlap": True,
            "cp_split": "contiguous" if uneven == "split" else "zigzag",
        },
    )
    assert result["engine"]["simulated_ranks"] > 2


def test_who_waits_for_an_uneven_split_says_so() -> None:
    result = vary(SMALL, parallelism={"cp": 4, "cp_split": "contiguous"})
    first, last = result["ranks"][0], result["ranks"][-1]
    assert first["waiting_s"] > 0.01 * result["step_time_s"]
    assert last["waiting_s"] == pytest.approx(0.0, abs=0.005 * result["step_time_s"])
