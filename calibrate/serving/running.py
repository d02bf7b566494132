"""Measure an engine that runs elsewhere, and find the host seconds with which it is simulated.

    python -m calibrate.serving SCENARIO.yaml --url http://localhost:8000 --out engine.json

SCENARIO says what the server runs: model, GPUs, layout, and in `inference.engine` the record whose rules and limits
apply. Its profile prices the GPU's part of every iteration; `FREE` are the constants of the rest. They are fitted to
loads of several concurrencies and prompt lengths by the rule of `calibrate.serving.host_fit`, and written to a file
that `inference.engine` takes (`sim.inputs.engine_file`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date as today
from pathlib import Path
from typing import Any

import click
import numpy as np

from calibrate.serving.endpoint import endpoint_at
from calibrate.serving.host_fit import Values, deviation, every_second, solve, spread_words, tried
from calibrate.serving.loads import QUANTITIES, Measured, loads, measure
from sim.commands.command import Command, interrupted_code
from sim.commands.files_named import OUTPUT, check_output
from sim.commands.options import scenario_argument
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.inputs.engine_file import FORMAT, engine_of, served_now
from sim.inputs.scenario import Scenario, load_scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from sim.variants.engines.record import Engine

FREE = {"iteration_s": 1e-3, "sequence_s": 5e-5, "prompt_s": 1e-3, "request_s": 1e-3}  # and where the fit starts
MOST_AT_ONCE, MOST_PROMPT = 1024, 1_000_000
NOTHING = 1e-2  # of where the fit starts: who is left less takes no time
MOST_STEPS = 30  # of the fit: a load is simulated in a hundredth of a second


def numbers(option: str, value: str, most: int, such_as: str) -> tuple[int, ...]:
    """Different whole numbers from 1 to `most`, separated by commas, in rising order.

    Raises:
        InputError: for anything else.
    """
    try:
        found = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1 or found[-1] > most:
        raise InputError(f"{option}: found {value[:40]!r}; must be whole numbers from 1 to {most}, such as {such_as}")
    return found


@click.command("running-engine", cls=Command)
@scenario_argument
@click.option("--url", required=True, metavar="URL", help="the server's address, such as http://localhost:8000")
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    default="",
    show_default=False,
    metavar="KEY",
    help="by default the value of the environment variable OPENAI_API_KEY",
)
@click.option("--model", metavar="NAME", help="the server's name of the model; by default the first that it lists")
@click.option("--concurrency", metavar="N,…", default="1,8,32", help="requests at once, and on average")
@click.option("--prompt-len", metavar="N,…", default="128,1024", help="tokens of a prompt")
@click.option("--output-len", type=click.IntRange(2, 100_000), default=64, help="tokens of an answer")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, help="how often each load is sent")
@click.option("--judge", is_flag=True, help="fit nothing: compare with the scenario's own inference.engine")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key of the scenario")
@click.option("--out", type=OUTPUT, metavar="FILE", help="write the engine there, for inference.engine")
def main(
    scenario: Path,
    url: str,
    api_key: str,
    model: str | None,
    concurrency: str,
    prompt_len: str,
    output_len: int,
    rounds: int,
    judge: bool,
    overrides: Sequence[str],
    out: Path | None,
) -> int:
    """Send requests to the engine at --url, which serves SCENARIO's model, and fit the host seconds of its record.

    Ctrl-C ends the measuring: what was measured is shown, and fitted if every load was sent once. Exit code 130.
    """
    at_once = numbers("--concurrency", concurrency, MOST_AT_ONCE, "1,8,32")
    prompt_lens = numbers("--prompt-len", prompt_len, MOST_PROMPT, "128,1024")
    served = load_scenario(scenario, overrides)
    profile = load_profile(served.calibration)
    _check(served, judge, out)
    if not judge and len(at_once) < 2:
        raise InputError(f"--concurrency: found {at_once[0]}; a fit needs two or more, such as 1,8,32")
    check_output("--out", out)
    wanted = loads(prompt_lens, output_len, at_once)
    for load in wanted:  # what cannot be simulated is said before it is measured
        if not simulate_serving(served, profile, load.requests(latency_s=1.0)).result["fits_in_memory"]:
            raise InputError(f"{served.name}: does not fit in memory with a prompt of {load.prompt_len} tokens")
    endpoint = endpoint_at(url, api_key).named(model)
    rows, whole = measure(endpoint, wanted, served.model.vocab, rounds, lambda text: print(text, flush=True))
    if not whole:
        print(f"interrupted: {len(rows)} of {len(wanted)} loads were measured", file=sys.stderr)
    if judge or len(rows) < len(wanted):
        _judge(served, profile, rows)
        if not judge:
            print("nothing is fitted or written: a fit needs all loads", file=sys.stderr)
    else:
        _fit_and_write(served, profile, rows, f"{endpoint.url}, model {endpoint.model}", out)
    return 0 if whole else interrupted_code()


def _judge(scenario: Scenario, profile: Profile, rows: Sequence[Measured]) -> None:
    """Show the loads that were measured beside the scenario's own engine."""
    if rows:
        print(f"\nsimulated with engine {scenario.for_serving.engine}:")
        _print_rows(scenario, profile, rows, ())
        print(f"errors: {spread_words(errors(scenario, profile, rows))}")


