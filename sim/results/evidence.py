"""Published measurements beside a result: the rows nearest to a scenario, and how far off the simulator was on them.

`sim/presets/evidence.json` holds, for a sample of the published training steps and served workloads
(`scenarios/published`), what was measured and what this simulator says, written by `tools/predict_published.py`. Rows
have the features and distances of `sim.prices.likeness`. The errors also make the 90 % interval of what is priced by a
shipped profile (`interval_factor`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from sim.core.normal import NINETY_BY_MEAN, student_by_normal
from sim.prices.likeness import Columns, Features, columns, distances, family, features_of
from sim.results.records import Record

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

FILE = Path(__file__).parents[1] / "presets" / "evidence.json"
SHOWN = 3  # rows beside a result
FEWEST_TABLES = 5  # whose errors make an interval
REACH = 2.0  # the distance over which a row's weight falls to 1/e
SERVING = "serving"  # the kind of all served workloads


class PublishedStep(Struct, frozen=True):
    """A published step or served quantity: its table, its name there, what was measured and is predicted, its features.

    `power`: by what power of the time of all work it grows; 1, but for latencies under load, which grow faster.
    `host`: the standard deviation, as a part of 1, that the engine's record of its host adds. `quantity`: the key under
    which it was measured.
    """

    table: str
    row: str
    measured: float
    predicted: float
    features: Features
    power: float = 1.0
    host: float = 0.0
    quantity: str = "step_time_s"

    @property
    def error(self) -> float:
        """|log| of the factor by which the time of all work is off."""
        return abs(math.log(self.predicted / self.measured)) / self.power


class Evidence(Record, frozen=True):
    """A measured row near a scenario, and what the simulator says about it; `error`: predicted ÷ measured − 1."""

    table: str
    row: str
    quantity: str
    measured: float
    predicted: float
    error: float
    distance: float
    where: str  # GPU, ranks, size of the model and precision, in words


class Width(Struct, frozen=True):
    """Half of a 90 % interval, as a factor, and in words which errors it is made of."""

    factor: float
    why: str


@lru_cache(maxsize=1)
def published() -> tuple[PublishedStep, ...]:
    """The shipped rows; none where the file is missing, as while it is being written."""
    if not FILE.is_file():
        return ()
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple([PublishedStep(*[*row[:4], Features(*row[4]), *row[5:]]) for row in data["rows"]])


@lru_cache(maxsize=2)
def published_for(serving: bool) -> tuple[PublishedStep, ...]:
    """The rows whose errors tell about training or about serving.

    Training: steps. Serving has few tables, and steps rest on the same measured operators: both.
    """
    return published() if serving else tuple([row for row in published() if row.features.kind != SERVING])


@lru_cache(maxsize=1)
def _published_columns() -> Columns:
    return columns([row.features for row in published_for(serving=False)])


def nearest(scenario: Scenario, count: int = SHOWN) -> tuple[Evidence, ...]:
    """The published rows nearest to a scenario, nearest first, of a table at most one."""
    if scenario.model.program is not None or not published_for(serving=False):
        return ()
    apart, found = distances(features_of(scenario), _published_columns()), dict[str, Evidence]()
    for i in np.argsort(apart, kind="stable").tolist():
        if len(found) == count:
            break
        r = published_for(serving=False)[i]
        if r.table not in found:
            error, near = r.predicted / r.measured - 1.0, round(float(apart[i]), 3)
            where = in_words(r.features)
            found[r.table] = Evidence(r.table, r.row, "step_time", r.measured, r.predicted, error, near, where)
    return tuple(found.values())


def in_words(f: Features) -> str:
    """A row's machine and model.

    >>> in_words(Features("h100-sxm", "hopper", "dense", 405.85, 2048, 8, 8, 2, 1, False, 8.0, 8192, "megatron", ""))
    '2,048 h100-sxm, 406B dense, 8 bits, megatron'
    """
    size = f"{f.active:.0f}B" if f.active >= 10 else f"{f.active:.1f}B"
    active = " active" if f.kind == "moe" else ""
    when = f" of {f.date}" if f.date else ""
    return f"{f.ranks:,} {f.gpu}, {size}{active} {f.kind}, {f.bits:.0f} bits, {f.framework}{when}"


def sort_of(f: Features) -> Features:
    """A step's features without its layout, sequence length and date.

    Intervals do not depend on these: with them, intervals from other tables' errors are neither narrower nor surer. So
    all candidates of a search have one interval.
    """
    return f._replace(ranks=1, tp=1, pp=1, cp=1, ep=1, sharded=False, seq_len=1, date="")


def interval_factor(own: Features, rows: Sequence[PublishedStep] | None = None) -> Width | None:
    """The factor within which nine of ten published rows of a scenario's kind are met; None with too few tables.

    It comes from the mean |log error| of all rows, in which nearer rows count more, and all tables alike before that.
    A mean of few tables may be too small by chance, so it is multiplied by a quantile of Student's distribution. Its
    degrees of freedom are the effective number of tables, (Σw)² ÷ Σw² of their weights (Kish 1965). `OTHER_KIND` and
    this rule were chosen by intervals made without the judged table (docs/accuracy.md, "The 90 % interval").
    `rows`: in place of all that are shipped, such as without a table that is judged.
    """
    rows = published_for(own.kind == SERVING) if rows is None else rows
    sizes = Counter([row.table for row in rows])
    if len(sizes) < FEWEST_TABLES:
        return None
    apart = distances(sort_of(own), columns([sort_of(row.features) for row in rows]))
    errors = [row.error for row in rows]
    parts = np.exp(-apart / REACH) / [sizes[row.table] for row in rows]
    mean = float(np.average(errors, weights=parts))
    _, table = np.unique([row.table for row in rows], return_inverse=True)
    weights = np.bincount(table, parts)
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    alike = {row.table for row in rows if _group(row.features) == _group(own)}
    chips = "other chips" if own.architecture == "other" else own.architecture
    named = f"{own.kind}{' training' * (own.kind != SERVING)} with {family(own)} on {chips}"
    known = f"{len(alike)} are of" if len(alike) > 1 else "one is of" if alike else "none is of"
    why = f"errors on {len(sizes)} published tables, of which nearer ones count more ({known} {named})"
    return Width(math.exp(NINETY_BY_MEAN * student_by_normal(effective) * mean), why)


def _group(f: Features) -> tuple[str, str, str]:
    return f.kind, f.architecture, family(f)
