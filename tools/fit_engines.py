"""Fits host seconds of serving engines to every second row of published tables, and prints the errors on the others.

    python tools/fit_engines.py            # all engines; takes minutes, most of them for trtllm-triton and vllm-0.2
    python tools/fit_engines.py vllm-0.2
    python tools/fit_engines.py --judge    # no fit: the errors of the records as they stand

The constants go into sim/variants/engines/hosts.py. The deviation on the rows that were not fitted goes there as their
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

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from calibrate.serving.host_fit import Values, every_second, solve, spread_words, tried
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.host import Host
from sim.serve.prices.load import Load
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.validation.prediction import cluster_of, profile_named
from sim.validation.records import Measurement
from sim.validation.serving_rows import serving_scenario, value_of
from sim.validation.tables import read_table
from sim.variants.engines import ENGINES
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.record import Engine

PUBLISHED = Path(__file__).parent.parent / "scenarios" / "published"


@dataclass(frozen=True)
class Fit:
    """Which constants of which record are fitted to which rows.

    `whole`: all requests arrive at once, so prices do not change what an iteration computes. Then each row is scheduled
    once, and its iterations are priced three times: what the GPU takes is linear in `linear`.
    """

    engine: str
    table: str
    architecture: str
    start: dict[str, float]
    whole: bool = False


KERNELS = ("experts_speed", "group_reads")  # facts of an engine that are no seconds of its host
VLLM = {"iteration_s": 5e-3, "rank_s": 1e-3, "sequence_s": 2e-4, "prompt_s": 1e-2, "oversize_s": 5e-6, "launch_s": 2e-5}
FITS = (
    Fit("vllm-0.2", "splitwise_llama2_70b", "ampere", VLLM),
    Fit("vllm-0.2", "splitwise_llama2_70b", "hopper", VLLM),
    Fit("trtllm-0.6", "trtllm_static_h100", "hopper", {"launch_s": 1e-5, "group_reads": 0.8}),
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
    facts = {name: given.pop(name) for name in KERNELS if name in given}
    times = engine.host_on(architecture)._replace(**given)
    return replace(engine, **facts, host={**engine.host, architecture: times})


def errors(fit: Fit, rows: list[Measurement], values: Values) -> Values:
    """Return log(predicted ÷ measured) of all measured quantities of `rows` with these constants."""
    with tried(changed(ENGINES[fit.engine], fit.architecture, list(fit.start), values)):
        if fit.whole:
            return np.array([np.log(_rate(fit, row) / row.measured["output_tokens_per_s_per_gpu"]) for row in rows])
        found = [(_simulated(row).result, row) for row in rows]
    return np.array([np.log(value_of(r, row, key) / row.measured[key]) for r, row in found for key in row.measured])


def _simulated(row: Measurement) -> ServingSimulation:
    scenario = serving_scenario(row, row.scenario)
    return simulate_serving(scenario, profile_named(scenario.calibration))


@dataclass(frozen=True)
class Priced:
    """A row's iterations and how often each runs, the GPU's seconds of every one of them without `linear` (each 0), and
    what a unit of each constant adds."""

    host: Host
    tokens: float
    iterations: tuple[tuple[Load, int], ...]
    device_s: Values
    slopes: tuple[Values, ...]


def linear(record: Engine, architecture: str) -> tuple[float, float]:
    """Return the terms that the GPU's seconds are linear in: an all-reduce's added time, 1 / the experts' speed."""
    return record.host_on(architecture).collective_s, 1 / record.experts_speed


@cache
def _priced(fit_engine: str, architecture: str, table: str, row_id: str) -> Priced:
    row = next(r for r in read_table(PUBLISHED / f"{table}.json").rows if r.id == row_id)
    s, record = serving_scenario(row, row.scenario), ENGINES[fit_engine]
    iterations = tuple((i.load, i.steps) for r in _simulated(row).replicas for i in r.iterations)

    def device_s(collective_s: float, speed: float) -> Values:
        bare = replace(record, experts_speed=speed, host={architecture: HostTimes(collective_s=collective_s)})
        with tried(bare):
            costs = iteration_costs(s, profile_named(s.calibration))
        each = [
            costs.decode_run(i.decodes, i.decode_kv, n) if n > 1 else [costs.stage_seconds(i)[0]] for i, n in iterations
        ]
        return np.concatenate(each)

    wait_s, slow = 1e-5, 2.0
    usual = device_s(0.0, 1.0)
    slopes = (device_s(wait_s, 1.0) - usual) / wait_s, (device_s(0.0, 1 / slow) - usual) / (slow - 1.0)
    requests: Any = s.for_serving.requests
    host = iteration_costs(s, profile_named(s.calibration)).host
    tokens = requests.count * requests.output_len / s.parallelism.ranks
    return Priced(host, tokens, iterations, usual - slopes[1], slopes)


def _rate(fit: Fit, row: Measurement) -> float:
    """Output tokens/s of each GPU with the present record, of the row's own schedule."""
    p, record = _priced(fit.engine, fit.architecture, row.table, row.id), ENGINES[fit.engine]
    device_s = (
        p.device_s + sum(x * s for x, s in zip(linear(record, fit.architecture), p.slopes, strict=True))
    ).tolist()
    host, seconds, at = msgspec.structs.replace(p.host, times=record.host_on(fit.architecture)), 0.0, 0
    for load, steps in p.iterations:
        own = host.seconds_each(0, device_s[at : at + steps], load)
        seconds, at = seconds + sum(own), at + steps
    return p.tokens / seconds


def recorded(fit: Fit) -> Values:
    """The constants as the record has them; none is 0, whose logarithm the fit could not take."""
    engine = ENGINES[fit.engine]
    times = engine.host_on(fit.architecture)._asdict() | {name: getattr(engine, name) for name in KERNELS}
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
