"""The best measured run of each model and number of GPUs of a published table, beside the simulation of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.results.records import Record
from sim.simulation import simulate
from sim.validation.records import Measurement
from sim.validation.tables import read_table

RATE = "tokens_per_s_per_gpu"


class MeasuredBest(Record, frozen=True, kw_only=True):
    """The fastest measured run of a model on a number of GPUs (`id` and `group` of its row), and its simulation."""

    model: str
    gpus: int
    id: str
    group: str
    tokens_per_s_per_gpu: float
    simulated_tokens_per_s_per_gpu: float
    mfu: float
    simulated_mfu: float
    simulated_peak_memory_bytes: float
    scenario: Scenario


class MeasuredRuns(Record, frozen=True):
    """The fastest measured runs of a published table."""

    table: str
    title: str
    source: Mapping[str, str]
    rows: tuple[MeasuredBest, ...]


def best_measured(path: Path) -> MeasuredRuns:
    """Find a table's fastest step for each model (the first word of a row's group) and number of GPUs.

    Raises:
        InputError: if the file is no such table, or none of its rows has tokens a second and GPU.
    """
    table = read_table(path)
    best: dict[tuple[str, int], Measurement] = {}
    for row in table.rows:
        ranks = _ranks(row)
        if table.kind == "training_step" and RATE in row.measured and ranks:
            place = (row.group.split()[0], ranks)
            if place not in best or row.measured[RATE] > best[place].measured[RATE]:
                best[place] = row
    if not best:
        raise InputError(f"{path}: rows: none has measured.{RATE} of a training step")
    rows = tuple(_beside(model, gpus, row) for (model, gpus), row in sorted(best.items()))
    return MeasuredRuns(table.name, table.title, dict(table.source), rows)


def _ranks(row: Measurement) -> int:
    layout = row.scenario.get("parallelism", {})
    ranks = 1
    for key in ("dp", "tp", "cp", "pp"):
        ranks *= layout.get(key, 1)
    return ranks


def _beside(model: str, gpus: int, row: Measurement) -> MeasuredBest:
    scenario = parse_scenario(dict(row.scenario), row.id, row.folder)
    found = simulate(scenario).outcome
    measured, simulated, mfu = row.measured[RATE], found.tokens_per_s_per_gpu, found.utilization.mfu
    return MeasuredBest(
        model=model,
        gpus=gpus,
        id=row.id,
        group=row.group,
        tokens_per_s_per_gpu=measured,
        simulated_tokens_per_s_per_gpu=simulated,
        mfu=mfu * measured / simulated,
        simulated_mfu=mfu,
        simulated_peak_memory_bytes=found.peak_memory_bytes,
        scenario=scenario,
    )
