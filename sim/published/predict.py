"""What the simulator says about one row of a published table: every quantity that the row measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from sim.errors import InputError
from sim.profile import Profile, load_profile
from sim.published.tables import Row
from sim.rules import MAX_RANKS

NINETY_PERCENT = 1.645  # of a normal distribution, both sides


class Prediction(NamedTuple):
    """A predicted value and its 90 % interval."""

    value: float
    low: float
    high: float


class NotSimulated(Exception):
    """The simulator has no use for this row; the message says why."""


Predictions = dict[str, Prediction]


def predict(row: Row, calibration: str | None = None) -> Predictions:
    """Predictions by measured key. `calibration` takes the place of the profile that the row names.

    Raises:
        NotSimulated: an operator or quantity that is not modelled.
        InputError: a row that should be known and was refused.
    """
    kinds: Mapping[str, Callable[[Row, str | None], Predictions]] = {
        "training_step": _training_step,
        "kernel": _kernel,
        "collective": _collective,
        "inference": _inference,
    }
    return kinds[row.kind](row, calibration)


def quantity(key: str) -> str:
    """The name under which a measured key is reported.

    >>> quantity("step_time_s"), quantity("peak_memory_bytes"), quantity("seconds")
    ('step_time', 'peak_memory', 'seconds')
    """
    if key.endswith("_per_s"):
        return key
    return key.removesuffix("_bytes").removesuffix("_s")


def spread(value: float, sigma: float) -> Prediction:
    """A log-normal interval: the error of a factor is as likely up as down."""
    factor = math.exp(NINETY_PERCENT * sigma)
    return Prediction(value, value / factor, value * factor)


@lru_cache(maxsize=16)
def profile_named(name: str) -> Profile:
    """Profiles are read once per process."""
    return load_profile(name)


def _training_step(row: Row, calibration: str | None) -> Predictions:
    from sim.scenario import parse_scenario
    from sim.simulation import simulate

    scenario = parse_scenario(_with(row, calibration), row.id)
    result = simulate(scenario, profile_named(scenario.calibration)).result
    out = {key: _from_result(result, key) for key in row.measured if isinstance(result.get(key), float)}
    if not out:
        raise NotSimulated(f"a training step has no {', '.join(row.measured) or 'measured quantity'}")
    return out


def _from_result(result: Mapping[str, Any], key: str) -> Prediction:
    """A value of the result; whatever goes with the step time has the step time's relative interval.

    Published MFUs count attention in full, as PaLM's definition does (arXiv 2204.02311, appendix B), whether or not
    the mask halves the work: `mfu_full_attention` is what they are compared with.
    """
    value, (low, high) = result[_COUNTED_AS.get(key, key)], result["step_time_interval_s"]
    down, up = low / result["step_time_s"], high / result["step_time_s"]
    if key.endswith("_bytes"):
        return spread(value, MEMORY_UNCERTAINTY)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return Prediction(value, value * down, value * up)
    return Prediction(value, value / up, value / down)


_COUNTED_AS = {"mfu": "mfu_full_attention"}
MEMORY_UNCERTAINTY = 0.03  # allocator rounding, small tensors and workspaces left out


def _inference(row: Row, calibration: str | None) -> Predictions:
    from sim.scenario import parse_scenario
    from sim.serve.serving import simulate_serving

    scenario = parse_scenario(_with(row, calibration), row.id)
    result = simulate_serving(scenario, profile_named(scenario.calibration)).result
    out = {}
    for key in row.measured:
        value = result.get(_SERVED.get(key, key))
        value = value.get("p50") if isinstance(value, dict) else value
        if isinstance(value, float):
            out[key] = spread(value, SERVING_UNCERTAINTY)
    if not out:
        raise NotSimulated(f"a serving workload has no {', '.join(row.measured) or 'measured quantity'}")
    return out


_SERVED = {"first_token_s": "time_to_first_token_s"}
SERVING_UNCERTAINTY = 0.15  # kernels of another library, schedulers of another server


def _collective(row: Row, calibration: str | None) -> Predictions:
    from sim.pricing import LINK_UNCERTAINTY
    from topology.network import Network

    data = row.data
    if "bytes" not in data or "ranks" not in data:
        raise NotSimulated("a fitted parameter, not a measured message")
    cluster = cluster_of(row)
    if not 1 <= int(data["ranks"]) <= MAX_RANKS:
        raise InputError(f"{row.id}: ranks: found {str(data['ranks'])[:40]}; allowed: 1 to {MAX_RANKS:,}")
    ranks, size = range(int(data["ranks"])), float(data["bytes"])
    if cluster.nodes * cluster.gpus_per_node < len(ranks):
        cluster = cluster.model_copy(update={"nodes": -(-len(ranks) // cluster.gpus_per_node)})
    op = _OPS.get(str(data["op"]), str(data["op"]))
    if len(ranks) <= cluster.gpus_per_node and data.get("nodes", 1) == 1:
        measured = costs_of(row, calibration).collective(op, len(ranks), size)
        if measured is not None:
            return {key: spread(measured.seconds, measured.uncertainty) for key in row.measured}
    try:
        cost = Network(cluster).collective(op, ranks, size)
    except ValueError as error:
        raise NotSimulated(str(error)) from None
    return {key: spread(cost.seconds, LINK_UNCERTAINTY) for key in row.measured if key == "seconds"}


_OPS = {"all2all": "all_to_all", "alltoall": "all_to_all", "p2p": "send_recv"}


def _kernel(row: Row, calibration: str | None) -> Predictions:
    from sim.published.kernel_rows import kernel_predictions

    return kernel_predictions(row, calibration)


def _with(row: Row, calibration: str | None) -> dict[str, Any]:
    scenario = dict(row.scenario)
    scenario.setdefault("name", row.id)
    if calibration is not None:
        scenario["calibration"] = calibration
    return scenario


def cluster_of(row: Row) -> Any:
    """The cluster that a row of kernels or collectives names, or that of the GPU of its profile."""
    return _cluster(_frozen(row.scenario.get("cluster")), str(row.scenario.get("calibration", "")))


def costs_of(row: Row, calibration: str | None = None) -> Any:
    """Prices on the row's GPU out of its profile."""
    name = calibration or str(row.scenario.get("calibration", ""))
    return _costs(_frozen(row.scenario.get("cluster")), str(row.scenario.get("calibration", "")), name)


def _frozen(cluster: object) -> str:
    import json

    return json.dumps(cluster, sort_keys=True)


@lru_cache(maxsize=64)
def _cluster(text: str, gpu: str) -> Any:
    import json

    from sim.scenario import parse_scenario
    from topology.presets import CLUSTERS, GPUS

    given = json.loads(text)
    if given is None:
        if gpu not in GPUS:
            raise InputError(f"scenario: neither a cluster nor a GPU's profile is named (calibration: {gpu!r})")
        named = next((c for c in CLUSTERS.values() if c.gpu.name == gpu), next(iter(CLUSTERS.values())))
        return named.model_copy(update={"gpu": GPUS[gpu]})
    probe = {
        "model": "gpt2",
        "cluster": given,
        "name": "row",
        "training": {"seq_len": 8, "global_batch_size": 1, "precision": "fp16"},
    }
    return parse_scenario(probe).cluster


@lru_cache(maxsize=64)
def _costs(cluster: str, gpu: str, profile: str) -> Any:
    from sim.costs import Costs

    return Costs(profile_named(profile), _cluster(cluster, gpu).gpu)
