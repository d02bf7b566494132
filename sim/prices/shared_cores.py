"""Adapt a profile to more ranks than the CPU has cores, which then take turns.

`calibrate.run` measures a machine with one rank for each core, and in its group `sharing` with more ranks
(`calibrate.shared_cores`). Computing then takes `ranks_per_core` times as long, times `core_sharing_slowdown` for
switches between ranks and for displaced caches. Messages have separate tables, because a rank that a message wakes
waits for a free core: milliseconds for any size of message.
"""

from __future__ import annotations

import dataclasses
import math

from msgspec.structs import replace

from sim.inputs.scenario import Scenario
from sim.prices.coefficients import AS_STATED, PriceOptions
from sim.prices.operator_prices import Costs
from sim.prices.profile import CollectiveTable, Profile
from topology.spec import ClusterSpec, GpuSpec


def costs_of(scenario: Scenario, profile: Profile, options: PriceOptions = AS_STATED) -> Costs:
    """Return the prices of a scenario's operators with `profile`, with shared cores if there are too few."""
    return costs_on(scenario.cluster.gpu, profile, ranks_on_node(scenario.cluster, scenario.ranks), options)


def costs_on(gpu: GpuSpec, profile: Profile, ranks: int, options: PriceOptions = AS_STATED) -> Costs:
    """Return the prices on a device of a node that holds `ranks` ranks."""
    return Costs(on_shared_cores(profile, ranks, gpu), gpu, options)


def ranks_on_node(cluster: ClusterSpec, ranks: int) -> int:
    """Return the most ranks on one node; nodes are filled one after the other."""
    return min(ranks, cluster.gpus_per_node)


def ranks_per_core(profile: Profile, ranks: int) -> float:
    """Return how many ranks share a core; 1 if they share none, or if the profile does not say what sharing costs."""
    cores = profile.hardware.get("cores", 0)
    said = profile.coefficients.core_sharing_slowdown is not None and not profile.blocks and not profile.reference
    return ranks / cores if said and isinstance(cores, int) and 0 < cores < ranks else 1.0


def on_shared_cores(profile: Profile, ranks: int, gpu: GpuSpec) -> Profile:
    """Return the profile for `ranks` ranks on its machine: unchanged unless they share cores and the cost is known.

    `gpu`: the data sheet, for the figures that the profile did not measure; shared cores slow these down too. A
    calibration taken between a run's steps (`blocks`) already includes the sharing. The returned profile has no
    `core_sharing_slowdown`, so that it is not applied twice.
    """
    sharing, c = ranks_per_core(profile, ranks), profile.coefficients
    slowdown = c.core_sharing_slowdown
    if sharing <= 1.0 or slowdown is None:
        return profile
    stretch = sharing * max(1.0, slowdown)  # below 1 the measurement was disturbed: no rank gets more than its share
    bandwidth = c.memory_bandwidth_bytes_per_s or gpu.memory_bandwidth_bytes_per_s
    peaks = {**gpu.peak_flops_per_s, **c.peak_flops_per_s}
    launch_s = gpu.launch_overhead_s if c.launch_overhead_s is None else c.launch_overhead_s
    coefficients = dataclasses.replace(
        c,
        core_sharing_slowdown=None,
        launch_overhead_s=launch_s * stretch,
        kernel_gap_s=c.kernel_gap_s * stretch,
        operator_in_model_s=c.operator_in_model_s * stretch,
        memory_bandwidth_bytes_per_s=bandwidth / stretch,
        peak_flops_per_s={dtype: rate / stretch for dtype, rate in peaks.items()},
    )
    return replace(
        profile,
        coefficients=coefficients,
        points=tuple(replace(t, seconds=t.seconds * stretch) for t in profile.points),
        collectives=_tables(profile, sharing),
    )


def _tables(profile: Profile, sharing: float) -> tuple[CollectiveTable, ...]:
    """Return each collective's table with the nearest number of ranks per core, marked as if that were 1.

    A collective that was not measured with shared cores keeps its table.
    """
    found: dict[tuple[str, int], CollectiveTable] = {}
    for t in sorted(profile.collectives, key=lambda t: -abs(math.log(t.ranks_per_core / sharing))):
        found[t.op, t.ranks] = replace(t, ranks_per_core=1.0)
    return tuple(found.values())
