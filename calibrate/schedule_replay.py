"""Compares pipelines whose stages only sleep with their simulation, for every schedule, on few cores.

    python -m calibrate.schedule_replay [--ranks N …] [--schedules NAME …] [--action-s 0.025]
                                         [--slow RANK] [--json FILE]

Ranks execute the action lists with real messages (gloo), but each action sleeps for a given time instead of computing.
So many ranks can share few cores, and other processes hardly matter. The simulator gets two measured times: the mean of
the sleeps (slightly more than asked for on a busy machine), and the mean of messages for which a rank waited. Only the
order of actions and their waits for each other can then differ.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json import dumps, loads
from pathlib import Path
from typing import Any

import click
import numpy as np

from calibrate.launch import is_rank, join, run_ranks
from sim.commands.command import Command, run_command
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.core.processes import python_module
from sim.core.program import BlockKind
from sim.core.timeline import ACTION_KINDS, RECEIVES, SENDS
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profile import BlockPoint, CollectiveTable, Profile
from sim.programs.stages import stage_blocks, stage_input_bytes
from sim.ranks.plan import make_plan
from sim.schedules import FORMS
from sim.simulation import simulate

ACTION_S = 0.025
SLOWDOWN = 1.3
PHASES = {"forward": 1.0, "backward": 2.0, "input_grad": 1.0, "weight_grad": 1.0}  # in sleeps of `--action-s`
NOTHING_S = 1e-9  # for embedding and head, as a profile's blocks must take some time
STEPS = 3
HANGS_AFTER_S = 900.0


def make_scenario(name: str, ranks: int, slow: int | None) -> Scenario:
    """Return a scenario with one layer on each stage and 2 · ranks micro-batches; rank `slow` is 1.3 times slower."""
    stages = FORMS[name].model_stages(ranks, FORMS[name].stages_per_rank)
    data: dict[str, Any] = {
        "name": f"{name}, {ranks} ranks",
        "cluster": "cpu-host",
        "model": {"layers": stages, "hidden": 32, "heads": 4, "vocab": 128},
        "training": {"seq_len": 32, "global_batch_size": 2 * ranks, "precision": "fp32"},
        "parallelism": {"pp": ranks, "schedule": name},
    }
    if slow is not None:
        data["faults"] = {"stragglers": [{"rank": slow, "compute_scale": SLOWDOWN}]}
    return parse_scenario(data, name)


def replay_profile(scenario: Scenario, seconds: dict[str, float]) -> Profile:
    """Return a profile of seconds by phase, and of messages under the key `message`; embedding and head take none."""
    plan = make_plan(scenario)
    blocks = {b.key: b for part in plan.parts for b in stage_blocks(plan, part, 0)}
    points = tuple(
        BlockPoint(key, phase, 0, seconds[phase] if b.kind is BlockKind.LAYER else NOTHING_S, 0.0)
        for key, b in blocks.items()
        for phase in PHASES
    )
    one = np.array([stage_input_bytes(plan)])
    message = CollectiveTable("send_recv", 2, one, np.array([seconds["message"]]), np.zeros(1))
    return Profile("sleeping", "sleeps and messages as they took", blocks=points, collectives=(message,))


def given_seconds(action_s: float) -> dict[str, float]:
    """Return the seconds that actions should sleep, and about those of a message."""
    return {phase: action_s * times for phase, times in PHASES.items()} | {"message": 1e-3}


@dataclass(slots=True)
class Sleeper:
    """A stage that sleeps: the interface of `calibrate.parallel.pipeline.Stage`."""

    action_s: float
    result: Any
    slept: list[tuple[str, float]] = field(default_factory=list)
    losses: dict[int, Any] = field(default_factory=dict)

    def forward(self, micro_batch: int, x: Any, targets: Any) -> Any:
        return self.sleep("forward")

    def backward(self, micro_batch: int, grad: Any) -> Any:
        return self.sleep("backward")

    def backward_input(self, micro_batch: int, grad: Any) -> Any:
        return self.sleep("input_grad")

    def backward_weight(self, micro_batch: int) -> None:
        self.sleep("weight_grad")

    def sleep(self, phase: str) -> Any:
        start = time.perf_counter()
        time.sleep(self.action_s * PHASES[phase])
        self.slept.append((phase, time.perf_counter() - start))
        return self.result


def run_rank(cases: Sequence[tuple[str, int | None]], action_s: float, out: Path) -> None:
    """Run all cases as one rank, one after the other; rank 0 writes their seconds to `out`."""
    import torch.distributed as dist

    rank, ranks = join()
    found = []
    for name, slow in cases:
        steps = [_step(rank, ranks, name, slow, t) for t in (NOTHING_S, *[action_s] * STEPS)][1:]
        seconds, parts = min(steps, key=lambda step: step[0])  # other processes can only lengthen a step
        found.append({"seconds": seconds, "parts": parts})
    if rank == 0:
        write_json(out, {"cases": found})
    dist.barrier()
    dist.destroy_process_group()


def _step(rank: int, ranks: int, name: str, slow: int | None, action_s: float) -> tuple[float, dict[str, float]]:
    """Return seconds from a common start to the last rank's last action, and mean seconds of sleeps and messages."""
    import torch
    import torch.distributed as dist

    from calibrate.parallel.pipeline import Pipeline

    scenario = make_scenario(name, ranks, slow)
    schedule = simulate(scenario, replay_profile(scenario, given_seconds(ACTION_S))).schedule
    shape = (1, scenario.for_training.seq_len, scenario.model.hidden)
    scale = SLOWDOWN if rank == slow else 1.0
    stages = {
        s: Sleeper(action_s * scale, torch.zeros(shape)) for s, r in enumerate(schedule.rank_of_stage) if r == rank
    }
    overlap = bool(scenario.parallelism.p2p_overlap)
    pipeline = Pipeline(schedule, rank, range(ranks), stages, shape, torch.float32, "cpu", overlap)
    tokens = torch.zeros(schedule.micro_batches, *shape)
    start = torch.tensor([time.perf_counter_ns() + 20_000_000])
    dist.broadcast(start, 0)
    time.sleep(max(0.0, (int(start) - time.perf_counter_ns()) * 1e-9))
    records = pipeline.step(tokens, tokens)
    slept = [(phase, s / scale) for stage in stages.values() for phase, s in stage.slept]
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (records, slept))
    end = max(r.end_ns for records, _ in every for r in records if r.kind in ACTION_KINDS)
    parts = _means([x for _, slept in every for x in slept])
    parts["message"] = _message_s([r for records, _ in every for r in records])
    return (end - int(start)) * 1e-9, parts


