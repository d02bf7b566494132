"""Ranks whose programs differ (uneven context splits, uneven experts) still meet in every collective."""

from __future__ import annotations

import pytest

from tests.sim.metamorphic import run


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("uneven", ["split", "experts"])
def test_paired_actions_of_uneven_ranks_agree_on_the_order_of_messages(schedule: str, zero: int, uneven: str) -> None:
    moe = {"moe": {"imbalance": {"seed": 0, "zipf": 1.0}}} if uneven == "experts" else {}
    result = run(
        model={"preset": "qwen3-30b-a3b", "layers": 4, **moe},
        cluster="dgx-a100",
        training={"seq_len": 32768, "global_batch_size": 8},
        parallelism={"dp": 2, "cp": 4, "pp": 2, "ep": 4, "zero": zero, "schedule": schedule, "ep_overlap": True,
                     "cp_split": "contiguous" if uneven == "split" else "zigzag"},
    )  # fmt: skip
    assert result["engine"]["simulated_ranks"] > 2
