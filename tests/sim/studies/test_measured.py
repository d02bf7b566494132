"""Measured runs: what is accepted, what is refused and how, and the timeline they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.measured_run import load_measured
from sim.studies.measured import own_profile, to_timeline
from tests.sim.measured_runs import recorded, scenario


@pytest.fixture
def run() -> dict[str, Any]:
    return recorded(scenario())[0]


def _load(tmp_path: Path, data: Any) -> Any:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    return load_measured(path)


def test_median_and_noise(tmp_path: Path, run: dict[str, Any]) -> None:
    loaded = _load(tmp_path, run | {"step_times_s": [1.0, 3.0, 1.1]})
    assert loaded.step_time_s == 1.1
    assert loaded.noise == pytest.approx(0.1 / 1.1)


def test_timeline_is_the_recorded_step(tmp_path: Path, run: dict[str, Any]) -> None:
    loaded = _load(tmp_path, run)
    timeline = to_timeline(loaded.actions, scenario().parallelism)
    simulated = recorded(scenario())[1].timeline
    assert timeline.step_time_s == simulated.step_time_s
    ours, theirs = (
        sorted((x.rank, x.kind, x.stage, x.micro_batch, x.start_s, x.end_s) for x in t.spans())
        for t in (timeline, simulated)
    )
    assert ours == theirs
    assert [c.pipeline_rank for c in timeline.classes] == [0, 1]


def test_a_message_has_two_ends(tmp_path: Path, run: dict[str, Any]) -> None:
    timeline = to_timeline(_load(tmp_path, run).actions, scenario().parallelism)
    ends: dict[int, list[str]] = {}
    for span, flow in zip(timeline.spans(), timeline.flow.tolist(), strict=True):
        if flow >= 0:
            ends.setdefault(flow, []).append(span.kind)
    assert len(ends) == 16  # eight micro-batches, forward and backward
    for kinds in ends.values():
        assert sorted(kinds) in (["RECV_F", "SEND_F"], ["RECV_B", "SEND_B"])


def test_other_tools_may_add_keys(tmp_path: Path, run: dict[str, Any]) -> None:
    assert _load(tmp_path, run | {"weather": "fine"}).format == "measured-run/1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "measured-run/2"}, "format: found 'measured-run/2'; must be 'measured-run/1'"),
        ({"format": None}, "format: is missing; must be 'measured-run/1'"),
        ({"step_times_s": []}, "step_times_s"),
        ({"step_times_s": [-1.0]}, "step_times_s.0"),
        ({"step_times_s": ["fast"]}, "step_times_s.0"),
        ({"actions": [{"rank": 0, "kind": "F", "start_s": 1.0, "end_s": 0.5}]}, "actions.0"),
        ({"actions": [{"rank": -1, "kind": "F", "start_s": 0, "end_s": 1}]}, "actions.0.rank"),
        ({"memory": [{"rank": 0}]}, "memory.0.allocated_peak_bytes"),
        ({"scenario": None}, "scenario"),
    ],
)
def test_refused(tmp_path: Path, run: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        _load(tmp_path, run | change)
    assert str(error.value).startswith(str(tmp_path / "run.json"))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": NaN}', "null"])
def test_no_run_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"run\.json"):
        load_measured(path)


def test_run_without_calibration(tmp_path: Path, run: dict[str, Any]) -> None:
    del run["profile"]
    with pytest.raises(InputError, match=r"profile: missing.*--calibration"):
        own_profile(_load(tmp_path, run), "run.json")
