"""A schedule that the project has never heard of: one file, one entry in `FORMS`, and everything takes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from calibrate.real_steps.runnable import check_runnable
from sim.core.errors import InputError
from sim.emit import TRAINERS, emit
from sim.inputs.scenario import json_schema, parse_scenario
from sim.schedules import FORMS
from sim.search.evaluation import evaluate, pack
from sim.simulation import simulate
from sim.views.explore_panel import attempt
from sim.views.explore_state import controls_of
from sim.views.search_page import search_page
from sim.views.timeline_page import timeline_page
from tests.sim.search.search_spaces import BASE, legal, run_search, varied
from tests.sim.search.test_search_bounds import mesh_search

FILE = '''
"""One micro-batch at a time down a V of 2p stages and back up; micro-batches come in threes."""

from sim.core.actions import Action, Kind
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import v_shaped


def lonely_v(p, m):
    def turns(r):
        down, up = r, 2 * p - 1 - r
        return [(down, Kind.F), (up, Kind.F), (up, Kind.B), (down, Kind.B)]

    lists = ([Action(s, kind, i) for i in range(m) for s, kind in turns(r)] for r in range(p))
    return v_shaped("lonely_v", p, m, lists)


FORM = ScheduleForm("lonely_v", lonely_v, micro_batches_multiple=lambda p: 3, fewest_micro_batches=lambda p: 3)
'''
NAME = "lonely_v"
PARALLELISM = {"pp": 4, "schedule": NAME}
SCENARIO: dict[str, Any] = {
    **BASE,
    "name": "lonely",
    "model": {**BASE["model"], "layers": 8, "tied_embeddings": False},
    "training": {"seq_len": 256, "global_batch_size": 12},
    "parallelism": PARALLELISM,
}


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"{NAME}.py"
    file.write_text(FILE)
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FORMS, NAME, module.FORM)


def test_its_record_is_read_off_its_lists() -> None:
    form = FORMS[NAME]
    assert (form.stages_per_rank, form.model_copies, form.backward) == (2, 1, "whole")
    assert (form.one_at_a_time, form.pairs, form.ends_on_last_rank) == (True, False, False)
    assert form.forwards_first(4, 300, 2) == (1,) * 8


def test_it_is_a_scenarios_word() -> None:
    p = parse_scenario(SCENARIO).parallelism
    assert (p.virtual_stages, p.layers_per_stage, p.p2p_overlap) == (2, (1,) * 8, True)
    jsonschema.validate(SCENARIO, json_schema())
    for wrong, why in (
        ({"parallelism": {**PARALLELISM, "virtual_stages": 1}}, "found 1 with schedule lonely_v; it has 2 stages"),
        ({"parallelism": {**PARALLELISM, "schedule": "lonely"}}, "did you mean 'lonely_v'?"),
        ({"training": {"seq_len": 256, "global_batch_size": 8}}, "8 micro-batches must be a multiple of 3, at least 3"),
    ):
        with pytest.raises(InputError, match=why.replace("?", r"\?")):
            parse_scenario({**SCENARIO, **wrong})


def test_it_runs_and_its_page_says_what_it_loses() -> None:
    """Of four ranks one works: three quarters and more of the step are bubble."""
    simulation = simulate(parse_scenario(SCENARIO))
    assert simulation.result["bubble_fraction"] > 0.7
    advice = {part.key: text for part, text in simulation.losses()}
    assert "The lonely_v schedule runs one stage at a time" in advice["bubble"]
    assert NAME in timeline_page(simulation.outcome, simulation.timeline, [])


def test_the_search_finds_it_and_bounds_it_by_its_own_lists() -> None:
    space = varied({k: SCENARIO[k] for k in ("model", "training")}, 4, {"schedule": (NAME,)})
    layouts, packed = legal(space), pack(space)
    assert {x.pp for x in layouts} == {2, 4}
    for x in layouts[::7]:
        outcome, bounds = evaluate(packed, x), mesh_search(space, x)
        assert 0.8 * outcome.step_time_s < bounds.time.bound_s(x) <= outcome.step_time_s
        assert 0.8 * outcome.peak_memory_bytes < bounds.memory.least_bytes(x) <= outcome.peak_memory_bytes


def test_the_search_command_gives_the_best_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    only = [f"schedule={NAME}", "recompute=none", "micro_batch_size=1", "zero=0", "tp=1", "cp=1"]
    space = varied(
        {k: SCENARIO[k] for k in ("model", "training")},
        4,
        {"schedule": (NAME,), "recompute": ("none",), "micro_batch_size": (1,), "zero": (0,), "tp": (1,), "cp": (1,)},
    )
    outcomes = [evaluate(pack(space), x) for x in legal(space)]
    smallest = min(o.peak_reserved_bytes for o in outcomes)
    result = run_search(file, (), only, f"{int(smallest) + 1}B", gpus=4)
    fitting = [o for o in outcomes if o.peak_reserved_bytes <= int(smallest) + 1]
    assert result.best[0].layout.schedule == NAME
    assert result.best[0].step_time_s == min(o.step_time_s for o in fitting)
    assert NAME in search_page(result)


def test_the_explorer_offers_and_draws_it(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, "parallelism": {"pp": 4}}))
    menu = next(c for c in controls_of(parse_scenario(SCENARIO)) if c.key == "parallelism.schedule")
    assert (menu.initial, menu.options[-1]) == (NAME, NAME)
    chosen = [
        f"parallelism.schedule={NAME}",
        *(f"parallelism.{k}=null" for k in ("virtual_stages", "layers_per_stage")),
    ]
    outcome = attempt(file, chosen)
    assert outcome.simulation is not None


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_that_lacks_it_says_so(trainer: str) -> None:
    with pytest.raises(InputError, match=f"parallelism.schedule: found {NAME}; "):
        emit(parse_scenario(SCENARIO), trainer)


def test_real_ranks_can_run_its_lists() -> None:
    scenario = {k: v for k, v in SCENARIO.items() if k != "calibration"}
    training = {**SCENARIO["training"], "precision": "fp32"}
    parallelism = {**PARALLELISM, "pp": 2}
    changes = {"cluster": "cpu-host", "training": training, "parallelism": parallelism}
    check_runnable(parse_scenario({**scenario, **changes}), "test")
