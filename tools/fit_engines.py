"""Fits host seconds of serving engines to every second row of published tables, and prints the errors on the others.

    python tools/fit_engines.py            # all engines; takes minutes, most of them for trtllm
    python tools/fit_engines.py vllm-0.2
    python tools/fit_engines.py --judge    # no fit: the errors of the records as they stand

The constants go into sim/serve/engines.py. The deviation on the rows that were not fitted goes there as their
uncertainty. The rule is that of `calibrate.serving.host_fit` for all engines, over rows sorted by id. Constants named
in `Fit.start` are free, and all others keep the record's values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from calibrate.serving.host_fit import Values, every_second, solve, spread_words, tried
from sim.serve.costs import iteration_costs
from sim.serve.engine_record import Engine
from sim.serve.engines import ENGINES
from sim.serve.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.validation.prediction import cluster_of, profile_named
from sim.validation.records import Measurement
from sim.validation.serving_rows import serving_scenario, value_of
from sim.validation.tables import read_table

PUBLISHED = Path(__file__).parent.parent / "scenarios" / "published"


@dataclass(frozen=True)
class Fit:
    """Which constants of which record are fitted to which rows.

    `whole`: all requests arrive at once, so prices do not change what an iteration computes. Then each row is scheduled
    once, and only its iterations are priced again.
    """

    engine: str
    table: str
    architecture: str
    start: dict[str, float]
    whole: bool = False


VLLM = {"iteration_s": 5e-3, "rank_s": 1e-3, "sequence_s": 2e-4, "prompt_s": 1e-2, "oversize_s": 5e-6, "launch_s": 2e-5}
FITS = (
    Fit("vllm-0.2", "splitwise_llama2_70b", "ampere", VLLM),
    Fit("vllm-0.2", "splitwise_llama2_70b", "hopper", VLLM),
    Fit("trtllm-0.6", "trtllm_static_h100", "hopper", {"launch_s": 1e-5}),
    Fit(
        "trtllm-triton",
        "trtllm_014_online",
        "hopper",
        {"iteration_s": 3.6e-4, "sequence_s": 1.6e-5, "prompt_s": 5.8e-3, "request_s": 1.1e-3},
    ),
    Fit("trtllm", "trtllm_017_throughput", "ampere", {"collective_s": 5e-5, "sequence_s": 2e-6}, whole=True),
    Fit(
        "trtllm",
        "trtllm_017_throughput",
        "hopper",
        {"collective_s": 2e-5, "sequence_s": 2e-6, "experts_speed": 0.8},
        whole=True,
    ),
)
FITTED = sorted({fit.engine for fit in FITS})


def halves(fit: Fit, rows: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Return those of `rows` that are fitted, and the others of the same table and architecture."""
    mine = [r for r in sorted(rows, key=lambda r: r.id) if r.table == fit.table]
    return every_second([r for r in mine if cluster_of(r).gpu.architecture == fit.architecture])


def changed(engine: Engine, architecture: str, names: list[str], values: Values) -> Engine:
    """Return the record with the named constants replaced."""
    given = dict(zip(names, values.tolist(), strict=True))
    speed = given.pop("experts_speed", engine.experts_speed)
    times = engine.host_on(architecture)._replace(**given)
    return replace(engine, experts_speed=speed, host={**engine.host, architecture: times})


def errors(fit: Fit, rows: list[Measurement], values: Values) -> Values:
    """Return log(predicted ÷ measured) of all measured quantities of `rows` with these constants."""
    with tried(changed(ENGINES[fit.engine], fit.architecture, list(fit.start), values)):
        if fit.whole:
            return np.array([np.log(_rate(row) / row.measured["output_tokens_per_s_per_gpu"]) for row in rows])
        found = [(_simulated(row).result, row) for row in rows]
    return np.array([np.log(value_of(r, row, key) / row.measured[key]) for r, row in found for key in row.measured])


def _simulated(row: Measurement) -> ServingSimulation:
    scenario = serving_scenario(row, row.scenario)
    return simulate_serving(scenario, profile_named(scenario.calibration))


@cache
def _iterations(table: str, row_id: str) -> tuple[Any, ...]:
    """Return what every iteration of a row computes, and how often."""
    row = next(r for r in read_table(PUBLISHED / f"{table}.json").rows if r.id == row_id)
    return tuple((i.load, i.steps) for r in _simulated(row).replicas for i in r.iterations)


def _rate(row: Measurement) -> float:
    """Return output tokens/s of each GPU, pricing the iterations of the row's schedule with the present records."""
    s = serving_scenario(row, row.scenario)
    costs = iteration_costs(s, profile_named(s.calibration))
    seconds = 0.0
    for load, steps in _iterations(row.table, row.id):
        each = sum(costs.decode_run(load.decodes, load.decode_kv, steps)) if steps > 1 else costs.stage_seconds(load)[0]
        seconds += each
    requests: Any = s.for_serving.requests
    return float(requests.count * requests.output_len / seconds / s.parallelism.ranks)


def recorded(fit: Fit) -> Values:
    """The constants as the record has them; none is 0, whose logarithm the fit could not take."""
    engine = ENGINES[fit.engine]
    times = {**engine.host_on(fit.architecture)._asdict(), "experts_speed": engine.experts_speed}
    return np.array([times[name] or 1e-12 for name in fit.start])


def main() -> None:
    """Fit the named engines, or all, and print constants and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(FITTED)}; all if none is named")
    parser.add_argument("--judge", action="store_true", help="do not fit")
    given = parser.parse_args()
    if unknown := set(given.engines) - set(FITTED):
        parser.error(f"no engine is called {', '.join(sorted(unknown))}; allowed: {', '.join(FITTED)}")
    for fit in FITS:
        if given.engines and fit.engine not in given.engines:
            continue
        fitted, others = halves(fit, read_table(PUBLISHED / f"{fit.table}.json").rows)
        steps = 4 if fit.whole else 12
        values = recorded(fit) if given.judge else solve(fit.start, partial(errors, fit, fitted), steps)
        print(f"{fit.engine}, {fit.architecture}, {fit.table}: {len(fitted)} of {len(fitted + others)} rows fitted")
        print("  " + ", ".join(f"{name} {value:.3g}" for name, value in zip(fit.start, values, strict=True)))
        for name, rows in (("fitted", fitted), ("others", others)):
            found = errors(fit, rows, values)
            print(f"  {name}: {spread_words(found)} of {len(found)} values", flush=True)


if __name__ == "__main__":
    main()
