"""How unlike two training steps or served workloads are, from features of their model, machine and layout.

The distance between two is a sum over their features, in units of "as much as a factor of two in the model's size" is
0.5. Evidence (`sim.results.evidence`) and profiles fitted to steps (`sim.prices.nearby`) use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.dtypes import dtype_bytes
from sim.models.parameters import count_parameters
from sim.variants.frameworks.records import FRAMEWORKS

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario

OTHER_KIND = 5.0  # distance between dense training, experts, adapters and serving
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


class Columns(NamedTuple):
    """Features of several steps by column; `sizes`: [steps, 8], those in `WEIGHTS`."""

    sizes: NDArray[np.float64]
    gpu: NDArray[np.str_]
    architecture: NDArray[np.str_]
    kind: NDArray[np.str_]
    sharded: NDArray[np.bool_]
    framework: NDArray[np.str_]
    family: NDArray[np.str_]
    year: NDArray[np.float64]


def columns(steps: Sequence[Features]) -> Columns:
    sizes = np.maximum([[getattr(f, name) for name in WEIGHTS] for f in steps], 1e-3)
    same = [(f.gpu, f.architecture, f.kind, f.sharded, f.framework, family(f), _year(f.date)) for f in steps]
    return Columns(sizes, *(np.array(column) for column in zip(*same, strict=True)))


def distances(own: Features, others: Columns) -> NDArray[np.float64]:
    """Return how unlike a step is to each of several others, from 0."""
    a, b = columns([own]), others
    gpu = np.where(a.gpu == b.gpu, 0.0, np.where(a.architecture == b.architecture, 1.0, 2.5))
    framework = np.where(a.framework == b.framework, 0.0, np.where(a.family == b.family, 0.5, 1.0))
    apart = np.abs(np.log2(a.sizes / b.sizes))
    sizes = sum(weight * apart[:, i] for i, weight in enumerate(WEIGHTS.values()))
    unlike = gpu + sizes + OTHER_KIND * (a.kind != b.kind) + 0.5 * (a.sharded != b.sharded) + framework
    return np.asarray(unlike + 0.15 * np.abs(a.year - b.year), dtype=np.float64)


def _year(date: str) -> float:
    return int(date[:4]) + int(date[5:7]) / 12 if date else 2026.0


def family(f: Features) -> str:
    """The family of a training framework (`Framework.family`) or of an engine's product; without one, its name."""
    of_framework = FRAMEWORKS[f.framework].family if f.framework in FRAMEWORKS else ""
    return of_framework or PRODUCT_FAMILIES.get(f.framework, f.framework)
