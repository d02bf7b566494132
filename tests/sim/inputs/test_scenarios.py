"""Every shipped scenario runs, and what it reports is possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sim.inputs.scenario import load_scenario, parse_scenario
from sim.inputs.yaml_input import parse_yaml
from sim.schedules import FORMS
from sim.simulation import simulate

ROOT = Path(__file__).parents[3]
FILES = sorted(p for p in (ROOT / "scenarios").rglob("*.yaml") if "published" not in p.parts)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "scenarios")))
def test_scenario(path: Path) -> None:
    scenario = load_scenario(path)
    if scenario.training is None or scenario.rl is not None:
        pytest.skip("serving and reinforcement learning have tests of their own")
    sim = simulate(scenario)
    r = sim.result
    assert 0 < r["mfu"] <= r["hfu"] + 1e-12 <= 1 + 1e-9
    assert r["mfu"] <= r["mfu_full_attention"] + 1e-12
    assert 0 <= r["compute_s"] <= r["step_time_s"] * (1 + 1e-9)
    for row in r["ranks"]:
        assert row["busy_s"] + row["bubble_s"] <= r["step_time_s"] * (1 + 1e-9)
        assert row["compute_s"] + row["exposed_comm_s"] <= r["step_time_s"] * (1 + 1e-9)
    for m in r["memory"]:
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
        assert 0 < m["peak"] <= sum(m[k] for k in parts) + 1
    assert sum(row["count"] for row in r["ranks"]) == scenario.parallelism.ranks
    assert sum(r["critical_path"].values()) == pytest.approx(r["step_time_s"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "scenarios")))
def test_what_a_result_says_of_its_scenario_is_that_scenario(path: Path) -> None:
    """Networks read from files among them. Warnings go: that there is no profile is, by then, what was asked for."""
    scenario = load_scenario(path).unchecked_copy(update={"warnings": ()})
    written = scenario.model_dump(mode="json")
    for read in (json.loads(json.dumps(written)), parse_yaml(yaml.safe_dump(written), "again")[0]):
        assert parse_scenario(read).unchecked_copy(update={"warnings": ()}) == scenario


def test_there_is_one_for_every_scheme_and_schedule() -> None:
    used = [load_scenario(p) for p in FILES]
    schedules = {s.parallelism.schedule for s in used if s.parallelism.pp > 1}
    assert schedules == set(FORMS)
    assert {s.parallelism.zero for s in used} == {0, 1, 2, 3}
    assert {s.parallelism.cp_method for s in used if s.parallelism.cp > 1} == {
        "ring",
        "all_gather",
        "all_to_all",
        "all_to_all_ring",
    }
    assert any(s.parallelism.ep > 1 for s in used)
    assert {s.training.recompute.mode for s in used if s.training} >= {"none", "selective", "full"}


def test_llama3_405b_and_deepseek_v3_fit_as_published() -> None:
    """Llama Team 2024, table 4: 43, 41 and 38 % MFU; DeepSeek-AI 2024: 2,048 GPUs without tensor parallelism, and
    GPU hours that make about 20 % of the fp8 peak."""
    for name in ("llama3_405b_8k", "llama3_405b_16k", "llama3_405b_131k", "dualpipe_deepseek_v3"):
        r = simulate(load_scenario(ROOT / "scenarios" / f"{name}.yaml")).result
        assert r["fits_in_memory"], name
        assert 0.2 < r["mfu"] < 0.7, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "scenarios")))
def test_a_shipped_scenario_says_whether_messages_of_tp_are_overlapped(path: Path) -> None:
    """A reader who runs an example is not told that it left out what its own framework does."""
    told = [text for text in load_scenario(path).warnings if text.startswith("parallelism.tp_overlap")]
    assert not told
