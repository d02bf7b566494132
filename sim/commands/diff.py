"""`python -m sim.diff A B`: what differs between two scenarios or results, in keys, times and memory.

With `--set` and one scenario: as it is, and with the changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sim.commands.command import Command
from sim.commands.options import SCENARIO, Report, report_options
from sim.core.errors import InputError
from sim.core.files import read_json


@click.command("diff", cls=Command)
@click.argument("a", type=SCENARIO, metavar="A")
@click.argument("b", type=SCENARIO, required=False, metavar="[B]")
@report_options
def main(a: Path, b: Path | None, report: Report) -> None:
    """Compare A with B, each a scenario or a result of `run --json`. Without B: A, and A changed by --set."""
    from sim.studies.difference import difference
    from sim.views.difference import difference_page, print_difference

    if b is None and not report.overrides:
        raise InputError("B: is missing; give a second scenario or result, or --set KEY=VALUE")
    first = result_of(a, () if b is None else report.overrides)
    second = result_of(a if b is None else b, report.overrides)
    kinds = [_workload(result) for result in (first, second)]
    if kinds[0] != kinds[1]:
        raise InputError(f"A, B: found {kinds[0]} and {kinds[1]}; diff compares two of one kind")
    found = difference(first, second)
    if b is None:
        found["names"][1] += f" with {', '.join(report.overrides)}"
    elif report.overrides and not found["keys"]:
        print("note: --set changed both A and B; to compare A with A changed by --set, leave B out", file=sys.stderr)
    report.show(found, difference_page, print_difference)


def _workload(result: dict[str, Any]) -> str:
    """Name what a result's scenario simulates."""
    scenario = result["scenario"]
    if scenario.get("rl") is not None:
        return "a step of reinforcement learning"
    return "a training step" if scenario.get("inference") is None else "a serving workload"


def result_of(path: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A stored result, or that of a scenario, simulated.

    Raises:
        InputError: for a file that is neither, or overrides of a result.
    """
    from sim.inputs.file_kinds import refuse_other_kind
    from sim.inputs.scenario import load_scenario
    from sim.rl.simulation import simulate_rl
    from sim.serve.simulation import simulate_serving
    from sim.simulation import simulate

    if path.suffix == ".json":
        data = read_json(path)
        if isinstance(data, dict) and str(data.get("format")).startswith("sim-result/"):
            if overrides:
                raise InputError(f"{path}: is a result; --set changes scenarios only")
            return _whole(data, path)
        if not isinstance(data, dict) or "format" in data:
            refuse_other_kind(path, data, "diff takes scenarios or results")
            raise InputError(f"{path}: is no result of `stepsim run --json`")
    scenario = load_scenario(path, overrides)
    if scenario.rl is not None:
        return simulate_rl(scenario).result
    return (simulate(scenario) if scenario.inference is None else simulate_serving(scenario)).result


def _whole(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """A stored result that can be compared.

    Raises:
        InputError: where a part of it is missing or of another kind.
    """
    from sim.studies.difference import difference

    try:
        difference(result, result)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        missing = f"the key {error} is missing" if isinstance(error, KeyError) else "a key holds another kind of value"
        raise InputError(f"{path}: is no whole result of `stepsim run --json`: {missing}") from None
    return result
