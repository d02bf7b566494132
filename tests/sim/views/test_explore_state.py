"""What the explorer takes from a browser: stated options alone, which become overrides and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import load_scenario
from sim.views.explore_state import controls_of, from_query, overrides, to_query, too_large

SCENARIOS = Path(__file__).parents[3] / "scenarios"
TRAINING = [p for p in sorted(SCENARIOS.glob("*.yaml")) if not p.stem.startswith("serve")]


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: p.stem)
def test_nothing_chosen_is_the_file_itself(path: Path) -> None:
    scenario = load_scenario(path)
    controls = controls_of(scenario)
    assert all(c.initial in c.options for c in controls)
    assert overrides(from_query("a", {}, controls), controls) == []
    assert to_query("a", from_query("a", {}, controls), controls) == []


def test_a_link_restores_what_was_chosen() -> None:
    controls = controls_of(load_scenario(SCENARIOS / "moe_mixtral.yaml"))
    chosen = {c.key: c.options[-1] for c in controls}
    pairs = to_query("b", chosen, controls)
    arguments = {key: [value.encode()] for key, value in pairs}
    assert from_query("b", arguments, controls) == chosen
    assert from_query("a", arguments, controls) == from_query("a", {}, controls)


def test_what_is_no_option_is_passed_over() -> None:
    controls = controls_of(load_scenario(SCENARIOS / "1f1b_pp8.yaml"))
    evil = {
        "a.cluster": [b"/etc/passwd"],
        "a.parallelism.tp": [b"\xff"],
        "a.parallelism.pp": [b"-1", b"8; x"],
        "a.name": [b"x"],
    }
    assert from_query("a", evil, controls) == from_query("a", {}, controls)


def test_what_the_file_derived_goes_back_to_its_default() -> None:
    path, listed = SCENARIOS / "uneven_pp8.yaml", ["parallelism.layers_per_stage=[4, 4, 5, 5, 4, 4, 4, 2]"]
    controls = controls_of(load_scenario(path, listed))
    chosen = {**from_query("a", {}, controls), "parallelism.pp": "4", "cluster": "dgx-b200"}
    changed = load_scenario(path, [*listed, *overrides(chosen, controls)])
    assert changed.parallelism.layers_per_stage == (8, 8, 8, 8)
    assert changed.calibration == "b200-sxm"


def test_balanced_layers_stay_balanced_and_can_be_chosen() -> None:
    path, balanced = SCENARIOS / "uneven_pp8.yaml", ["parallelism.layers_per_stage=balanced"]
    controls = controls_of(load_scenario(path, balanced))
    for chosen, layers in (({}, "balanced"), ({"parallelism.layers_per_stage": "even"}, (8, 8, 8, 8))):
        choices = {**from_query("a", {}, controls), "parallelism.pp": "4", **chosen}
        assert load_scenario(path, [*balanced, *overrides(choices, controls)]).parallelism.layers_per_stage == layers


def test_a_step_of_too_many_actions_is_named() -> None:
    options = ["training.global_batch_size=4096", "parallelism.pp=32"]
    assert "262,144" in str(too_large(load_scenario(SCENARIOS / "1f1b_pp8.yaml", options)))
    assert too_large(load_scenario(SCENARIOS / "1f1b_pp8.yaml")) is None
