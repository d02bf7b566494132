"""`python -m sim.run SCENARIO.yaml`: simulate a step, or a serving workload, and show where time and memory go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.command import Command
from sim.commands.options import SCENARIO
from sim.commands.run_options import RunOptions, run_options
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.core.gc_paused import no_collection

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

# Options that ask for something which the workload, or another option, does not have.
NOT_FOR_SERVING = ("topology", "chakra", "days", "operators", "measured", "steps", "advise", "tokens")
NOT_FOR_RL = ("plan_batch", "emit", *NOT_FOR_SERVING, "runs", "slo")
OF_A_STEP = ("html", "trace", *NOT_FOR_SERVING, "require_fit", "price", "slo", "engine")


@click.command("run", cls=Command)
@click.argument("scenario", type=SCENARIO, required=False, metavar="SCENARIO")
@run_options
def main(scenario: Path | None, options: RunOptions) -> int | None:
    """Simulate SCENARIO (a training step, serving, or a step of reinforcement learning) and print a summary."""
    if options.schema or options.explain is not None:
        _describe(options.explain)
        return None
    if scenario is None:
        raise InputError("SCENARIO: is missing; give a file or a shipped scenario's name (--help shows the options)")
    if not options.plan_batch:
        options.refuse("can be given with --plan-batch only", "critical_batch", "critical_loss")
    if options.critical_batch is not None:
        options.refuse("cannot be given with --critical-batch; give one of them", "critical_loss")
    _refuse_by_workload(scenario, options)
    if options.days is None:
        options.refuse("can be given with --days only", "runs")
    if options.json == "-":
        options.refuse(
            "cannot be given with --json -, whose time_by_operator and time_by_part are the same", "operators"
        )
    if options.plan_batch:
        options.refuse("cannot be given with --plan-batch", *OF_A_STEP, "emit")
        _plan_batch(scenario, options)
        return None
    if options.emit is not None:
        options.refuse("cannot be given with --emit", *OF_A_STEP, "json")
        _emit(scenario, options)
        return None
    return 1 if not _run(scenario, options) and options.require_fit else 0


def _refuse_by_workload(path: Path, options: RunOptions) -> None:
    """Refuse what the workload does not have.

    The scenario is not loaded yet, since --plan-batch, --emit and --tokens load it with changes of their own.
    """
    from sim.inputs.scenario import load_mapping

    if next(options.given(*NOT_FOR_RL, *NOT_FOR_SERVING), None) is None:
        return
    data = load_mapping(path, options.overrides)
    if data.get("rl") is not None:
        options.refuse("is not for an rl step", *NOT_FOR_RL, where=path)
    elif data.get("inference") is not None and data.get("training") is None:
        options.refuse("is for training; this scenario serves requests", *NOT_FOR_SERVING, where=path)


@no_collection()
def _run(path: Path, options: RunOptions) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.inputs.scenario import load_scenario

    scenario = load_scenario(path, options.changes)
    if scenario.rl is not None:
        from sim.commands.rl_run import run_rl

        return run_rl(scenario, options)
    if scenario.inference is not None:
        from sim.commands.serving_run import run_serving

        return run_serving(scenario, lambda more: load_scenario(path, [*options.changes, *more]), options)
    from sim.commands.step_run import run_step

    return run_step(scenario, path, options)


def _plan_batch(path: Path, options: RunOptions) -> None:
    from sim.inputs.scenario import load_scenario
    from sim.studies.batch_plan import as_dict, batch_sizes, kaplan_critical_tokens, plan_batch
    from sim.views.batch_plan_tables import print_plan

    def load(more: list[str]) -> Scenario:
        return load_scenario(path, [*options.overrides, *more])

    critical, loss = options.critical_batch, options.critical_loss
    if loss is not None and (training := load([]).training) is not None:
        critical = kaplan_critical_tokens(loss) / training.seq_len
    sizes = [] if critical is None else batch_sizes(load, critical)
    plan = as_dict(plan_batch(load), load([]), critical, sizes)
    if options.json is not None:
        write_json(options.json, plan, indent=1)
    if options.json != "-":
        print_plan(plan)


def _describe(key: str | None) -> None:
    """Print the JSON Schema, or what one key means."""
    if key is None:
        from sim.inputs.scenario import json_schema

        write_json("-", json_schema(), indent=1)
    else:
        from sim.inputs.explain import explain

        print(explain(key))


def _emit(path: Path, options: RunOptions) -> None:
    """Print a trainer's flags."""
    from sim.emit import emit
    from sim.inputs.scenario import load_scenario

    assert options.emit is not None
    print(emit(load_scenario(path, options.overrides), options.emit, path))
