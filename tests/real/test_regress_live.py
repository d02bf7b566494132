"""`sim.regress --live` measures a stored run's scenario afresh."""

from __future__ import annotations

from pathlib import Path

import yaml

from calibrate.measure import main as measure
from sim.inputs.measured_run import load_measured
from sim.studies.measured import own_profile
from sim.studies.regression import BY_BENCHMARKS, errors_of, live_errors
from tests.processes import exit_code
from tests.real.conftest import small


def test_live(tmp_path: Path) -> None:
    """A run is measured afresh, out of a stored one's scenario."""
    scenario, out = tmp_path / "small.yaml", tmp_path / "small.json"
    scenario.write_text(yaml.safe_dump(small({}, m=1)))
    assert exit_code(measure, str(scenario), "--out", str(out), "--steps", "1", "--budget", "0.5") == 0
    assert set(errors_of(out)) == {"step_time", "replay", "peak_bytes", "saved_for_backward_bytes"}
    own = own_profile(load_measured(out), str(out))
    live = live_errors(out, ["--steps", "1", "--budget", "0.5"], own)
    assert set(live) == {"step_time", BY_BENCHMARKS}
    assert all(-1 < error < 10 for error in live.values())
