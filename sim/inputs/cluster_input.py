"""A scenario's `cluster`: a preset's name, a preset with overrides, or a full description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sim.dtypes import SPELLINGS, normalise_dtype
from sim.inputs.input_source import Source, nearest, show, validate, without_nulls
from sim.inputs.overrides import merge
from sim.inputs.parallelism import parse_size
from sim.inputs.yaml_input import KeyPath
from topology.presets import CLUSTERS, GPUS
from topology.spec import ClusterSpec, GpuSpec

SpecT = TypeVar("SpecT", GpuSpec, ClusterSpec)

_PEAK_NAMES = (*dict.fromkeys(SPELLINGS.values()), "tf32", "fp4", "int8", "int4")


def resolve_cluster(value: Any, ranks: int, source: Source, path: KeyPath = ("cluster",)) -> ClusterSpec:
    """The cluster that `value` describes; where it names no `nodes`, as many as hold `ranks`.

    Left out of a full description, NICs are one per GPU, links inside nodes as `_intra_node` says, all else is as in
    ClusterSpec. A preset's larger domains give what `_of_each_domain` says.
    """
    given: Any = without_nulls({"preset": value} if isinstance(value, str) else value)
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(value)}; must be a preset's name or a mapping")
    data = dict(given)
    if "preset" in data:
        data = _over_preset(data, source, path)
        if "nvlink_domain" not in given and "nvlink_domain" in data:
            data["nvlink_domain"] = _of_each_domain(data["nvlink_domain"], ranks)
    data["gpu"] = _gpu(data.get("gpu"), source, (*path, "gpu"))
    data["intra_node"] = _intra_node(given, data)
    per_node = data.get("gpus_per_node", ClusterSpec.model_fields["gpus_per_node"].default)
    if isinstance(per_node, int):
        inter_node = data.get("inter_node", {})
        if isinstance(inter_node, dict):
            data["inter_node"] = {"nics_per_node": per_node, **inter_node}
        if per_node >= 1:
            data.setdefault("nodes", max(1, -(-ranks // per_node)))
    return validate(ClusterSpec, data, source, path)


def _intra_node(given: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """The links inside a node; what is left out is the preset's, or that of the machine that comes with the GPU.

    Over PCIe a GPU sends no faster than its own PCIe link (its sheet's `host_bandwidth_bytes_per_s`).
    """
    stated, gpu = given.get("intra_node", {}), data["gpu"]
    if not isinstance(stated, dict):
        return stated
    name, preset = str(gpu["name"]), given.get("preset")
    homes = [c.intra_node for c in CLUSTERS.values() if (c.name == preset if preset else name.startswith(c.gpu.name))]
    kind = stated.get("kind", homes[0].kind if homes else "pcie" if name.endswith("-pcie") else "nvswitch")
    if homes and (kind == homes[0].kind or (preset and kind != "pcie")):
        return {**homes[0].model_dump(), **stated}
    if kind == "pcie" and "host_bandwidth_bytes_per_s" in gpu:
        return {"kind": kind, "bandwidth_bytes_per_s": gpu["host_bandwidth_bytes_per_s"], **stated}
    return {**({"bandwidth_bytes_per_s": homes[0].bandwidth_bytes_per_s} if homes else {}), **stated}


def _of_each_domain(domain_gpus: int, ranks: int) -> int:
    """How many GPUs of each NVLink domain a job of `ranks` uses: 64 of 72 where it is a multiple of 64 and not of 72.

    Else groups of a power of two would lie across domains, where a scheduler gives equal segments (Slurm's
    topology/block, `--segment`).

    >>> [_of_each_domain(72, n) for n in (64, 72, 128, 144, 256, 576)]
    [72, 72, 64, 72, 64, 72]
    """
    even = 1 << (domain_gpus.bit_length() - 1)
    return even if ranks > domain_gpus and ranks % domain_gpus and ranks % even == 0 else domain_gpus


def _over_preset(given: dict[str, Any], source: Source, path: KeyPath) -> dict[str, Any]:
    preset = _preset(CLUSTERS, given["preset"], "cluster", source, (*path, "preset"))
    base = preset.model_dump(exclude={"nodes"})
    if preset.nvlink_domain == preset.gpus_per_node and "gpus_per_node" in given:
        del base["nvlink_domain"]  # the domain was the node, so it goes on being the node
    gpu = given.get("gpu", {})
    if isinstance(gpu, str) or (isinstance(gpu, dict) and "preset" in gpu):
        del base["gpu"]
    overrides = {key: value for key, value in given.items() if key != "preset"}
    merged: dict[str, Any] = merge(base, overrides)
    return merged


def _gpu(value: Any, source: Source, path: KeyPath) -> Any:
    """The GPU's mapping with its preset, where it names one, filled in."""
    if value is None:
        raise source.error(path, f"is required and missing (a name of {', '.join(GPUS)}, or a mapping)")
    given: Any = {"preset": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(value)}; must be a GPU's name or a mapping")
    data: dict[str, Any] = {"name": "custom"}
    if "preset" in given:
        data = _preset(GPUS, given["preset"], "GPU", source, (*path, "preset")).model_dump()
    overrides = {key: item for key, item in given.items() if key != "preset"}
    if isinstance(overrides.get("peak_flops_per_s"), dict):
        overrides["peak_flops_per_s"] = _peaks(overrides["peak_flops_per_s"], source, (*path, "peak_flops_per_s"))
    try:
        overrides |= {"memory_bytes": parse_size(overrides["memory_bytes"])} if "memory_bytes" in overrides else {}
    except ValueError as error:
        found = show(overrides["memory_bytes"])
        raise source.error((*path, "memory_bytes"), f"found {found}; {error}") from None
    data = merge(data, overrides)
    validate(GpuSpec, data, source, path)
    return data


def _peaks(given: dict[str, Any], source: Source, path: KeyPath) -> dict[str, Any]:
    peaks: dict[str, Any] = {}
    for key, value in given.items():
        name = normalise_dtype(key)
        if name not in _PEAK_NAMES:
            raise source.error(
                (*path, key), f"unknown dtype{nearest(key, _PEAK_NAMES)} (allowed: {', '.join(_PEAK_NAMES)})"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e24:
            raise source.error((*path, key), f"found {show(value)}; must be a number above 0 and at most 1e24")
        peaks[name] = float(value)
    return peaks


def _preset(known: Mapping[str, SpecT], name: Any, what: str, source: Source, path: KeyPath) -> SpecT:
    if not isinstance(name, str) or name not in known:
        raise source.error(
            path,
            f"found {show(name)}; no such {what} preset{nearest(name, known)} (there are: {', '.join(known)})",
        )
    return known[name]
