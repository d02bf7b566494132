"""Published measurements beside a result: the rows nearest to a scenario, and how far off the simulator was on them.

`sim/presets/evidence.json` holds, for a sample of the published training steps and served workloads
(`scenarios/published`), what was measured and what this simulator says, written by `tools/predict_published.py`. Rows
have the features of `Features`; `distance` between two is a sum over them, in units of "as much as a factor of two in
the model's size". The errors also make the 90 % interval of what is priced by a shipped profile (`interval_factor`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.core.dtypes import dtype_bytes
from sim.core.normal import NINETY_BY_MEAN, student_by_normal
from sim.models.parameters import count_parameters
from sim.results.records import Record
from sim.variants.frameworks.records import FRAMEWORKS

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario

FILE = Path(__file__).parents[1] / "presets" / "evidence.json"
SHOWN = 3  # rows beside a result
FEWEST_TABLES = 5  # whose errors make an interval
REACH = 2.0  # the distance over which a row's weight falls to 1/e
OTHER_KIND = 5.0  # distance between dense training, experts, adapters and serving
SERVING = "serving"  # the kind of all served workloads
# What a factor of two in a feature adds to the distance.
WEIGHTS = {"active": 0.5, "ranks": 0.15, "seq_len": 0.15, "tp": 0.2, "pp": 0.2, "cp": 0.3, "ep": 0.2, "bits": 1.0}
PRODUCT_FAMILIES = {"TensorRT-LLM Triton": "TensorRT-LLM"}  # products of engines that compute with the same kernels


class Features(NamedTuple):
    """Hold the features by which a step or a served workload is like another. `kind`: of training dense, moe or
    lora; sizes in billions of parameters; `framework` of a served workload: the engine's product."""

    gpu: str
    architecture: str
    kind: str
    active: float
    ranks: int
    tp: int
    pp: int
    cp: int
    ep: int
    sharded: bool
    bits: float
    seq_len: int
    framework: str
    date: str


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


def kind_of(scenario: Scenario) -> str:
    """Tell whether a step trains adapters, experts, or all of a dense model."""
    if scenario.for_training.lora is not None:
        return "lora"
    return "dense" if scenario.model.moe is None else "moe"


def features_of(scenario: Scenario) -> Features:
    """Features of a training scenario."""
    t, p, m = scenario.for_training, scenario.parallelism, scenario.model
    gpu = scenario.cluster.gpu
    layout, framework = (p.ranks, p.tp, p.pp, p.cp, p.ep, p.zero == 3), FRAMEWORKS[t.framework].kin or t.framework
    trained = (8 * dtype_bytes(t.precision), t.seq_len, framework, t.software_date or "")
    return Features(gpu.name, gpu.architecture, kind_of(scenario), active_billions(m), *layout, *trained)


@lru_cache(maxsize=64)  # candidates of a search share their model
def active_billions(model: ModelConfig) -> float:
    """Billions of parameters that a token passes."""
    return round(count_parameters(model).active / 1e9, 3)


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


class _Columns(NamedTuple):
    """Features of several steps by column; `sizes`: [steps, 8], those in `WEIGHTS`."""

    sizes: NDArray[np.float64]
    gpu: NDArray[np.str_]
    architecture: NDArray[np.str_]
    kind: NDArray[np.str_]
    sharded: NDArray[np.bool_]
    framework: NDArray[np.str_]
    family: NDArray[np.str_]
    year: NDArray[np.float64]


def _columns(steps: Sequence[Features]) -> _Columns:
    sizes = np.maximum([[getattr(f, name) for name in WEIGHTS] for f in steps], 1e-3)
    same = [(f.gpu, f.architecture, f.kind, f.sharded, f.framework, _family(f), _year(f.date)) for f in steps]
    return _Columns(sizes, *(np.array(column) for column in zip(*same, strict=True)))


@lru_cache(maxsize=1)
def _published_columns() -> _Columns:
    return _columns([row.features for row in published_for(serving=False)])


def _distances(own: Features, others: _Columns) -> NDArray[np.float64]:
    """Return how unlike a step is to each of several others, from 0."""
    a, b = _columns([own]), others
    gpu = np.where(a.gpu == b.gpu, 0.0, np.where(a.architecture == b.architecture, 1.0, 2.5))
    framework = np.where(a.framework == b.framework, 0.0, np.where(a.family == b.family, 0.5, 1.0))
    apart = np.abs(np.log2(a.sizes / b.sizes))
    sizes = sum(weight * apart[:, i] for i, weight in enumerate(WEIGHTS.values()))
    unlike = gpu + sizes + OTHER_KIND * (a.kind != b.kind) + 0.5 * (a.sharded != b.sharded) + framework
    return np.asarray(unlike + 0.15 * np.abs(a.year - b.year), dtype=np.float64)


def _year(date: str) -> float:
    return int(date[:4]) + int(date[5:7]) / 12 if date else 2026.0


def _family(f: Features) -> str:
    """The family of a training framework (`Framework.family`) or of an engine's product; without one, its name."""
    of_framework = FRAMEWORKS[f.framework].family if f.framework in FRAMEWORKS else ""
    return of_framework or PRODUCT_FAMILIES.get(f.framework, f.framework)


def nearest(scenario: Scenario, count: int = SHOWN) -> tuple[Evidence, ...]:
    """The published rows nearest to a scenario, nearest first, of a table at most one."""
    if scenario.model.program is not None or not published_for(serving=False):
        return ()
    apart, found = _distances(features_of(scenario), _published_columns()), dict[str, Evidence]()
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
    apart = _distances(sort_of(own), _columns([sort_of(row.features) for row in rows]))
    errors = [row.error for row in rows]
    parts = np.exp(-apart / REACH) / [sizes[row.table] for row in rows]
    mean = float(np.average(errors, weights=parts))
    _, table = np.unique([row.table for row in rows], return_inverse=True)
    weights = np.bincount(table, parts)
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    alike = {row.table for row in rows if _group(row.features) == _group(own)}
    chips = "other chips" if own.architecture == "other" else own.architecture
    named = f"{own.kind}{' training' * (own.kind != SERVING)} with {_family(own)} on {chips}"
    known = f"{len(alike)} are of" if len(alike) > 1 else "one is of" if alike else "none is of"
    why = f"errors on {len(sizes)} published tables, of which nearer ones count more ({known} {named})"
    return Width(math.exp(NINETY_BY_MEAN * student_by_normal(effective) * mean), why)


def _group(f: Features) -> tuple[str, str, str]:
    return f.kind, f.architecture, _family(f)
