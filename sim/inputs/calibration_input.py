"""Which profile prices which GPU: `calibration` and `calibrations`, and warnings where none was measured."""

from __future__ import annotations

from typing import Any

from sim.core.errors import InputError
from sim.core.shipped import shipped_profiles
from sim.inputs.input_source import Source, found_file, is_folder, nearest, show
from sim.inputs.nearest_gpu import MEDIAN_FACTOR, NINTH_FACTOR, nearest_measured
from sim.inputs.yaml_input import KeyPath
from topology.presets import GPUS
from topology.spec import ClusterSpec, GpuSpec

NOT_MEASURED = "not measured: borrowed efficiencies"


def resolve_calibration(data: dict[str, Any], cluster: ClusterSpec, source: Source) -> tuple[str, tuple[str, ...]]:
    """The profile's name or path, and a warning where the GPU has none."""
    if "calibration" in data:
        return _profile_named(data["calibration"], source), ()
    return _own_profile(cluster.gpu, "calibration")


def resolve_calibrations(
    data: dict[str, Any], cluster: ClusterSpec, source: Source
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The profiles of a mixed cluster's further GPUs: those given, else each GPU's own; and warnings as above.

    Raises:
        InputError: if `calibrations` is no mapping, or names a GPU that is not one of the cluster's others.
    """
    path, given = ("calibrations",), data.get("calibrations", {})
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise source.error(path, f"found {show(given)}; must be a mapping from names of GPUs to profiles")
    others = {other.gpu.name: other.gpu for other in cluster.others}
    for name in given:
        if name not in others:
            allowed = ", ".join(others) or "none: all GPUs of the cluster are of one kind; use calibration"
            raise source.error((*path, name), f"is not another GPU of this cluster (allowed: {allowed})")
    out, warnings = {}, list[str]()
    for name, gpu in others.items():
        own, unknown = _own_profile(gpu, "calibrations")
        out[name] = _profile_named(given[name], source, (*path, name)) if name in given else own
        warnings += unknown if name not in given else ()
    return out, tuple(warnings)


def profile_of(gpu: GpuSpec) -> str:
    """Return the profile that prices a GPU: its own, that of the nearest measured GPU, or roofline."""
    own = gpu.variant_of or gpu.name  # a variant's bandwidth is priced by its ratio
    return own if own in GPUS and own in shipped_profiles() else nearest_measured(gpu)


def _own_profile(gpu: GpuSpec, key: str) -> tuple[str, tuple[str, ...]]:
    """A GPU's profile, and a warning that says what it is where the GPU was not measured."""
    name = profile_of(gpu)
    if name in (gpu.variant_of, gpu.name):
        return name, ()
    said = f"{key}: no kernels of GPU '{gpu.name}' were measured: "
    if name == "roofline":
        return name, (f"{said}the roofline prices it, which is the shortest possible time",)
    if gpu.same_multiprocessors(GPUS[name]):
        return name, (f"{said}those of {name}, with the same multiprocessors, are scaled by the data sheets",)
    checked = f"half of measured chips' kernels predicted so are within a factor of {MEDIAN_FACTOR}"
    most = f"nine in ten within {NINTH_FACTOR}"
    return name, (f"{said}it has the efficiencies of {name} on its own peaks and bandwidth; {checked}, {most}",)


def not_measured(cluster: ClusterSpec) -> str:
    """What a comparison says of a cluster with a GPU of which no kernels were measured; nothing of another."""
    borrowed = any(_own_profile(gpu, "")[1] for gpu in cluster.gpus)
    return NOT_MEASURED if borrowed else ""


def unknown_architecture(cluster: ClusterSpec, ranks: int) -> tuple[str, ...]:
    """Warn where collectives are timed by another architecture's measurements."""
    if ranks == 1:
        return ()
    rest = "so its collectives start and step as Hopper's do"
    if cluster.intra_node.through_host:
        rest = "so they are priced from its links' latencies and bandwidths only"
    return tuple(f"{_why_unknown(gpu)}, {rest}" for gpu in cluster.gpus if gpu.architecture == "other")


def _why_unknown(gpu: GpuSpec) -> str:
    """Why collectives are not known: of a shipped GPU without an architecture few or none were measured, and a user has
    nothing to state."""
    if gpu.name in GPUS:
        some = "not all" if gpu.name in shipped_profiles() else "no"
        return f"cluster.gpu: {some} collectives of GPU '{gpu.name}' were measured"
    return f"cluster.gpu.architecture: none is stated for GPU '{gpu.name}'"


def _profile_named(name: str, source: Source, path: KeyPath = ("calibration",)) -> str:
    """A profile's name, or its path where the scenario is a file; one stored with a result may lie elsewhere."""
    known = shipped_profiles()
    if name in known or not source.origins:
        return name
    try:
        return found_file(name, source, path)
    except InputError:
        if "/" in name or name.endswith(".json") or is_folder(name, source):
            raise
    names = f"{nearest(name, known)} (there are: {', '.join(known)}; or a path to one)"
    raise source.error(path, f"found {show(name)}; no such profile{names}")
