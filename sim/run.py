"""`python -m sim.run SCENARIO.yaml`: simulate a step, or a serving workload, and show where time and memory go."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.command import bad_input_exits, run_main, write_json
from sim.errors import InputError
from sim.garbage import no_collection
from sim.options import Json, Overrides

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.serve.serving_result import ServingSimulation
    from sim.simulation import Simulation

Html = Annotated[Path | None, typer.Option(help="write an interactive timeline that opens offline", metavar="FILE")]
Drawing = Annotated[
    Path | None, typer.Option(help="write a drawing of the cluster with the load of each link", metavar="FILE")
]
Chakra = Annotated[
    Path | None, typer.Option(help="write Chakra traces PREFIX.RANK.et, for ASTRA-sim", metavar="PREFIX")
]
Trainer = Annotated[
    str | None, typer.Option(help="print another trainer's flags for this layout", metavar="torchtitan|megatron")
]
Key = Annotated[str | None, typer.Option(help="say what a scenario key means; '' for all sections", metavar="KEY")]

PlanBatch = Annotated[
    bool, typer.Option("--plan-batch", help="cut the global batch into dp, micro-batches and accumulation")
]
CriticalBatch = Annotated[
    float | None, typer.Option(help="with --plan-batch: critical batch size, sequences", min=1e-3, metavar="N")
]
Days = Annotated[
    float | None, typer.Option(help="simulate DAYS days of failures and checkpoints (faults.failures)", metavar="DAYS")
]


def main(
    scenario: Annotated[Path | None, typer.Argument(help="scenario file", metavar="SCENARIO.yaml")] = None,
    json: Json = None,
    html: Html = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome/Perfetto trace", metavar="FILE")] = None,
    topology: Drawing = None,
    set_: Overrides = None,
    steps: Annotated[int, typer.Option(help="draw memory over the first STEPS steps", min=1, max=1000)] = 1,
    engine: Annotated[str, typer.Option(help="static, or simpy, the reference", metavar="static|simpy")] = "static",
    chakra: Chakra = None,
    emit: Trainer = None,
    explain: Key = None,
    plan_batch: PlanBatch = False,
    critical_batch: CriticalBatch = None,
    days: Days = None,
    runs: Annotated[int, typer.Option(help="histories that --days draws", min=1, max=100_000)] = 200,
    schema: Annotated[bool, typer.Option("--schema", help="print a scenario's JSON Schema, for editors")] = False,
) -> None:
    """Simulate one training step, or the serving workload, of SCENARIO.yaml and print a summary."""
    with bad_input_exits():
        if engine not in ("static", "simpy"):
            raise typer.BadParameter(f"--engine is static or simpy, not {engine!r}")
        if schema or explain is not None:
            return _describe(explain)
        if scenario is None:
            raise InputError("SCENARIO.yaml: is missing; give the scenario file to simulate (--help shows the options)")
        if critical_batch is not None and not plan_batch:
            raise InputError("--critical-batch: stands beside --plan-batch alone")
        files = {"--html": html, "--trace": trace, "--topology": topology, "--chakra": chakra, "--days": days}
        if plan_batch:
            _stands_alone("--plan-batch", {**files, "--emit": emit})
            return _plan_batch(scenario, json, set_ or [], critical_batch)
        if emit is not None:
            _stands_alone("--emit", {**files, "--json": json})
            return _emit(scenario, set_ or [], emit)
        for target, write in ((topology, _draw), (chakra, _write_chakra)):
            if target is not None:
                write(scenario, set_ or [], target)
        _run(scenario, json, html, trace, set_ or [], steps, engine, None if days is None else (days, runs))


def _stands_alone(option: str, others: Mapping[str, object]) -> None:
    """Refuse what `option`, which simulates no step of its own, would not do."""
    for other, value in others.items():
        if value is not None:
            raise InputError(f"{other}: cannot stand beside {option}")


@no_collection()
def _run(
    path: Path,
    json: str | None,
    html: Path | None,
    trace: Path | None,
    overrides: list[str],
    steps: int,
    engine: str,
    days: tuple[float, int] | None = None,
) -> None:
    from sim.inputs.scenario import load_scenario
    from sim.simulation import simulate

    scenario = load_scenario(path, overrides)
    if scenario.inference is not None:
        if days is not None:
            raise _no_training(path, "--days")
        return _serve(scenario, json, html, trace)
    simulation = simulate(scenario, engine=engine)
    if html is not None or trace is not None:
        _write_views(simulate(scenario, expand=True, engine=engine), html, trace, steps)
    result = simulation.result
    if days is not None:
        from sim.goodput import goodput

        result = {**result, "goodput": goodput(scenario, simulation.step_time_s, *days, progress=sys.stderr.isatty())}
    if json is not None:
        write_json(json, result)
    if json != "-":
        from rich.console import Console

        from sim.views.summary import print_summary

        print_summary(result, Console())


def _no_training(path: Path, option: str) -> InputError:
    return InputError(f"{path}: {option}: is for training; this scenario serves requests")


def _serve(scenario: Scenario, json: str | None, html: Path | None, trace: Path | None) -> None:
    from sim.serve.serving import simulate_serving

    simulation = simulate_serving(scenario)
    if html is not None or trace is not None:
        _write_views(simulation, html, trace, 1)
    if json is not None:
        write_json(json, simulation.result)
    if json != "-":
        from rich.console import Console

        from sim.views.serving_summary import print_serving

        print_serving(simulation.result, Console())


def _draw(path: Path, overrides: list[str], target: Path) -> None:
    """Write the drawing of the cluster under a step's traffic."""
    from sim.files import write_text
    from sim.inputs.scenario import load_scenario
    from sim.link_traffic import topology_drawing
    from sim.simulation import simulate

    scenario = load_scenario(path, overrides)
    if scenario.training is None:
        raise _no_training(path, "--topology")
    write_text(target, topology_drawing(simulate(scenario)))


