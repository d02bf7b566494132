"""What launch scripts set reaches the rows that they ran, by release, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim.validation.performance_scripts import SCRIPTS, scripted

PUBLISHED = Path(__file__).parents[2] / "scenarios" / "published"
BRIDGE = "NVIDIA, Megatron-Bridge performance summary and archive"


@pytest.mark.parametrize(
    ("group", "section", "said"),
    [
        ("LLAMA3_8B DGX-H100 25.11", "training", {"grad_dtype": "bf16", "cross_entropy": "fused"}),
        ("Qwen3_235B_a22B DGX-H100 25.11", "parallelism", None),
        ("Qwen3_235B_a22B DGX-H100 26.02", "parallelism", {"ep_overlap": True}),
        ("Qwen3_30B_a3B (tokendrop) DGX-GB200 25.09", "model", {"moe": {"capacity_factor": 1.0}}),
    ],
)
def test_a_release_decides(group: str, section: str, said: dict[str, Any] | None) -> None:
    assert scripted(BRIDGE, group, {}).get(section) == said


def test_what_is_run_stays_but_for_what_a_script_sets() -> None:
    row = {"training": {"grad_dtype": "fp32", "seq_len": 8}, "parallelism": {"tp": 2}}
    found = scripted(BRIDGE, "DeepSeekV3 (dropless) DGX-H100 25.09", row)
    assert (found["training"]["seq_len"], found["training"]["grad_dtype"]) == (8, "bf16")
    assert (found["parallelism"]["tp"], found["parallelism"]["ep_overlap"]) == (2, True)
    assert sum(found["parallelism"]["layers_per_stage"]) == 61
    assert row["training"]["grad_dtype"] == "fp32"


def test_each_script_finds_a_published_row() -> None:
    """A group that is renamed would silently lose what its script set."""
    found: set[str] = set()  # sources of scripts with a row
    for path in PUBLISHED.glob("*.json"):
        table = json.loads(path.read_text())
        for script in SCRIPTS:
            mine = str(table["source"].get("citation", "")).startswith(script.citation)
            rows = [row for row in table["rows"] if re.search(script.group_pattern, str(row.get("group", "")))]
            found |= {script.source} if mine and rows else set()
    assert {script.source for script in SCRIPTS} == found


def test_other_software_is_left_alone() -> None:
    assert scripted("our own runs of Megatron-Bridge", "DeepSeekV3 DGX-H100 25.09", {}) == {}


def test_a_row_without_a_release_is_left_alone() -> None:
    assert scripted(BRIDGE, "DeepSeekV3 on our H100s", {}) == {}
