"""Quality beside throughput and memory: a user's table of scores, each model served in simulation.

The scores are taken as they stand; nothing here measures quality. What a model's throughput costs in quality, or the
other way round, is read off the Pareto line: models that no other beats in both.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sim.core.errors import InputError
from sim.core.files import read_text
from sim.core.units import counted
from sim.inputs.scenario import load_scenario, read_source
from sim.inputs.shipped import scenario_file
from sim.results.figures import FIGURES
from sim.serve.simulation import simulate_serving

MOST_BYTES, MOST_MODELS = 1_000_000, 1_000
BESIDE = ("output_tokens_per_s_per_gpu", "peak_memory_bytes")  # numbers that the score is drawn against
COLUMNS = ("model", "score", "set", "source")


class Score(NamedTuple):
    """A line of the table: a model, its score (higher is better), overrides that it needs, where the score is from."""

    model: str
    score: float
    overrides: tuple[str, ...]
    source: str


def read_scores(path: Path) -> list[Score]:
    """A CSV with columns model and score, and maybe set (KEY=VALUE, several with `;` between) and source.

    Raises:
        InputError: naming the file, the line, the column and what was found.
    """
    rows = csv.DictReader(io.StringIO(read_text(path, MOST_BYTES)), skipinitialspace=True)
    names = [name or "" for name in rows.fieldnames or ()]
    if not {"model", "score"} <= set(names) or set(names) - set(COLUMNS):
        raise InputError(
            f"{path}:1: found columns {', '.join(names) or 'none'}; model and score are needed, set and source allowed"
        )
    out: list[Score] = []
    for row in rows:
        where = f"{path}:{rows.line_num}"
        model, text = (row["model"] or "").strip(), (row["score"] or "").strip()
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not model or not math.isfinite(score) or None in row:
            raise InputError(f"{where}: found model {model!r}, score {text[:40]!r}; a name and a number are needed")
        overrides = tuple(x.strip() for x in (row.get("set") or "").split(";") if x.strip())
        out.append(Score(model, score, overrides, (row.get("source") or "").strip()))
    if not 0 < len(out) <= MOST_MODELS:
        raise InputError(f"{path}: found {len(out):,} models; allowed: 1 to {MOST_MODELS:,}")
    return out


def quality(scenario: Path, scores: Sequence[Score], overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Each model served as the scenario says: score, throughput, latency and memory, and whether it lies on the Pareto
    line of score and throughput, or of score and memory. A model that cannot be served says why.

    Raises:
        InputError: if the scenario is wrong for every model.
    """
    read_source(scenario_file(scenario), overrides)  # a file that cannot be read is no fault of the models
    rows = [_served(scenario, score, overrides) for score in scores]
    if all(row["refused"] for row in rows):
        raise InputError(f"{rows[0]['refused']}; none of {counted(len(rows), 'model')} can be served")
    done = [row for row in rows if not row["refused"] and row["fits_in_memory"]]
    for name in BESIDE:
        better = 1.0 if FIGURES[name].more_is_better else -1.0
        points = [(row["score"], better * row[name]) for row in done]
        for row, (score, value) in zip(done, points, strict=True):
            row[f"best_by_{name}"] = not any(a >= score and b >= value and (a, b) != (score, value) for a, b in points)
    return rows


def _served(path: Path, score: Score, overrides: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": score.model,
        "score": score.score,
        "source": score.source,
        "refused": "",
        "fits_in_memory": False,
        **{f"best_by_{name}": False for name in BESIDE},
    }
    try:
        scenario = load_scenario(path, [*overrides, f"model={score.model}", *score.overrides])
        if scenario.inference is None:
            raise InputError(f"{path}: inference: is missing; models are compared in serving")
        result = simulate_serving(scenario).result
    except InputError as error:
        return row | {"refused": str(error)}
    names = ("output_tokens_per_s_per_gpu", "peak_memory_bytes", "fits_in_memory")
    times = {name: result[name]["p50"] for name in ("time_to_first_token_s", "time_per_output_token_s")}
    return row | {name: result[name] for name in names} | times
