"""Coefficients of a profile that was fitted to measured steps, and that differ more for steps like these.

A fit gives all steps of a machine common coefficients, and each fitted step a factor for each of them. A simulated
step takes them times the product of all factors, each to the power exp(−distance) of the two steps
(`sim.prices.likeness`). So the machine's coefficients vary smoothly with what is run on it: the logarithm of each is a
Gaussian process (Gelfand et al. 2003, "Spatial modeling with spatially varying coefficient processes", JASA 98).

A fitted step that shards its parameters counts as near as one that does not, so that all layouts of one mesh have the
same prices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.prices.likeness import Features, columns, distances, features_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from topology.spec import GpuSpec


class NearbyStep(Struct, frozen=True):
    """A fitted step: its features, and by which factors coefficients (by name on disk) are changed for such a step."""

    features: Features
    factors: Mapping[str, float]


def mesh_features(scenario: Scenario, gpu: GpuSpec | None = None) -> Features | None:
    """Return the features of a scenario by which coefficients of `gpu` (by default its cluster's most frequent one)
    vary; None of what is not trained, and of a captured program, which has no layers."""
    if scenario.training is None or scenario.model.program is not None:
        return None
    priced = gpu or scenario.cluster.gpu
    return features_of(scenario)._replace(sharded=False, gpu=priced.name, architecture=priced.architecture)


def nearness(own: Features, others: Sequence[Features]) -> NDArray[np.float64]:
    """Return exp(−distance) to each of several steps, [others]: 1 for an equal step."""
    return np.exp(-distances(own, columns(others)))


def shifts_near(steps: Sequence[NearbyStep], scenario: Scenario, gpu: GpuSpec | None = None) -> dict[str, float]:
    """Return by how much the logarithms of coefficients are shifted for a scenario, by name on disk.

    `gpu`: the kind of GPU that is priced; by default the cluster's most frequent one.
    """
    own = mesh_features(scenario, gpu) if steps else None
    if own is None:
        return {}
    total: dict[str, float] = defaultdict(float)
    for weight, step in zip(nearness(own, [step.features for step in steps]).tolist(), steps, strict=True):
        for name, factor in step.factors.items():
            total[name] += weight * math.log(factor)
    return dict(total)
