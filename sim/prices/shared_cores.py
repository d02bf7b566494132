"""A profile as it holds where more ranks run than the CPU has cores, so that they take turns.

`calibrate.run` measures a machine with a rank for each core, and its `sharing` group with more of them
(`calibrate.shared_cores`). Computing then takes `ranks_per_core` times as long, times `core_sharing_slowdown` for
switching and for caches that others have used. Messages have tables of their own, since a rank that a message has woken
waits until a core is free: milliseconds, whatever the message's size.
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
    """Prices of a scenario's operators out of `profile`, as its ranks find them."""
    return costs_on(scenario.cluster.gpu, profile, ranks_on_node(scenario.cluster, scenario.ranks), options)


def costs_on(gpu: GpuSpec, profile: Profile, ranks: int, options: PriceOptions = AS_STATED) -> Costs:
    """Prices on a device of a node that holds so many `ranks`."""
    return Costs(on_shared_cores(profile, ranks, gpu), gpu, options)


def ranks_on_node(cluster: ClusterSpec, ranks: int) -> int:
    """The most ranks that one node holds: nodes are filled one after the other."""
    return min(ranks, cluster.gpus_per_node)


def ranks_per_core(profile: Profile, ranks: int) -> float:
    """How many of `ranks` ranks share each core; 1 where a profile does not say what that costs, or they share none."""
    cores = profile.hardware.get("cores", 0)
    said = profile.coefficients.core_sharing_slowdown is not None and not profile.blocks and not profile.reference
    return ranks / cores if said and isinstance(cores, int) and 0 < cores < ranks else 1.0


def on_shared_cores(profile: Profile, ranks: int, gpu: GpuSpec) -> Profile:
    """The profile for `ranks` ranks on its machine: itself unless they share cores and it says what that costs.

    `gpu`: the machine's data sheet, for what the profile did not measure and ranks share as well. A calibration taken
    beside a run's steps (`blocks`) has the sharing in it. The profile that comes out says no more what sharing costs,
    so that it is not applied twice.
    """
    sharing, c = ranks_per_core(profile, ranks), profile.coefficients
    slowdown = c.core_sharing_slowdown
    if sharing <= 1.0 or slowdown is None:
        return profile
    stretch = sharing * max(1.0, slowdown)  # below 1 it was measured beside other work: no rank beats its share
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
    """Collectives as measured at the number of ranks per core that is nearest, to be read as if that were 1; of sorts
    that were not measured while cores were shared, what they take without.
    """
    found: dict[tuple[str, int], CollectiveTable] = {}
    for t in sorted(profile.collectives, key=lambda t: -abs(math.log(t.ranks_per_core / sharing))):
        found[t.op, t.ranks] = replace(t, ranks_per_core=1.0)
    return tuple(found.values())
