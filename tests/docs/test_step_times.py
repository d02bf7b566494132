"""Step times in sentences and tables of pages, to the last digit shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from sim.inputs.scenario import load_scenario
from sim.simulation import simulate

DOCS = Path(__file__).parents[2] / "docs"
SCENARIOS = DOCS.parent / "scenarios"
PLANNING = (DOCS / "batch_planning.md").read_text(encoding="utf-8")
SECONDS = {"ms": 1e-3, "s": 1.0}
PRECOMPUTED = "training.preference.reference=precomputed"
ALONE = ("parallelism.dp=1", "parallelism.zero=0")


class Shown(NamedTuple):
    """A step time on a page behind the words `before`, of a scenario with changes."""

    page: str
    before: str
    scenario: str
    changes: tuple[str, ...] = ()


SHOWN = (
    Shown("schemes", "plain data parallelism |", "schemes_llama8b", ("parallelism.zero=0",)),
    Shown("schemes", "ZeRO-1 |", "schemes_llama8b"),
    Shown("schemes", "ZeRO-2 |", "schemes_llama8b", ("parallelism.zero=2",)),
    Shown("schemes", "ZeRO-3 (FSDP) |", "schemes_llama8b", ("parallelism.zero=3",)),
    Shown("schemes", "pipeline, 1F1B |", "schemes_llama8b", (*ALONE, "parallelism.pp=8")),
    Shown("schemes", "tensor and sequence |", "schemes_llama8b", (*ALONE, "parallelism.tp=8", "parallelism.sp=true")),
    Shown("schemes", "context, ring |", "schemes_llama8b", (*ALONE, "parallelism.cp=8")),
    Shown("data_parallel", "buckets of 25 MiB |", "dp_buckets_gpt2", ("parallelism.dp_sync=bucketed",)),
    Shown(
        "data_parallel",
        "one all-reduce after the backward |",
        "dp_buckets_gpt2",
        ("parallelism.dp_sync=after_backward",),
    ),
    Shown("data_parallel", "one for each tensor |", "dp_buckets_gpt2", ("parallelism.dp_sync=per_parameter",)),
    Shown("pipeline", "4, 4, 4, 4, 2 layers. The step takes", "uneven_pp8", ("parallelism.layers_per_stage=balanced",)),
    Shown("pipeline", "with four layers on each stage it takes", "uneven_pp8"),
    Shown("processes", "step.step_time_s) #", "uneven_pp8"),
    Shown("batch_planning", "documents of 1,500 tokens in the mean) takes", "packed_documents"),
    Shown("batch_planning", "with whole sequences it takes", "packed_documents", ("training.packing=null",)),
    Shown("batch_planning", "| 16 |", "zero1_llama8b_dp8"),
    Shown("fine_tuning", "`sft_full_llama8b` (ZeRO-3) |", "sft_full_llama8b"),
    Shown("fine_tuning", "(rank 16, plain data parallelism) |", "sft_lora_llama8b"),
    Shown("fine_tuning", "`dpo_llama3_8b` (FSDP) |", "dpo_llama3_8b"),
    Shown("fine_tuning", "`--set training.preference.reference=precomputed` |", "dpo_llama3_8b", (PRECOMPUTED,)),
    Shown("fine_tuning", "`dpo_lora_llama3_8b` (rank 16, plain data parallelism) |", "dpo_lora_llama3_8b"),
    Shown("fine_tuning", "`reward_llama3_8b` (FSDP) |", "reward_llama3_8b"),
    Shown("expert_parallel", "`scenarios/fused_experts_qwen3_30b.yaml` takes", "fused_experts_qwen3_30b"),
    Shown("expert_parallel", "9.96 s, and", "fused_experts_qwen3_30b", ("training.fused_experts=false",)),
)


@pytest.mark.parametrize("shown", SHOWN, ids=lambda s: f"{s.page}: {s.before}")
def test_a_page_shows_the_simulated_step(shown: Shown) -> None:
    text = " ".join((DOCS / f"{shown.page}.md").read_text(encoding="utf-8").split())
    found = re.search(rf"{re.escape(shown.before)} (\d+)(\.\d+)? (ms|s)\b", text)
    assert found is not None
    whole, decimals, unit = found.groups(default="")
    step_s = simulate(load_scenario(SCENARIOS / f"{shown.scenario}.yaml", shown.changes), engine="static").step_time_s
    assert f"{step_s / SECONDS[unit]:.{max(len(decimals) - 1, 0)}f}" == whole + decimals


def test_the_phases_of_a_whole_training() -> None:
    rows = re.findall(
        r"^\| [\dBT. to]+ \| [\d.]+M \| ([\d.]+) s \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \|$", PLANNING, re.M
    )
    run = simulate(load_scenario(SCENARIOS / "batch_schedule_minimax.yaml")).result["training_run"]
    found = [
        (f"{x['step_time_s']:.1f}", f"{x['steps']:,}", f"{x['days']:.1f}", f"{x['gpu_hours']:,.0f}")
        for x in run["batch_schedule"]
    ]
    assert rows == found
