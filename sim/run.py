"""`python -m sim.run SCENARIO.yaml`: simulate one step and show where its time and memory go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.command import bad_input_exits, run_main, write_json

if TYPE_CHECKING:
    from sim.simulate import Simulation


def main(
    scenario: Annotated[Path, typer.Argument(help="scenario file", metavar="SCENARIO.yaml")],
    json: Annotated[
        str | None, typer.Option(help="write the result as JSON; - for standard output", metavar="FILE|-")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="write an interactive timeline that opens offline", metavar="FILE")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome/Perfetto trace", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="override a key, repeatable", metavar="KEY=VALUE")
    ] = None,
    steps: Annotated[int, typer.Option(help="draw memory over the first STEPS steps", min=1, max=1000)] = 1,
    engine: Annotated[str, typer.Option(help="static, or simpy, the reference", metavar="static|simpy")] = "static",
) -> None:
    """Simulate one training step of SCENARIO.yaml and print a summary."""
    with bad_input_exits():
        if engine not in ("static", "simpy"):
            raise typer.BadParameter(f"--engine is static or simpy, not {engine!r}")
        _run(scenario, json, html, trace, set_ or [], steps, engine)


def _run(
    path: Path, json: str | None, html: Path | None, trace: Path | None, overrides: list[str], steps: int, engine: str
) -> None:
    from sim.scenario import load_scenario
    from sim.simulate import simulate

    scenario = load_scenario(path, overrides)
    simulation = simulate(scenario, engine=engine)
    if html is not None or trace is not None:
        _write_views(simulate(scenario, expand=True, engine=engine), html, trace, steps)
    if json is not None:
        write_json(json, simulation.result)
    if json != "-":
        from rich.console import Console

        from sim.views.summary import print_summary

        print_summary(simulation.result, Console())


def _write_views(simulation: Simulation, html: Path | None, trace: Path | None, steps: int) -> None:
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
