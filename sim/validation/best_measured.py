"""The best measured run of each model and number of GPUs of a published table, beside the simulation of its layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from sim.validation.records import Measurement
from sim.validation.tables import read_table

RATE = "tokens_per_s_per_gpu"


def best_measured(path: Path) -> dict[str, Any]:
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
    rows = [_beside(model, gpus, row) for (model, gpus), row in sorted(best.items())]
    return {"table": table.name, "title": table.title, "source": dict(table.source), "rows": rows}


def _ranks(row: Measurement) -> int:
    layout = row.scenario.get("parallelism", {})
    ranks = 1
    for key in ("dp", "tp", "cp", "pp"):
        ranks *= layout.get(key, 1)
    return ranks


def _beside(model: str, gpus: int, row: Measurement) -> dict[str, Any]:
    scenario = parse_scenario(dict(row.scenario), row.id)
    result = simulate(scenario).result
    measured, simulated = row.measured[RATE], result[RATE]
    return {
        "model": model,
        "gpus": gpus,
        "id": row.id,
        "group": row.group,
        RATE: measured,
        f"simulated_{RATE}": simulated,
        "mfu": result["mfu"] * measured / simulated,
        "simulated_mfu": result["mfu"],
        "simulated_peak_memory_bytes": result["peak_memory_bytes"],
        "scenario": scenario.model_dump(mode="json"),
    }
