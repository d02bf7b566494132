"""`python -m sim.run SCENARIO.yaml`: simulate a step, or a serving workload, and show where time and memory go."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from sim.commands.command import Command
from sim.commands.options import FILE, SCENARIO, SECONDS, engine_option, json_option, overrides_option, write_page
from sim.commands.rl_run import refuse_beside_rl
from sim.core.errors import InputError
from sim.core.files import write_json, write_text
from sim.core.gc_paused import no_collection

if TYPE_CHECKING:
    from sim.core.timeline import Timeline
    from sim.engine.shared_links import Engine
    from sim.inputs.scenario import Scenario
    from sim.results.memory import MemoryCurve
    from sim.search.slo import Promise
    from sim.serve.result import ServingSimulation
    from sim.simulation import Simulation
    from sim.studies.advice import Tried
    from sim.studies.anchor import Anchor
    from sim.studies.spending import Spending
    from sim.views.headline import Number

RUNS = 200  # of --days
OPERATORS_SHOWN = 15  # of each class of ranks; --json has all


@click.command("run", cls=Command)
@click.argument("scenario", type=SCENARIO, required=False, metavar="SCENARIO")
@json_option
@click.option("--html", type=FILE, metavar="FILE", help="write an interactive timeline that opens offline")
@click.option("--trace", type=FILE, metavar="FILE", help="write a Chrome/Perfetto trace")
@click.option("--topology", type=FILE, metavar="FILE", help="write a page with the network and the load of each link")
@overrides_option
@click.option("--steps", type=click.IntRange(1, 1000), default=1, help="number of steps in the memory plot")
@engine_option
@click.option("--chakra", type=FILE, metavar="PREFIX", help="write Chakra traces PREFIX.RANK.et, for ASTRA-sim")
@click.option("--emit", metavar="TRAINER", help="print a config for torchtitan, torchtitan-python or megatron")
@click.option("--explain", metavar="KEY", help="explain a key of scenarios; '' lists all sections")
@click.option(
    "--plan-batch", is_flag=True, help="list divisions of the global batch into dp, micro-batches, accumulation"
)
@click.option(
    "--critical-batch",
    type=click.FloatRange(1e-3),
    metavar="N",
    help="with --plan-batch: critical batch size in sequences",
)
@click.option(
    "--critical-loss",
    type=click.FloatRange(0.01, 100.0),
    metavar="NATS",
    help="with --plan-batch: critical batch size at this loss, by Kaplan et al. 2020",
)
@click.option(
    "--days", type=float, metavar="DAYS", help="simulate DAYS days of failures and checkpoints (faults.failures)"
)
@click.option(
    "--runs", type=click.IntRange(1, 100_000), default=RUNS, help="number of simulated histories, with --days"
)
@click.option(
    "--advise/--no-advise", default=None, help="simulate changes that might shorten the step; by default only if quick"
)
@click.option("--operators", is_flag=True, help="list the longest operators of each class of equal ranks")
@click.option("--require-fit", is_flag=True, help="exit code 1 if the step does not fit in memory")
@click.option("--tokens", metavar="N", help="tokens of the whole training; adds steps, days, GPU hours")
@click.option(
    "--price", type=click.FloatRange(0), metavar="PER_GPU_HOUR", help="price of a GPU hour; adds cost and energy"
)
@click.option(
    "--slo", metavar="LIMITS", help="serving: limits of latencies in seconds, such as ttft_p99=0.25,tpot_p99=0.035"
)
@click.option(
    "--measured",
    type=SECONDS,
    metavar="TIME",
    help="measured step time of SCENARIO without --set, such as 350ms; scales the simulated change by --set",
)
@click.option("--schema", is_flag=True, help="print a scenario's JSON Schema, for editors")
def main(
    scenario: Path | None,
    json: str | None,
    html: Path | None,
    trace: Path | None,
    topology: Path | None,
    overrides: tuple[str, ...],
    steps: int,
    engine: Engine,
    chakra: Path | None,
    emit: str | None,
    explain: str | None,
    plan_batch: bool,
    critical_batch: float | None,
    critical_loss: float | None,
    days: float | None,
    runs: int,
    advise: bool | None,
    operators: bool,
    require_fit: bool,
    tokens: str | None,
    price: float | None,
    slo: str | None,
    measured: float | None,
    schema: bool,
) -> int | None:
    """Simulate SCENARIO (a training step, serving, or a step of reinforcement learning) and print a summary."""
    if schema or explain is not None:
        _describe(explain)
        return None
    if scenario is None:
        raise InputError("SCENARIO: is missing; give a file or a shipped scenario's name (--help shows the options)")
    for option, value in (("--critical-batch", critical_batch), ("--critical-loss", critical_loss)):
        if value is not None and not plan_batch:
            raise InputError(f"{option}: can be given with --plan-batch only")
    if critical_batch is not None and critical_loss is not None:
        raise InputError("--critical-loss: cannot be given with --critical-batch; give one of them")
    not_for_rl = {
        "--plan-batch": plan_batch or None,
        "--emit": emit,
        "--topology": topology,
        "--chakra": chakra,
        "--advise": advise or None,
        "--steps": None if steps == 1 else steps,
        "--runs": None if runs == RUNS else runs,
        "--days": days,
        "--measured": measured,
        "--slo": slo,
        "--operators": operators or None,
        "--price": price,
        "--tokens": tokens,
    }
    refuse_beside_rl(scenario, overrides, not_for_rl)
    given = overrides if tokens is None else (*overrides, f"training.tokens={tokens}")
    files = {"--html": html, "--trace": trace, "--topology": topology, "--chakra": chakra, "--days": days}
    if plan_batch:
        _stands_alone("--plan-batch", {**files, "--emit": emit})
        _plan_batch(scenario, json, overrides, critical_batch, critical_loss)
        return None
    if emit is not None:
        _stands_alone("--emit", {**files, "--json": json})
        _emit(scenario, overrides, emit)
        return None
    for target, write in ((topology, _draw), (chakra, _write_chakra)):
        if target is not None:
            write(scenario, overrides, target)
    asked = _Asked(steps, None if days is None else (days, runs), operators, price, measured, overrides, advise, slo)
    fits = _run(scenario, json, html, trace, given, engine, asked)
    return 1 if require_fit and not fits else 0


class _Asked(NamedTuple):
    """What the summary and the JSON say beside the step itself."""

    steps: int
    weeks: tuple[float, int] | None  # days, histories
    operators: bool
    price_per_gpu_hour: float | None
    measured_s: float | None
    changes: Sequence[str]  # --set: what differs from the step that was measured
    advise: bool | None
    slo: str | None


def _stands_alone(option: str, others: Mapping[str, object]) -> None:
    """Refuse what `option`, which simulates no step of its own, would not do."""
    for other, value in others.items():
        if value is not None:
            raise InputError(f"{other}: cannot be given with {option}")


@no_collection()
def _run(
    path: Path,
    json: str | None,
    html: Path | None,
    trace: Path | None,
    overrides: Sequence[str],
    engine: Engine,
    asked: _Asked,
) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.inputs.scenario import load_scenario
    from sim.simulation import simulate

    scenario = load_scenario(path, overrides)
    if scenario.rl is not None:
        from sim.commands.rl_run import run_rl

        return run_rl(scenario, json, html, trace, engine)
    if scenario.inference is not None:
        training = {"--days": asked.weeks, "--operators": asked.operators or None, "--measured": asked.measured_s}
        for option, given in training.items():
            if given is not None:
                raise _no_training(path, option)
        return _serve(scenario, json, html, trace, asked, engine)
    if asked.slo is not None:
        raise InputError(f"{path}: --slo: is for serving; this scenario trains")
    if engine == "static" and scenario.processes is not None:
        raise InputError(f"{path}: --engine static: the scenario's processes need SimPy's clock (auto or simpy)")
    simulation = simulate(scenario, engine=engine)
    advice = _advice(simulation, path, overrides, asked.advise, page=html is not None)
    if html is not None or trace is not None:
        _write_views(simulate(scenario, expand=True, engine=engine), html, trace, asked.steps, advice)
    weeks, anchored, spent = None, None, None
    if asked.weeks is not None:
        from sim.studies.goodput import goodput

        weeks = goodput(scenario, simulation.step_time_s, *asked.weeks, progress=sys.stderr.isatty())
    if asked.measured_s is not None:
        from sim.studies.anchor import anchor

        ran = simulate(load_scenario(path), engine=engine) if asked.changes else simulation
        anchored = anchor(asked.measured_s, ran.outcome, simulation.outcome)
    if asked.price_per_gpu_hour is not None:
        from sim.studies.spending import spending

        spent = spending(simulation.outcome, asked.price_per_gpu_hour)
    if json is not None:
        more = {"goodput": weeks, "measured": anchored, "spending": spent}
        written: dict[str, object] = {k: v.to_json() for k, v in more.items() if v is not None}
        if advice is not None:
            written["advice"] = [tried.to_json() for tried in advice]
        write_json(json, simulation.result | written, indent=1)
    if json != "-":
        from rich.console import Console

        from sim.views.summary import print_summary

        print_summary(simulation.outcome, Console(), weeks, _numbers(anchored, spent), advice or ())
        if asked.operators:
            _print_operators(simulation)
    return simulation.outcome.fits_in_memory


def _numbers(anchored: Anchor | None, spent: Spending | None) -> list[Number]:
    """What the options asked for, as headline numbers."""
    from sim.views.asked_numbers import anchor_numbers, spending_numbers

    return [
        *([] if anchored is None else anchor_numbers(anchored)),
        *([] if spent is None else spending_numbers(spent)),
    ]


def _print_operators(simulation: Simulation) -> None:
    """Parts of the model and the longest operators, of every class of ranks."""
    from sim.results.operator_times import time_by_operator, time_by_part
    from sim.views.part_names import part_name
    from sim.views.units import percent, seconds

    for of in time_by_part(simulation):
        print(f"\nParts of rank{'s' * (not of.ranks.isdigit())} {of.ranks}, share of the step")
        for part in of.parts:
            print(f"  {part_name(part):45}{seconds(part.seconds):>10} {percent(part.share):>8}")
    for ranks in time_by_operator(simulation):
        print(f"\nOperators of rank{'s' * (not ranks.ranks.isdigit())} {ranks.ranks}, share of the step")
        for row in ranks.operators[:OPERATORS_SHOWN]:
            print(f"  {row.operator:32}{row.phase:13}{seconds(row.seconds):>10} {percent(row.share):>8}")


def _no_training(path: Path, option: str) -> InputError:
    return InputError(f"{path}: {option}: is for training; this scenario serves requests")


def _serve(
    scenario: Scenario,
    json: str | None,
    html: Path | None,
    trace: Path | None,
    asked: _Asked,
    engine: Engine,
) -> bool:
    from sim.search.slo import parse_slo, share_within
    from sim.serve.simulation import simulate_serving

    promises = () if asked.slo is None else parse_slo(asked.slo)
    simulation = simulate_serving(scenario, engine=engine)
    within = share_within(simulation, promises) if promises else None
    if html is not None:
        write_page(html, _serving_page(simulation, promises, within))
    if trace is not None:
        _write_trace(simulation.timeline, simulation.memory, trace)
    price_per_gpu_hour = asked.price_per_gpu_hour
    spent = None
    if price_per_gpu_hour is not None:
        from sim.studies.spending import spending

        spent = spending(simulation.outcome, price_per_gpu_hour)
    if json is not None:
        whole = simulation.result | ({} if spent is None else {"spending": spent.to_json()})
        if promises:
            kept = [{"limit": p.text, "kept": p.kept(simulation.result)} for p in promises]
            whole |= {"slo": kept, "share_within_slo": within}
        write_json(json, whole, indent=1)
    if json != "-":
        from rich.console import Console

        from sim.views.serving_summary import print_serving

        print_serving(simulation.outcome, Console(), _numbers(None, spent), promises, within)
    return simulation.outcome.fits_in_memory


def _draw(path: Path, overrides: Sequence[str], target: Path) -> None:
    """Write the drawing of the cluster under a step's traffic."""
    from sim.inputs.scenario import load_scenario
    from sim.results.link_traffic import topology_drawing
    from sim.simulation import simulate

    scenario = load_scenario(path, overrides)
    if scenario.training is None:
        raise _no_training(path, "--topology")
    write_page(target, topology_drawing(simulate(scenario)))


