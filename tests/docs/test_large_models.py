"""The table of the largest models says what the simulator says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.inputs.scenario import load_scenario
from sim.simulation import simulate

ROOT = Path(__file__).parents[2]
ROWS = {
    ("Llama 3 405B, 8,192 tokens", "8,192"): "llama3_405b_8k",
    ("Llama 3 405B, 8,192 tokens", "16,384"): "llama3_405b_16k",
    ("Llama 3 405B, 131,072 tokens", "16,384"): "llama3_405b_131k",
    ("DeepSeek-V3, 4,096 tokens, of the fp8 peak", "2,048"): "dualpipe_deepseek_v3",
}


def cells() -> dict[tuple[str, str], list[str]]:
    """Rows of the table, by their first two cells."""
    lines = (ROOT / "docs" / "large_models.md").read_text("utf-8").splitlines()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row[2:] for row in rows if (row[0], row[1]) in ROWS}


def test_every_row_is_there() -> None:
    assert cells().keys() == ROWS.keys()


@pytest.mark.parametrize(("place", "profile"), [(0, "roofline"), (1, "h100-sxm")])
@pytest.mark.parametrize("row", ROWS, ids=ROWS.get)
def test_shown_utilization_is_the_simulators(row: tuple[str, str], place: int, profile: str) -> None:
    shown = [float(x) for x in re.findall(r"([\d.]+) %", cells()[row][place])]
    scenario = load_scenario(ROOT / "scenarios" / f"{ROWS[row]}.yaml", [f"calibration={profile}"])
    result = simulate(scenario).result
    found = [100 * result[key] for key in ("mfu", "mfu_full_attention")]
    for old, new in zip(shown, found, strict=False):
        assert old == pytest.approx(new, abs=1.0), f"costs have changed: {new:.1f} % belongs in docs/large_models.md"