def _means(slept: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {
        phase: statistics.fmean(times)
        for phase in PHASES
        if (times := [seconds for other, seconds in slept if other == phase])
    }


def _message_s(records: Sequence[Any]) -> float:
    """Return the mean seconds of messages for which a rank waited, from the later of their two starts."""
    sent = {(r.kind[-1], r.stage, r.micro_batch): r for r in records if r.kind in SENDS}
    spans = []
    for r in records:
        if r.kind in RECEIVES:
            start = sent[r.kind[-1], r.stage, r.micro_batch].start_ns
            if r.start_ns <= start:
                spans.append((r.end_ns - start) * 1e-9)
    return statistics.fmean(spans) if spans else NOTHING_S


def measure(cases: Sequence[tuple[str, int | None]], ranks: int, action_s: float = ACTION_S) -> list[dict[str, Any]]:
    """Run all cases (schedule, slowed rank) on `ranks` real ranks and compare each with its simulation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        given = dumps([list(c) for c in cases])
        command = [*python_module("calibrate.schedule_replay"), "--cases", given, "--action-s", str(action_s)]
        run_ranks([*command, "--json", str(out)], ranks, HANGS_AFTER_S)
        result = loads(out.read_text())
    rows = []
    for (name, slow), found in zip(cases, result["cases"], strict=True):
        scenario, seconds = make_scenario(name, ranks, slow), found["seconds"]
        profile = replay_profile(scenario, given_seconds(action_s) | found["parts"])
        simulated = simulate(scenario, profile).step_time_s
        rows.append(
            {
                "schedule": name,
                "ranks": ranks,
                "slow": slow,
                "measured_s": seconds,
                "simulated_s": simulated,
                "error": simulated / seconds - 1,
                **found["parts"],
            }
        )
    return rows


@click.command("schedule-replay", cls=Command)
@click.option("--ranks", type=int, multiple=True, default=(4, 8), metavar="N", help="number of ranks; may be repeated")
@click.option("--schedules", multiple=True, type=click.Choice(tuple(FORMS)), metavar="NAME", help="default: all")
@click.option("--action-s", type=float, default=ACTION_S, metavar="SECONDS", help="sleep of a forward")
@click.option("--slow", type=int, metavar="RANK", help="this rank sleeps 1.3 times as long")
@click.option("--json", metavar="FILE", help="write the rows as JSON")
@click.option("--cases", hidden=True)
def main(
    ranks: tuple[int, ...],
    schedules: tuple[str, ...],
    action_s: float,
    slow: int | None,
    json: str | None,
    cases: str | None,
) -> None:
    """Run schedules on ranks that only sleep, and compare each with its simulation."""
    if cases and json and is_rank():
        return run_rank([tuple(c) for c in loads(cases)], action_s, Path(json))
    if not 0.001 <= action_s <= 10:
        raise InputError(f"--action-s: found {action_s:g}; allowed: 0.001 to 10")
    rows = []
    print("schedule            ranks  slow  measured s  simulated s   error")
    for count in ranks:
        rows += measure([(name, slow) for name in schedules or FORMS], count, action_s)
        for r in rows[-len(schedules or FORMS) :]:
            late = "-" if r["slow"] is None else r["slow"]
            print(
                f"{r['schedule']:18} {count:6} {late:>5} {r['measured_s']:11.4f} {r['simulated_s']:12.4f} "
                f"{r['error']:+7.1%}",
                flush=True,
            )
    if json:
        write_json(json, {"rows": rows})


if __name__ == "__main__":
    main() if is_rank() else run_command(main)  # a rank's parent reports how it ended
