"""What a program hands to the API by mistake is said in one message, as a scenario's mistakes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim import load_scenario, parse_scenario, simulate, simulate_rl, simulate_serving
from sim.core.errors import InputError

STEP: dict[str, Any] = {"model": "gpt2", "training": {"seq_len": 512, "global_batch_size": 8}, "cluster": "dgx-h100"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: load_scenario("no_such"), "no_such: no such file or shipped scenario"),
        (lambda: load_scenario("dp8", "parallelism.pp=4"), "overrides: found 'parallelism.pp=4'; must be a list of"),
        (lambda: parse_scenario([STEP]), "scenario: found a list of 1; a scenario is a mapping"),  # type: ignore[arg-type]
        (lambda: simulate("dp8.yaml"), "scenario: found 'dp8.yaml'; load_scenario(PATH)"),  # type: ignore[arg-type]
        (lambda: simulate_serving(STEP), "scenario: found a mapping; load_scenario(PATH)"),  # type: ignore[arg-type]
        (lambda: simulate_rl(None), "scenario: found null; load_scenario(PATH)"),  # type: ignore[arg-type]
        (
            lambda: simulate(parse_scenario(STEP), "h100-sxm"),
            "profile: found 'h100-sxm'; the scenario's key calibration",
        ),  # type: ignore[arg-type]
        (lambda: simulate(parse_scenario(STEP), engine="fast"), "engine: found 'fast'; must be one of auto, simpy"),  # type: ignore[arg-type]
        (lambda: simulate(load_scenario("serve_llama8b")), "training: is missing; simulate_serving simulates"),
    ],
)
def test_a_wrong_call_has_one_message(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert said in str(error.value)
