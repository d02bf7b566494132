"""Hold a prediction of a published row, and find the hardware that a row of kernels or collectives names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from sim.core.errors import InputError
from sim.core.normal import NINETY_PERCENT
from sim.inputs.input_source import Source, file_named, nearest
from sim.prices.coefficients import PriceOptions
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.validation.records import Measurement
from topology.presets import CLUSTERS, GPUS, machines_of
from topology.spec import ClusterSpec


class Prediction(NamedTuple):
    """A predicted value and its 90 % interval."""

    value: float
    low: float
    high: float


class NotSimulated(Exception):
    """The simulator has no use for this row; the message says why."""


Predictions = dict[str, Prediction]
MISTYPED = 0.8  # difflib's ratio of a quantity's name to one that is predicted


class Predicted(NamedTuple):
    """Predictions by measured key, and answers to what was only said to be so or not; `known`: all keys that such a row
    may measure; `fits`: whether the predicted peak fits in the GPU's memory (True where memory is not predicted)."""

    found: Predictions
    answers: dict[str, bool]
    known: tuple[str, ...]
    fits: bool = True


def meant(key: str, known: Iterable[str]) -> str:
    """Ask for the known quantity that a key is, mistyped or without its unit; nothing where it is like none."""
    return nearest(key, known, MISTYPED)


def spread(value: float, sigma: float) -> Prediction:
    """A log-normal interval: the error of a factor is as likely up as down."""
    factor = math.exp(NINETY_PERCENT * sigma)
    return Prediction(value, value / factor, value * factor)


@lru_cache(maxsize=16)
def profile_named(name: str) -> Profile:
    """Profiles are read once per process."""
    return load_profile(name)


def calibration_of(row: Measurement) -> str:
    """The profile that the row names, or that of its cluster's GPU; empty where it names neither."""
    named = row.scenario.get("calibration")
    if named or row.scenario.get("cluster") is None:
        name = str(named or "")
        return str(file_named(name, Source(row.id, {}, folder=row.folder)) or name) if name else name
    return cluster_of(row).gpu.name


def cluster_of(row: Measurement) -> ClusterSpec:
    """The cluster that a row of kernels or collectives names, or that of the GPU of its profile."""
    given, gpu = json.dumps(row.scenario.get("cluster"), sort_keys=True), str(row.scenario.get("calibration") or "")
    return _cluster(given, gpu, row.folder)


def costs_of(row: Measurement, calibration: str | None = None, burst: bool = False) -> Costs:
    """Prices on the row's GPU out of its profile, or out of the one named instead; `burst`: with no power limit."""
    profile = profile_named(calibration or calibration_of(row))
    return Costs(profile, cluster_of(row).gpu, PriceOptions(power=not burst))


@lru_cache(maxsize=64)
def _cluster(given: str, gpu: str, folder: str) -> ClusterSpec:
    from sim.inputs.scenario import parse_scenario

    named = json.loads(given)
    if named is None:
        if gpu not in GPUS:
            raise InputError(f"scenario: neither a cluster nor a GPU's profile is named (calibration: {gpu!r})")
        nearest = next(machines_of(gpu), next(iter(CLUSTERS.values())))
        return nearest.model_copy(update={"gpu": GPUS[gpu]})
    training = {"seq_len": 8, "global_batch_size": 1, "precision": "fp16"}
    data = {"name": "row", "model": "gpt2", "training": training, "cluster": named}
    return parse_scenario(data, "row", folder).cluster