def _plan_batch(
    path: Path, json: str | None, overrides: Sequence[str], critical: float | None, loss: float | None
) -> None:
    from sim.inputs.scenario import load_scenario
    from sim.studies.batch_plan import as_dict, batch_sizes, kaplan_critical_tokens, plan_batch, print_plan

    def load(more: list[str]) -> Scenario:
        return load_scenario(path, [*overrides, *more])

    if loss is not None and (training := load([]).training) is not None:
        critical = kaplan_critical_tokens(loss) / training.seq_len
    sizes = [] if critical is None else batch_sizes(load, critical)
    plan = as_dict(plan_batch(load), load([]), critical, sizes)
    if json is not None:
        write_json(json, plan, indent=1)
    if json != "-":
        print_plan(plan)


def _describe(key: str | None) -> None:
    """Print the JSON Schema, or what one key means."""
    if key is None:
        from sim.inputs.scenario import json_schema

        write_json("-", json_schema(), indent=1)
    else:
        from sim.inputs.explain import explain

        print(explain(key))


def _emit(path: Path, overrides: Sequence[str], trainer: str) -> None:
    """Print a trainer's flags."""
    from sim.emit import emit
    from sim.inputs.scenario import load_scenario

    print(emit(load_scenario(path, overrides), trainer))