def _plan_batch(path: Path, json: str | None, overrides: list[str], critical: float | None) -> None:
    from sim.batch_plan import as_dict, batch_sizes, plan_batch, print_plan
    from sim.inputs.scenario import load_scenario

    def load(more: list[str]) -> Scenario:
        return load_scenario(path, [*overrides, *more])

    sizes = [] if critical is None else batch_sizes(load, critical)
    plan = as_dict(plan_batch(load), load([]), critical, sizes)
    if json is not None:
        write_json(json, plan)
    if json != "-":
        print_plan(plan)


def _describe(key: str | None) -> None:
    """Print the JSON Schema, or what one key means."""
    if key is None:
        from sim.inputs.scenario import json_schema

        write_json("-", json_schema())
    else:
        from sim.inputs.explain import explain

        print(explain(key))


def _emit(path: Path, overrides: list[str], trainer: str) -> None:
    """Print a trainer's flags."""
    from sim.emit import emit
    from sim.inputs.scenario import load_scenario

    print(emit(load_scenario(path, overrides), trainer))


def _write_chakra(path: Path, overrides: list[str], prefix: Path) -> None:
    """Write the step as Chakra traces."""
    from sim.inputs.scenario import load_scenario
    from sim.simulation import simulate
    from sim.traces.chakra_out import write_chakra

    scenario = load_scenario(path, overrides)
    if scenario.training is None:
        raise _no_training(path, "--chakra")
    write_chakra(simulate(scenario, expand=True), prefix)


def _write_views(simulation: Simulation | ServingSimulation, html: Path | None, trace: Path | None, steps: int) -> None:
    from sim.files import write_text

    memory = simulation.memory_over(steps)
    if html is not None:
        from sim.views.timeline_page import timeline_page

        write_text(html, timeline_page(simulation.result, simulation.timeline, memory, simulation.critical_rows))
    if trace is not None:
        import json

        from sim.views.trace import trace_events

        write_text(trace, json.dumps(trace_events(simulation.timeline, memory)))


if __name__ == "__main__":
    run_main(main)