def _fit_and_write(
    scenario: Scenario, profile: Profile, rows: Sequence[Measured], server: str, out: Path | None
) -> None:
    """Fit the host seconds to every second load, show the errors on all, and write the engine."""
    fitted, others = every_second(rows)
    record = fit(scenario, profile, fitted)
    with tried(record):
        found, left = (errors(scenario, profile, part) for part in (fitted, others))
        _print_rows(scenario, profile, rows, fitted)
        written = _file(scenario, record, deviation(left), server, rows)
    print(", ".join(f"{key} {written['host'][key]:.3g}" for key in FREE))
    print(f"fitted loads: {spread_words(found)}\nothers:       {spread_words(left)}")
    if why := nothing_left(record, found):
        print(why, file=sys.stderr)
    if out is not None:
        write_json(out, written, indent=1)
        print(f"use it with --set inference.engine={out}")


def errors(scenario: Scenario, profile: Profile, rows: Sequence[Measured]) -> Values:
    """Log(predicted ÷ measured) of all quantities of these loads."""
    pairs = [(row.predicted(scenario, profile), row.seconds) for row in rows]
    return np.array([np.log(predicted[key] / measured[key]) for predicted, measured in pairs for key in QUANTITIES])


def fit(scenario: Scenario, profile: Profile, rows: Sequence[Measured]) -> Engine:
    """The scenario's engine with host seconds fitted to these loads."""
    engine = engine_of(scenario.for_serving.engine)

    def errors_with(values: Values) -> Values:
        with tried(_with(engine, scenario, values)):
            return errors(scenario, profile, rows)

    return _with(engine, scenario, solve(FREE, errors_with, MOST_STEPS))


def nothing_left(record: Engine, found: Values) -> str:
    """A sentence where no host time is fitted to iterations because the profile alone takes more than was measured."""
    times, more = record.host_on("measured")._asdict(), float(np.exp(found.mean())) - 1
    if more <= 0 or any(times[key] > NOTHING * FREE[key] for key in ("iteration_s", "sequence_s")):
        return ""
    return (
        "no time is left for the host between iterations: by the profile's operators alone these loads take "
        f"{more:.0%} longer than measured. The profile is of slower kernels than this engine's"
    )


def _with(engine: Engine, scenario: Scenario, values: Values) -> Engine:
    """The record with these constants; `iteration_s` has what tensor-parallel ranks add, for one layout is measured."""
    times = engine.host_on(scenario.cluster.gpu.architecture)._replace(rank_s=0.0)
    return replace(engine, host={"measured": times._replace(**dict(zip(FREE, values.tolist(), strict=True)))})


def _check(scenario: Scenario, judge: bool, out: Path | None) -> None:
    """Refuse what no server does, or what cannot be fitted."""
    inference = scenario.for_serving
    if inference.batching == "static":
        raise scenario.error(("inference", "batching"), "found static; a server batches continuously")
    if judge and out is not None:
        raise InputError("--out: --judge fits nothing that could be written")
    if not judge and inference.engine not in ENGINES:
        why = f"is a measured one; name the record to start from ({', '.join(ENGINES)}), or give --judge"
        raise scenario.error(("inference", "engine"), f"{inference.engine} {why}")


def _file(
    scenario: Scenario, record: Engine, uncertainty: float, server: str, rows: Sequence[Measured]
) -> dict[str, Any]:
    """What is written: the record's name, the host's seconds, where they come from."""
    times = record.host_on("measured")._replace(uncertainty=round(uncertainty, 4))
    host = {key: float(f"{seconds:.4g}") for key, seconds in times._asdict().items() if seconds}
    gpu, p = scenario.cluster.gpu.name, scenario.parallelism
    layout = "" if p.ranks == 1 else f" of {p.ranks} (tp {p.tp}, pp {p.pp}, dp {p.dp}, ep {p.ep})"
    where = f"{server}; {scenario.name}, GPU {gpu}{layout}, calibration {Path(scenario.calibration).name}"
    return {
        "format": FORMAT,
        "engine": record.name,
        "host": dict.fromkeys(FREE, 0.0) | host,
        "source": f"calibrate.serving at {where}",
        "date": today.today().isoformat(),
        "served": served_now(scenario.model, gpu, p.tp, scenario.for_serving.quantization).model_dump(),
        "measured": [_row(row) for row in rows],
    }


def _row(row: Measured) -> dict[str, Any]:
    load = row.load
    arrival = {"at_once": load.concurrency} if not load.paced else {"rate_per_s": _rate(row)}
    sizes = {"prompt_len": load.prompt_len, "output_len": load.output_len, "count": len(row.requests)}
    return {**sizes, **arrival, **{key: float(f"{s:.5g}") for key, s in row.seconds.items()}}


def _rate(row: Measured) -> float:
    return float(f"{len(row.requests) / row.requests[-1].arrival_s:.4g}")


def _print_rows(scenario: Scenario, profile: Profile, rows: Sequence[Measured], fitted: Sequence[Measured]) -> None:
    """Measured milliseconds, and by how much the simulation differs."""
    head = ("first token", "a token", "latency")
    print(f"{'prompt':>6} {'requests':>15}" + "".join(f" {h + ', ms':>18}" for h in head))
    for row in rows:
        predicted = row.predicted(scenario, profile)
        cells = [f"{row.seconds[k] * 1e3:10.4g} {predicted[k] / row.seconds[k] - 1:+7.1%}" for k in QUANTITIES]
        mark = "  fitted" if any(row is f for f in fitted) else ""
        print(f"{row.load.prompt_len:6} {row.load.words:>15} " + " ".join(cells) + mark)