def _write_chakra(path: Path, overrides: Sequence[str], prefix: Path) -> None:
    """Write the step as Chakra traces."""
    from sim.inputs.engine_options import EngineOptions
    from sim.inputs.scenario import load_scenario
    from sim.simulation import simulate
    from sim.traces.chakra_out import write_chakra

    scenario = load_scenario(path, overrides)
    if scenario.training is None:
        raise _no_training(path, "--chakra")
    whole = scenario.model_copy(update={"engine": EngineOptions()})  # ASTRA-sim makes messages of collectives itself
    write_chakra(simulate(whole, expand=True), prefix)


def _advice(
    simulation: Simulation, path: Path, overrides: Sequence[str], asked: bool | None, page: bool
) -> list[Tried] | None:
    """Changes that were tried and help; None where none were tried, as each takes as long as the step itself."""
    from sim.inputs.scenario import load_scenario
    from sim.studies.advice import BRIEF, FULL, QUICK_TASKS, may_advise, tried_advice

    quick = simulation.outcome.engine.tasks <= (3 if page else 1) * QUICK_TASKS
    if asked is False or (asked is None and not quick) or not may_advise(simulation.scenario):
        return None
    effort = FULL if page or asked else BRIEF
    return tried_advice(simulation, lambda changes: load_scenario(path, [*overrides, *changes]), effort)


