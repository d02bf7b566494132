"""Makes a real run's file, `measured-run/1`, from what its ranks recorded, and prints what was timed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from calibrate.rank_messages import say, warn
from calibrate.real_steps.profile_from_steps import chosen_rounds, representative
from calibrate.real_steps.timed_rounds import Log, foreign
from sim.inputs.measured_run import QUIET_CORES
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile


def assemble(
    scenario: Scenario,
    logs: list[Any],
    memories: list[dict[str, int]],
    proof: dict[str, Any],
    profile: Profile | None,
    facts: Any,
) -> dict[str, Any]:
    """Make the measured run, `measured-run/1`."""
    steps = logs[0].steps
    rounds = chosen_rounds(logs[0])
    chosen = [i for r in rounds for i in (2 * r, 2 * r + 1)]
    dropped = [i for i in range(len(steps)) if i not in chosen]
    times = [steps[i].seconds for i in chosen]
    calibrations = [logs[0].calibrations[r].foreign_cores for r in rounds if logs[0].calibrations]
    _closing_words(scenario.name, times, logs[0], rounds)
    return {
        "format": "measured-run/1",
        "scenario": scenario.model_dump(mode="json"),
        "environment": facts | {"date": datetime.now(UTC).isoformat(timespec="seconds")},
        "step_times_s": times,
        "foreign_cores": [steps[i].foreign_cores for i in chosen],
        "calibration_foreign_cores": calibrations,
        "dropped_steps": [{"seconds": steps[i].seconds, "foreign_cores": steps[i].foreign_cores} for i in dropped],
        "actions": _actions(logs, representative(logs[0], chosen)),
        "memory": memories,
        "losses": [steps[i].loss for i in chosen],
        "proof": proof,
        **({} if profile is None else {"profile": profile.to_json()}),
    }


def _closing_words(name: str, times: Sequence[float], log: Log, rounds: Sequence[int]) -> None:
    """Print what was timed; warn if no round was quiet, as errors of such a run say little."""
    noise = max(foreign(log, r) for r in rounds)
    if noise > QUIET_CORES:
        cores = f"{noise:.2g} of {os.cpu_count()} cores"
        warn(f"{name}: no round was quiet, other processes used {cores}: expect large errors of step time")
    dropped = len(log.steps) - len(times)
    say(
        f"{name}: {len(times)} steps, median {statistics.median(times):.4g} s; "
        f"{dropped} noisy steps dropped; waited {log.waited_s:.0f} s for other processes"
    )


def _actions(logs: list[Any], step: int) -> list[dict[str, Any]]:
    """Return what every rank did in one step, in seconds from the step's start on rank 0."""
    start_ns = logs[0].steps[step].start_ns
    return [
        {
            "rank": log.rank,
            "kind": r.kind,
            "stage": r.stage,
            "micro_batch": r.micro_batch,
            "start_s": (r.start_ns - start_ns) / 1e9,
            "end_s": (r.end_ns - start_ns) / 1e9,
        }
        for log in logs
        for r in sorted(log.steps[step].records, key=lambda r: r.start_ns)
    ]
