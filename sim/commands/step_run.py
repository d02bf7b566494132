"""`python -m sim.run` of a training step: simulate the step, and what the options ask besides, and show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sim.commands.options import write_page, write_trace
from sim.commands.run_options import RunOptions
from sim.core.errors import InputError
from sim.core.files import write_json

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.results.memory import MemoryCurve
    from sim.simulation import Simulation
    from sim.studies.advice import Tried
    from sim.studies.anchor import Anchor
    from sim.studies.goodput import Goodput
    from sim.studies.spending import Spending
    from sim.views.headline import Number

OPERATORS_SHOWN = 15  # of each class of ranks; --json has all


def run_step(scenario: Scenario, path: Path, options: RunOptions) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.simulation import simulate

    _refuse(scenario, path, options)
    engine = options.engine
    if engine == "static" and scenario.processes is not None:
        raise InputError(f"{path}: --engine static: the scenario's processes need SimPy's clock (auto or simpy)")
    simulation = simulate(scenario, engine=engine)
    asked = _asked(simulation, path, options)  # may be refused: before any file is written
    if options.chakra is not None:
        _write_chakra(scenario, options.chakra)
    if options.topology is not None:
        from sim.views.link_traffic import topology_drawing

        write_page(options.topology, topology_drawing(simulation))
    advice = _advice(simulation, path, options)
    numbers = _numbers(simulation, asked)
    if options.html is not None or options.trace is not None:
        expanded = simulation.by_operator(engine)
        memory = expanded.memory_over(options.steps)
        if options.html is not None:
            write_page(options.html, page_of(expanded, memory, advice, asked.goodput, numbers))
        if options.trace is not None:
            write_trace(options.trace, expanded.timeline, memory)
    _show(simulation, asked, numbers, advice, options)
    return simulation.outcome.fits_in_memory


def _refuse(scenario: Scenario, path: Path, options: RunOptions) -> None:
    """Refuse what would be dropped in silence."""
    if options.slo is not None:
        raise InputError(f"{path}: --slo: is for serving; this scenario trains")
    if options.html is None and options.trace is None:
        options.refuse("can be given with --html or --trace only", "steps")
    if options.advise:
        from sim.studies.advice import may_advise

        if not may_advise(scenario):
            section = "distillation" if scenario.distillation is not None else "processes"
            raise InputError(f"{path}: --advise: compares steps by their time alone; this scenario has {section}")


class _Asked(NamedTuple):
    """Hold the options that concern a step; None for those that were not given."""

    goodput: Goodput | None
    measured: Anchor | None
    spending: Spending | None


def _asked(simulation: Simulation, path: Path, options: RunOptions) -> _Asked:
    weeks, anchored, spent = None, None, None
    if options.days is not None:
        from sim.studies.goodput import goodput

        weeks = goodput(simulation.scenario, simulation.step_time_s, options.days, options.runs)
    if options.measured is not None:
        from sim.inputs.scenario import load_scenario
        from sim.simulation import simulate
        from sim.studies.anchor import anchor

        # What was measured is the file as it is; what --set then changes is what is asked for.
        ran = simulate(load_scenario(path), engine=options.engine) if options.overrides else simulation
        anchored = anchor(options.measured, ran.outcome, simulation.outcome)
    if options.price is not None:
        from sim.studies.spending import spending

        useful = 1.0 if weeks is None else weeks.effective_training_time.mean
        spent = spending(simulation.outcome, options.price, useful)
    return _Asked(weeks, anchored, spent)


def _numbers(simulation: Simulation, asked: _Asked) -> list[Number]:
    """Numbers that the options add to the headline."""
    from sim.views.headline import anchor_numbers, goodput_numbers, spending_numbers

    length = goodput_numbers(simulation.outcome.training_run, asked.goodput)
    return [*anchor_numbers(asked.measured), *length, *spending_numbers(asked.spending)]


def _show(
    simulation: Simulation,
    asked: _Asked,
    numbers: Sequence[Number],
    advice: Sequence[Tried] | None,
    options: RunOptions,
) -> None:
    if options.json is not None:
        written: dict[str, object] = {k: v.to_json() for k, v in asked._asdict().items() if v is not None}
        if advice is not None:
            written["advice"] = [tried.to_json() for tried in advice]
        write_json(options.json, simulation.result | written, indent=1)
    if options.json == "-":
        return
    from sim.studies.advice import may_advise
    from sim.views.summary import print_summary
    from sim.views.terminal import standard_output

    print_summary(simulation.outcome, standard_output(), asked.goodput, numbers, advice or ())
    untried = advice is None and options.advise is None and may_advise(simulation.scenario)
    if untried:
        aim = "shorten it" if simulation.fits_in_memory else "make it fit"
        standard_output().print(f"--advise simulates changes that might {aim}")
    if options.operators:
        _print_operators(simulation)
        _print_collectives(simulation)


def _print_operators(simulation: Simulation) -> None:
    """Parts of the model and the longest operators, of every class of ranks."""
    from sim.core.units import percent, seconds
    from sim.results.losses import operators_whole
    from sim.results.operator_times import time_by_operator, time_by_part
    from sim.views.part_names import part_name
    from sim.views.terminal import plain_table, standard_output

    terminal, whole = standard_output(), operators_whole(simulation.outcome)
    for of in time_by_part(simulation):
        rows = [(part_name(part), seconds(part.seconds), percent(part.share)) for part in of.parts]
        terminal.print()
        terminal.print_table(plain_table((f"parts of {_named(of.ranks)}", "time", f"of {whole}"), rows))
    for ranks in time_by_operator(simulation):
        shown = ranks.operators[:OPERATORS_SHOWN]
        times = [(row.operator, row.phase, seconds(row.seconds), percent(row.share)) for row in shown]
        heads = (f"operators of {_named(ranks.ranks)}", "phase", "time", f"of {whole}")
        terminal.print()
        terminal.print_table(plain_table(heads, times, words=2))


def _print_collectives(simulation: Simulation) -> None:
    """Bytes that a rank of each class hands to collectives and sends to other stages, and how fast they go."""
    from sim.core.units import n_bytes, rate, seconds
    from sim.results.operator_times import time_by_operator
    from sim.views.terminal import plain_table, standard_output
    from topology.collective_kinds import KINDS, bus_factor

    rows = []
    for ranks in time_by_operator(simulation):
        taken_s: dict[str, float] = {}
        for row in ranks.operators:
            taken_s[row.operator] = taken_s.get(row.operator, 0.0) + row.seconds
        for c in (c for c in simulation.outcome.communication if c.rank == ranks.rank):
            time_s, speed = taken_s.get(f"{c.group} {c.kind}", 0.0), ""
            members = simulation.plan.group_sizes.get(c.group)
            if time_s and members and c.kind in KINDS:
                speed = rate(bus_factor(c.kind, members) * c.bytes / time_s, "B/s")
            taken = seconds(time_s) if time_s else ""
            rows.append((_named(ranks.ranks), c.group, c.kind.replace("_", "-"), n_bytes(c.bytes), taken, speed))
    if not rows:
        return
    terminal = standard_output()
    terminal.print()
    heads = ("ranks", "group", "collective", "bytes in a step", "time", "bus bandwidth")
    terminal.print_table(plain_table(heads, rows, words=3, gap=2))


def _named(ranks: str) -> str:
    return f"rank{'s' * (not ranks.isdigit())} {ranks}"


def _write_chakra(scenario: Scenario, prefix: Path) -> None:
    """Write the step as Chakra traces."""
    from sim.inputs.engine_options import EngineOptions
    from sim.simulation import simulate
    from sim.traces.chakra_out import write_chakra

    whole = scenario.unchecked_copy(
        update={"engine": EngineOptions()}
    )  # ASTRA-sim makes messages of collectives itself
    write_chakra(simulate(whole, expand=True), prefix)


def _advice(simulation: Simulation, path: Path, options: RunOptions) -> list[Tried] | None:
    """Changes that were tried and help; None where none were tried, as each takes as long as the step itself."""
    from sim.inputs.overrides import with_overrides
    from sim.inputs.scenario import name_of, read_source, resolve
    from sim.studies.advice import BRIEF, FULL, QUICK_TASKS, may_advise, tried_advice

    asked, page = options.advise, options.html is not None
    quick = simulation.outcome.engine.tasks <= (3 if page else 1) * QUICK_TASKS
    if asked is False or (asked is None and not quick) or not may_advise(simulation.scenario):
        return None
    effort = FULL if page or asked else BRIEF
    source = read_source(path, options.changes)  # the file is parsed once for all that is tried
    return tried_advice(simulation, lambda changes: resolve(with_overrides(source, changes), name_of(path)), effort)


def page_of(
    simulation: Simulation,
    memory: list[MemoryCurve],
    advice: Sequence[Tried] | None = None,
    weeks: Goodput | None = None,
    more: Sequence[Number] = (),
) -> str:
    """The page of a step, with what spans are made of and waited for; `more` are numbers that follow the headline."""
    from sim.results.operator_times import runs_of_details, time_by_operator, time_by_part
    from sim.views.timeline_page import StepDetails, timeline_page

    details = StepDetails(
        operators=time_by_operator(simulation),
        model_parts=time_by_part(simulation),
        waits=simulation.waits,
        runs=runs_of_details(simulation, simulation.timeline.details),
        advice=advice,
        weeks=weeks,
    )
    rows = simulation.critical_rows
    return timeline_page(simulation.outcome, simulation.timeline, memory, rows, details, more=more)