def _serving_page(simulation: ServingSimulation, promises: Sequence[Promise], within: float | None) -> str:
    """The page of a serving workload."""
    from sim.serve.distributions import distributions
    from sim.serve.over_time import over_time
    from sim.views.serving_plots import serving_plots
    from sim.views.timeline_page import timeline_page

    plots = serving_plots(simulation.outcome, over_time(simulation), distributions(simulation), promises, within)
    return timeline_page(simulation.outcome, simulation.timeline, simulation.memory, served=plots)


def _page(simulation: Simulation, memory: list[MemoryCurve], advice: Sequence[Tried] | None = None) -> str:
    """The page of a step, with what spans are made of and waited for."""
    from sim.results.operator_times import runs_of_details, time_by_operator, time_by_part
    from sim.views.timeline_page import timeline_page

    whole = (simulation.outcome, simulation.timeline, memory, simulation.critical_rows)
    runs = runs_of_details(simulation, simulation.timeline.details)
    times = time_by_operator(simulation), time_by_part(simulation)
    return timeline_page(*whole, *times, simulation.waits, runs, advice)


def _write_views(
    simulation: Simulation,
    html: Path | None,
    trace: Path | None,
    steps: int,
    advice: Sequence[Tried] | None = None,
) -> None:
    memory = simulation.memory_over(steps)
    if html is not None:
        write_page(html, _page(simulation, memory, advice))
    if trace is not None:
        _write_trace(simulation.timeline, memory, trace)


def _write_trace(timeline: Timeline, memory: list[MemoryCurve], target: Path) -> None:
    import json

    from sim.views.trace import trace_events

    write_text(target, json.dumps(trace_events(timeline, memory)))
