"""A measured run made of a simulation: what a machine would record that runs exactly as simulated."""

from __future__ import annotations

from typing import Any

from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.simulation import Simulation, simulate
from tests.sim.cases import scenario_with


def scenario(**parallelism: Any) -> Scenario:
    """A small pipeline on a host."""
    return scenario_with(
        {"seq_len": 64, "global_batch_size": 8, "precision": "fp32", "zero_grad": "keep"},  # as measured runs do
        {"pp": 2, "schedule": "1f1b"} | parallelism,
        model={"layers": 4, "hidden": 64, "heads": 4, "vocab": 256},
        cluster="cpu-host",
        name="small",
    )


def recorded(s: Scenario, slower: float = 1.0) -> tuple[dict[str, Any], Simulation]:
    """The file's content, all times stretched by `slower`."""
    simulation = simulate(s, Profile("roofline", ""))
    actions = [
        {
            "rank": r,
            "kind": x.kind,
            "stage": x.stage,
            "micro_batch": x.micro_batch,
            "start_s": x.start_s * slower,
            "end_s": x.end_s * slower,
        }
        for c in simulation.timeline.classes
        for r in c.ranks
        for x in simulation.timeline.spans()
        if x.rank == c.rank
    ]
    rows = zip(simulation.timeline.classes, simulation.result["memory"], strict=True)
    memory = [
        {"rank": r, "allocated_peak_bytes": row["peak"], "saved_for_backward_bytes": row["activations"]}
        for c, row in rows
        for r in c.ranks
    ]
    step = simulation.step_time_s * slower
    run = {
        "format": "measured-run/1",
        "scenario": s.model_dump(mode="json"),
        "environment": {},
        "step_times_s": [step * 0.99, step, step * 1.01],
        "actions": actions,
        "memory": memory,
        "losses": [1.0, 1.0, 1.0],
        "profile": Profile("roofline", "").to_json(),
    }
    return run, simulation
