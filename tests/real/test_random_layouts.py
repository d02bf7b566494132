"""Random layouts of two ranks: each is refused with its key, or computes one device's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from calibrate.real_steps.runnable import check_runnable
from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from tests.real.conftest import small
from tests.real.random_layouts import drawn

CASES = drawn()


@pytest.fixture(scope="module")
def proved(prove: Any) -> Any:
    return prove({name: {"scenario": scenario} for name, scenario in CASES.items()}, 2)


@pytest.mark.parametrize("name", CASES)
def test_random_layouts_compute_what_one_device_does(proved: Any, name: str) -> None:
    found = proved[name]
    assert found["holds"], found
    assert found["difference"] <= 1e-10


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"tp": 2, "tp_overlap": "full"}, "tp_overlap full"), ({"cp": 2, "cp_method": "ring"}, "cp_method ring")],
)
def test_what_changes_kept_outputs_in_place_is_refused(layout: dict[str, Any], words: str) -> None:
    scenario = parse_scenario(small(layout, attention="fused", recompute="selective_op"))
    with pytest.raises(InputError, match=f"training.recompute: found selective_op with {words}; calibrate.measure can"):
        check_runnable(scenario, "scenario")
