"""Every schedule's real pipeline takes as long as simulated: its actions on a logical clock, its messages real.

`calibrate.schedule_replay` does the same with stages that sleep, by the machine's own clock.
"""

from __future__ import annotations

from typing import Any

import pytest

from calibrate.schedule_replay import SLOWDOWN, make_scenario, measure, replay_profile
from sim.schedules import FORMS
from sim.simulation import simulate
from tests.real.ranks import on_ranks

SECONDS = {"forward": 1.0, "backward": 2.1, "input_grad": 1.1, "weight_grad": 0.9, "message": 1e-5}
WITHIN = 1e-4  # of a step: some tens of messages in a row; another order is off by a good part of an action
SLOWED = [("1f1b", 1), ("gpipe", 0), ("zb_v", 2), ("dualpipe", 3), ("interleaved_1f1b", 1)]
CASES: dict[int, list[tuple[str, int | None]]] = {
    4: [*((name, None) for name in FORMS), *SLOWED],
    8: [(name, None) for name in FORMS if name != "naive"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What each case takes for real, on as many of one set of ranks as it wants."""
    given = {
        f"{ranks} {name} {slow}": {"ranks": ranks, "schedule": name, "slow": slow, "seconds": SECONDS}
        for ranks, cases in CASES.items()
        for name, slow in cases
    }
    return on_ranks("clock_worker", given, tmp_path_factory.mktemp("clock"), max(CASES))


def _simulated(name: str, ranks: int, slow: int | None) -> float:
    scenario = make_scenario(name, ranks, slow)
    return simulate(scenario, replay_profile(scenario, SECONDS)).step_time_s


@pytest.mark.parametrize(("ranks", "name", "slow"), [(r, *case) for r, cases in CASES.items() for case in cases])
def test_order_and_rendezvous(found: dict[str, float], ranks: int, name: str, slow: int | None) -> None:
    assert found[f"{ranks} {name} {slow}"] == pytest.approx(_simulated(name, ranks, slow), rel=WITHIN)


def test_another_schedule_would_show() -> None:
    """GPipe's step is not near ZB-H1's, nor a slowed rank's near an even one."""
    even = _simulated("gpipe", 4, None)
    assert even > 1.1 * _simulated("zb_h1", 4, None)
    assert 1.1 * even < _simulated("gpipe", 4, 1) < SLOWDOWN * even


def test_stages_that_sleep() -> None:
    """A step is no shorter than the sleeps that follow one another, on any machine."""
    (row,) = measure([("gpipe", None)], 2, action_s=0.01)
    found: dict[str, Any] = row
    assert found["measured_s"] >= (4 + 2 - 1) * 3 * 0.01
    assert found["backward"] >= 0.02
    assert found["simulated_s"] >= (4 + 2 - 1) * 3 * 0.01
