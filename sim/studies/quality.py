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
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.files import read_text
from sim.core.units import counted
from sim.inputs.scenario import load_scenario, read_source
from sim.inputs.shipped import scenario_file
from sim.results.figures import FIGURES
from sim.results.records import Record
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


class ScoredModel(Record, frozen=True, kw_only=True):
    """A model's score beside its simulation; of one that cannot be served, `refused` says why, and it has no figures.

    `best_by_…`: no model that fits in memory has a better score and a better figure. Times are medians.
    """

    model: str
    score: float
    source: str
    refused: str = ""
    fits_in_memory: bool = False
    best_by_output_tokens_per_s_per_gpu: bool = False
    best_by_peak_memory_bytes: bool = False
    output_tokens_per_s_per_gpu: float | None = None
    peak_memory_bytes: float | None = None
    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None

    def figure(self, name: str) -> float:
        """A figure of a model that was served."""
        return float(getattr(self, name))

    def is_best(self, name: str) -> bool:
        """Tell whether the model lies on the Pareto line of score and this figure."""
        return bool(getattr(self, f"best_by_{name}"))


class QualityResult(Record, frozen=True, kw_only=True):
    """Models of a table of scores, each served as one scenario says. `scores`: the table's file name."""

    format: str = "sim-quality/1"
    name: str
    scores: str
    models: tuple[ScoredModel, ...]


def quality(scenario: Path, scores: Sequence[Score], overrides: Sequence[str] = ()) -> tuple[ScoredModel, ...]:
    """Each model served as the scenario says: score, throughput, latency and memory, and whether it lies on the Pareto
    line of score and throughput, or of score and memory. A model that cannot be served says why.

    Raises:
        InputError: if the scenario is wrong for every model.
    """
    read_source(scenario_file(scenario), overrides)  # a file that cannot be read is no fault of the models
    rows = [_served(scenario, score, overrides) for score in scores]
    if all(row.refused for row in rows):
        raise InputError(f"{rows[0].refused}; none of {counted(len(rows), 'model')} can be served")
    fitting = [row for row in rows if row.fits_in_memory]
    return tuple(_marked(row, fitting) if row.fits_in_memory else row for row in rows)


def _marked(row: ScoredModel, fitting: Sequence[ScoredModel]) -> ScoredModel:
    return replace(row, **{f"best_by_{name}": not _is_beaten(row, fitting, name) for name in BESIDE})


def _is_beaten(row: ScoredModel, others: Sequence[ScoredModel], name: str) -> bool:
    """Tell whether another model is at least as good in score and in a figure, and better in one of them."""
    better = 1.0 if FIGURES[name].more_is_better else -1.0
    score, value = row.score, better * row.figure(name)
    points = [(other.score, better * other.figure(name)) for other in others]
    return any(a >= score and b >= value and (a, b) != (score, value) for a, b in points)


def _served(path: Path, score: Score, overrides: Sequence[str]) -> ScoredModel:
    row = ScoredModel(model=score.model, score=score.score, source=score.source)
    try:
        scenario = load_scenario(path, [*overrides, f"model={score.model}", *score.overrides])
        if scenario.inference is None:
            raise InputError(f"{path}: inference: is missing; models are compared in serving")
        result = simulate_serving(scenario).outcome
    except InputError as error:
        return replace(row, refused=str(error))
    return replace(
        row,
        output_tokens_per_s_per_gpu=result.output_tokens_per_s_per_gpu,
        peak_memory_bytes=result.peak_memory_bytes,
        fits_in_memory=result.fits_in_memory,
        time_to_first_token_s=result.time_to_first_token_s.p50,
        time_per_output_token_s=result.time_per_output_token_s.p50,
    )
