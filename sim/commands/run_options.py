"""The options of `python -m sim.run`, as one record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.files_named import OUTPUT, FiniteRange, OutputSeries
from sim.commands.options import SECONDS, TOKENS, Report, engine_option, gathered, joined, json_option, overrides_option
from sim.core.errors import InputError

if TYPE_CHECKING:
    from sim.core.engines import Engine

RUNS = 200  # of --days
CHAKRA = OutputSeries(r"\.(\d+\.et|groups\.json)")


class RunOptions(Report, frozen=True, kw_only=True):
    """Hold the options that were given; each field is the option of its name, `overrides` is --set and `price` per GPU
    and hour."""

    trace: Path | None = None
    topology: Path | None = None
    steps: int = 1
    engine: Engine = "auto"
    chakra: Path | None = None
    emit: str | None = None
    explain: str | None = None
    plan_batch: bool = False
    critical_batch: float | None = None
    critical_loss: float | None = None
    days: float | None = None
    runs: int = RUNS
    advise: bool | None = None
    operators: bool = False
    require_fit: bool = False
    tokens: float | None = None
    price: float | None = None
    slo: str | None = None
    measured: float | None = None
    schema: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        """Overrides of the scenario that is simulated, those of options of their own included."""
        return self.overrides if self.tokens is None else (*self.overrides, f"training.tokens={self.tokens}")

    def given(self, *names: str) -> Iterator[str]:
        """Yield those of the options, named as fields are, that ask for something, as a user writes them.

        >>> list(RunOptions(days=7.0, plan_batch=True, advise=False).given("advise", "days", "plan_batch"))
        ['--days', '--plan-batch']
        """
        for name in names:
            value = getattr(self, name)
            if value is not False and value != getattr(_NOTHING, name):
                yield f"--{name.replace('_', '-')}"

    def refuse(self, words: str, *names: str, where: Path | None = None) -> None:
        """Raise for the first of the options that is given; `where`: the scenario that it does not suit."""
        for option in self.given(*names):
            raise InputError(f"{f'{where}: ' if where is not None else ''}{option}: {words}")


_NOTHING = RunOptions()

run_options = gathered(
    RunOptions,
    "options",
    json_option,
    click.option("--html", type=OUTPUT, metavar="FILE", help="write an interactive timeline that opens offline"),
    click.option("--trace", type=OUTPUT, metavar="FILE", help="write a Chrome/Perfetto trace"),
    click.option(
        "--topology", type=OUTPUT, metavar="FILE", help="write a page with the network and the load of each link"
    ),
    overrides_option,
    click.option("--steps", type=click.IntRange(1, 1000), default=1, help="number of steps in the memory plot"),
    engine_option,
    click.option("--chakra", type=CHAKRA, metavar="PREFIX", help="write Chakra traces PREFIX.RANK.et, for ASTRA-sim"),
    click.option(
        "--emit",
        metavar="TRAINER",
        help="print a config for torchtitan, torchtitan-python or megatron; of serving the command line of vllm, "
        "sglang, trtllm or dynamo",
    ),
    click.option("--explain", metavar="KEY", help="explain a key of scenarios; '' lists all sections"),
    click.option(
        "--plan-batch", is_flag=True, help="list divisions of the global batch into dp, micro-batches, accumulation"
    ),
    click.option(
        "--critical-batch",
        type=FiniteRange(1e-3),
        metavar="N",
        help="with --plan-batch: critical batch size in sequences",
    ),
    click.option(
        "--critical-loss",
        type=FiniteRange(0.01, 100.0),
        metavar="NATS",
        help="with --plan-batch: critical batch size at this loss, by Kaplan et al. 2020",
    ),
    click.option(
        "--days",
        type=FiniteRange(0, 36_500, min_open=True),
        metavar="DAYS",
        help="simulate DAYS days of failures and checkpoints (faults.failures)",
    ),
    click.option(
        "--runs", type=click.IntRange(1, 100_000), default=RUNS, help="number of simulated histories, with --days"
    ),
    click.option(
        "--advise/--no-advise",
        default=None,
        help="simulate changes that might shorten the step; by default only if quick",
    ),
    click.option(
        "--operators",
        is_flag=True,
        help="list the longest operators, and the collectives, of each class of equal ranks",
    ),
    click.option("--require-fit", is_flag=True, help="exit code 1 if the step does not fit in memory"),
    click.option(
        "--tokens",
        type=TOKENS,
        metavar="N",
        help="tokens of the whole training, such as 15T; adds steps, days, GPU hours",
    ),
    click.option(
        "--price", type=FiniteRange(0), metavar="PER_GPU_HOUR", help="price of a GPU hour; adds cost and energy"
    ),
    click.option(
        "--slo",
        multiple=True,
        callback=joined,
        metavar="LIMITS",
        help="serving: limits of latencies in seconds, such as ttft_p99=0.25,tpot_p99=0.035",
    ),
    click.option(
        "--measured",
        type=SECONDS,
        metavar="TIME",
        help="measured step time of SCENARIO without --set, such as 350ms; scales the simulated change by --set",
    ),
    click.option("--schema", is_flag=True, help="print a scenario's JSON Schema, for editors"),
)
