"""Make the schedule of a scenario, and the stage times for schedules that are searched."""

from __future__ import annotations

from functools import partial

import numpy as np

from sim.core.actions import Kind, Schedule
from sim.core.errors import InputError
from sim.core.units import counted
from sim.graph.compiled import ProgramCache
from sim.inputs.scenario import Scenario
from sim.prices.rank_prices import Pricing
from sim.programs.compile import compile_program
from sim.programs.data_parallel import DataParallel
from sim.programs.stages import class_stages, stage_input_bytes
from sim.ranks.plan import Plan
from sim.schedules.unit_time import UnitTimes

MOST_ACTIONS = 5_000_000  # actions of a pipeline: some 15 seconds and 5 GB


def make_schedule(scenario: Scenario, plan: Plan, pricing: Pricing, dp: DataParallel, cache: ProgramCache) -> Schedule:
    """Return the action lists of the scenario's schedule. `cache`: see `simulation.prepare`.

    Raises:
        InputError: if the schedule cannot run this many micro-batches.
    """
    p, m = scenario.parallelism, scenario.micro_batches
    if (actions := 2 * p.stages * m) > MOST_ACTIONS:
        size = f"{counted(m, 'micro-batch')} through {counted(p.stages, 'stage')}"
        raise scenario.error(
            ("training", "global_batch_size"),
            f"{size} make {actions:,} forwards and backwards to simulate; at most {MOST_ACTIONS:,} (they repeat long "
            "before)",
        )
    times = None
    if p.form.follows_times:
        times = unit_times(plan, p.form.fewest(p.pp, p.virtual_stages), pricing, dp, cache)
    try:
        return p.form.build(p.pp, m, p.virtual_stages, times, p.schedule_memory)
    except ValueError as error:
        sizes = f"(global_batch_size / (micro_batch_size * dp) = {counted(m, 'micro-batch')}, pp = {p.pp})"
        raise scenario.error(("parallelism", "schedule"), f"{error} {sizes}") from None


def unit_times(plan: Plan, layout: Schedule, pricing: Pricing, dp: DataParallel, cache: ProgramCache) -> UnitTimes:
    """Return the seconds of F, I and W of every stage, and of a message from stage 0 to stage 1, to search a schedule.

    `cache`: see `simulation.prepare`; the step runs the same programs.
    """
    healthy, rows = pricing.healthy, []
    if healthy is not pricing:  # programs that were compiled with faults have other seconds
        cache = ProgramCache(cache.stages)
    held = class_stages(plan, layout, pricing.costs_of, dp, False, cache.stages)
    stages = [stage for of_class in held for stage in of_class.values()]
    known: dict[tuple[object, ...], list[float]] = {}
    for stage, c in zip(stages, plan.classes, strict=True):
        price, context = healthy.on(c.rank), healthy.context(c.rank)
        key = (context, stage)
        if key not in known:
            known[key] = []
            for kind in (Kind.F, Kind.I, Kind.W):
                # An action between the first and the last of its stage, because a schedule repeats it most often.
                program = stage.forward(False, True) if kind is Kind.F else stage.backward(kind, False, True)
                make = partial(compile_program, program, price)
                # The key is that of `ActionPrograms.compiled`, so that the step finds these programs compiled.
                found = cache.compiled((context, (stage, kind)), [program], make)
                known[key].append(found.makespan_s)
        rows.append(known[key])
    # A pipeline rank is as fast as its slowest pipeline, because its pipelines meet in collectives.
    slowest = np.array(rows).reshape(-1, plan.pipelines, 3).max(axis=1)
    forward, inputs, weights = (tuple(column) for column in slowest.T.tolist())
    first, second = (plan.classes[i * plan.pipelines : (i + 1) * plan.pipelines] for i in (0, 1))
    # The search of a schedule takes all messages as equal: as the slowest of the first hop, stage 0 to stage 1.
    size = stage_input_bytes(plan, 1)
    message_s = max(pricing.healthy.send(a.rank, b.rank, size).seconds for a, b in zip(first, second, strict=True))
    apart = plan.scenario.for_training.optimizer_post_validation
    return UnitTimes(forward, inputs, weights, message_s, apart=apart)


def needs_overlap(scenario: Scenario) -> InputError:
    """Return the error of a schedule whose ranks wait for each other in a circle if messages block them."""
    needs = f"found false; schedule {scenario.parallelism.schedule} needs overlapped messages (true)"
    return scenario.error(("parallelism", "p2p_overlap"), f"{needs}: with blocking ones its ranks wait for each other")
