"""A scenario's `cluster`: a preset's name, a preset with overrides, or a full description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from sim.core.dtypes import normalise_dtype
from sim.core.json_values import is_integer, is_number
from sim.core.units import counted
from sim.inputs.input_source import Source, found_file, nearest, refuse_unknown_nulls, show, validate, without_nulls
from sim.inputs.overrides import merge
from sim.inputs.units import with_units
from sim.inputs.yaml_input import KeyPath
from topology.presets import CLUSTERS, GPUS, machines_of
from topology.spec import PEAK_NAMES, ClusterSpec, GpuSpec

CHIP = {
    "architecture",
    "collectives_like",
    "variant_of",
    "nvlink",
    "link_bandwidth_bytes_per_s",
    "memory_shown",
    "sm_sram_bytes",
    "sm_flops_per_clock",
}
MOST_MIXED_NODES = 1000  # of one kind: each is parts and links
LEAST_MEMORY_BYTES = 10**6  # less is gigabytes without their unit
HOST_MEMORY = "host_memory_bandwidth_bytes_per_s"  # which a file of links does not say
SpecT = TypeVar("SpecT", GpuSpec, ClusterSpec)


def resolve_cluster(value: Any, ranks: int, source: Source, path: KeyPath = ("cluster",)) -> ClusterSpec:
    """The cluster that `value` describes; where it names no `nodes`, as many as hold `ranks`.

    Left out of a full description, NICs are one per GPU, links inside nodes as `_intra_node` says, all else is as in
    ClusterSpec. A preset's larger domains give what `_of_each_domain` says.
    """
    if isinstance(value, str):
        _preset(CLUSTERS, value, source, path)  # an unknown name is told at the key that has it
    refuse_unknown_nulls(ClusterSpec, value, source, path, ("preset", "mixed"))
    given: Any = without_nulls({"preset": value} if isinstance(value, str) else value)
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(value)}; must be a preset's name or a mapping")
    data = given = with_units(given, source, path, ("topology",))
    if "mixed" in given:
        return _of_several(given, source, path)
    if "topology" in given:
        return _of_topology(given, source, path)
    if "preset" not in given and (machine := _machine_of_one(given)):
        data = given = {**given, "preset": machine}
    _check_one_a_node(given, source, path)
    if "preset" not in given and "gpu" not in given and isinstance(name := given.get("name"), str):
        shipped = f"found {show(name)}; preset names a shipped cluster: {{preset: {name}}}" if name in CLUSTERS else ""
        raise source.error((*path, "name"), shipped or f"found {show(name)}, which is a label; give preset or gpu, too")
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
            transport = {k: v for k, v in same_nics(given.get("inter_node")).items() if k == "transport"}
            matched = {"rendezvous": True} if _is_slingshot(given) else {}
            data["inter_node"] = {"nics_per_node": per_node, **matched, **inter_node, **transport}
        if per_node >= 1:
            data.setdefault("nodes", max(1, -(-ranks // per_node)))
    return validate(ClusterSpec, data, source, path)


def network_note(given: Any, cluster: ClusterSpec, ranks: int) -> Iterator[str]:
    """Return how fast a network between nodes is simulated that the user's own description leaves out. The default, a
    NIC of a DGX H100 for each GPU, is not what machines with other GPUs have."""
    if not isinstance(given, Mapping) or given.keys() & {"preset", "topology", "mixed"} or _machine_of_one(given):
        return
    links, stated = cluster.inter_node, given.get("inter_node")
    of_nic = stated.get("nic_bandwidth_bytes_per_s") if isinstance(stated, Mapping) else None
    if of_nic is None and ranks > cluster.nvlink_domain:
        simulated = (
            f"{counted(links.nics_per_node, 'NIC')} of {links.nic_bandwidth_bytes_per_s * 8 / 1e9:g} Gbit/s a node"
        )
        yield f"cluster.inter_node.nic_bandwidth_bytes_per_s: not given; {simulated}, as DGX H100s have, are simulated"


def _of_several(given: dict[str, Any], source: Source, path: KeyPath) -> ClusterSpec:
    """The cluster of nodes of several kinds, each described as a cluster of its own with its `nodes`."""
    from topology.graph_files import TopologyError
    from topology.mixed import mixed
    from topology.recognise import recognise

    at, listed = (*path, "mixed"), given["mixed"]
    if len(given) > 1:
        other = next(key for key in given if key != "mixed")
        raise source.error((*path, other), "cannot be given with mixed, which describes the whole cluster")
    if not isinstance(listed, list) or len(listed) < 2:
        raise source.error(at, f"found {show(listed)}; must be a list of two clusters or more, each with its nodes")
    clusters = []
    for i, each in enumerate(listed):
        nodes = each.get("nodes") if isinstance(each, dict) else None
        if not is_integer(nodes) or not 1 <= nodes <= MOST_MIXED_NODES:
            found = f"found {show(nodes)}; must be an integer from 1 to {MOST_MIXED_NODES:,}"
            raise source.error((*at, i, "nodes"), f"{found}: how many nodes are of this kind")
        if any(key in each for key in ("topology", "mixed")):
            raise source.error((*at, i), "must be a preset or a description; a file describes all of a cluster")
        one = {key: value for key, value in each.items() if key != "nodes"}
        clusters.append(resolve_cluster(one, nodes, source, (*at, i)).model_copy(update={"nodes": nodes}))
    try:
        whole = recognise(mixed(clusters))
    except TopologyError as error:
        raise source.error(at, str(error)) from None
    host = [each.host_memory_bandwidth_bytes_per_s for each in clusters]
    slowest = None if None in host else min(each for each in host if each is not None)
    return whole.model_copy(update={HOST_MEMORY: slowest})


def _of_topology(given: dict[str, Any], source: Source, path: KeyPath) -> ClusterSpec:
    """The cluster that a file of parts and links describes; from a result, both are at hand."""
    from sim.inputs.topology_input import given_topology, read_topology

    at = (*path, "topology")
    topology = given["topology"]
    if isinstance(topology, dict):
        wiring = given_topology(topology, source.label)
        return validate(ClusterSpec, {**given, "topology": wiring}, source, path)
    if not isinstance(topology, str):
        raise source.error(at, f"found {show(topology)}; must be a file in node-link JSON or GraphML")
    others = [key for key in given if key not in ("topology", HOST_MEMORY)]
    if others:
        raise source.error((*path, others[0]), "cannot be given with topology, which describes the whole cluster")
    described = read_topology(found_file(topology, source, at))
    own = {key: value for key, value in given.items() if key == HOST_MEMORY}
    return validate(ClusterSpec, {**dict(described), **own}, source, path) if own else described


def _intra_node(given: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """The links inside a node; what is left out is the preset's, or that of the machine that comes with the GPU.

    A GPU that has a bandwidth of its own links keeps it, as an H800 in an H100's machine. Over PCIe a GPU sends no
    faster than its own PCIe link (its sheet's `host_bandwidth_bytes_per_s`). Where every two GPUs are linked, a GPU of
    a node with fewer of them than the machine has fewer links (`_fewer_links`).
    """
    stated, gpu = given.get("intra_node", {}), data["gpu"]
    if not isinstance(stated, dict):
        return stated
    preset, chip = given.get("preset"), gpu.get("variant_of") or gpu["name"]
    machines = [CLUSTERS[preset]] if preset else list(machines_of(chip))
    homes = [c.intra_node for c in machines]
    kind = stated.get("kind", homes[0].kind if homes else "nvswitch" if gpu.get("nvlink", True) else "pcie")
    of_chip = gpu.get("link_bandwidth_bytes_per_s") if kind != "pcie" else None
    own = {"bandwidth_bytes_per_s": of_chip} if of_chip else {}
    if homes and (kind == homes[0].kind or (preset and kind != "pcie")):
        fewer = _fewer_links(machines[0], data) if kind == "full_mesh" else {}
        return {**homes[0].model_dump(), **own, **fewer, **stated}
    if kind == "pcie" and "host_bandwidth_bytes_per_s" in gpu:
        return {"kind": kind, "bandwidth_bytes_per_s": gpu["host_bandwidth_bytes_per_s"], **stated}
    of_machine = {"bandwidth_bytes_per_s": homes[0].bandwidth_bytes_per_s} if homes else {}
    return {**of_machine, **own, **stated}


def _fewer_links(machine: ClusterSpec, data: Mapping[str, Any]) -> dict[str, float]:
    """The bandwidth of a GPU in a node with fewer GPUs than its machine's full mesh: only links to these GPUs count."""
    peers, gpus = machine.gpus_per_node - 1, data.get("gpus_per_node")
    if not machine.intra_node.all_linked or not isinstance(gpus, int) or not 1 <= gpus <= peers:
        return {}
    return {"bandwidth_bytes_per_s": machine.intra_node.bandwidth_bytes_per_s * max(1, gpus - 1) / peers}


def _machine_of_one(given: Mapping[str, Any]) -> str:
    """The shipped machine of a chip that is a node by itself, unless links inside nodes are described; else ""."""
    gpu = given.get("gpu")
    name = gpu.get("preset") if isinstance(gpu, dict) else gpu
    homes = (machine.name for machine in machines_of(str(name)) if machine.gpus_per_node == 1)
    return "" if _describes_links(given) else next(homes, "")


def _describes_links(given: Mapping[str, Any]) -> bool:
    """Tell whether links inside a node are stated so far that no machine is needed for them."""
    links = given.get("intra_node")
    return isinstance(links, dict) and links.keys() >= {"kind", "bandwidth_bytes_per_s"}


def _check_one_a_node(given: Mapping[str, Any], source: Source, path: KeyPath) -> None:
    """Raise for several chips in a node of a machine that has one: the links between them would be unknown."""
    machine = CLUSTERS.get(str(given.get("preset")))
    if machine is None or machine.gpus_per_node > 1 or _describes_links(given):
        return
    for key in ("gpus_per_node", "nvlink_domain"):
        if isinstance(given.get(key), int) and given[key] > 1:
            found = f"found {show(given[key])}; in {machine.name} each chip is a node, so this must be 1"
            raise source.error((*path, key), f"{found}, or give kind and bandwidth_bytes_per_s in intra_node")


def same_nics(stated: Any) -> dict[str, Any]:
    """Return the network of the shipped cluster with the NICs that are stated in number, bandwidth and latency, and of
    which all else that is stated holds, whatever other jobs take (`spread`), whether libfabric is said to match
    messages (`rendezvous`), which `transport` decides there, and which NCCL runs (`pat`); {} if there is none."""
    if not isinstance(stated, dict) or not stated.keys() >= {"nics_per_node", "nic_bandwidth_bytes_per_s", "latency_s"}:
        return {}
    nics = [(key, value) for key, value in stated.items() if key not in ("spread", "rendezvous", "pat")]
    known = (c.inter_node.model_dump() for c in CLUSTERS.values())
    return next((each for each in known if all(each.get(key) == value for key, value in nics)), {})


def _is_slingshot(given: dict[str, Any]) -> bool:
    """Whether a description without a preset is that of nodes with HPE Slingshot 11, whose libfabric matches messages:
    four GPUs that are all linked, with a NIC of 200 Gbit/s each (HPE Cray EX: CSCS Alps, NERSC Perlmutter)."""
    intra, inter = given.get("intra_node"), given.get("inter_node")
    if "preset" in given or not isinstance(intra, dict) or not isinstance(inter, dict):
        return False
    nics = inter.get("nics_per_node", 4), inter.get("nic_bandwidth_bytes_per_s")
    return given.get("gpus_per_node") == 4 and intra.get("kind") == "nvlink_mesh" and nics == (4, 25e9)


def _of_each_domain(domain_gpus: int, ranks: int) -> int:
    """Return how many GPUs of each NVLink domain a job of `ranks` uses: 64 of 72 where it is a multiple of 64 and not
    of 72.

    Else groups of a power of two would lie across domains, where a scheduler gives equal segments (Slurm's
    topology/block, `--segment`).

    >>> [_of_each_domain(72, n) for n in (64, 72, 128, 144, 256, 576)]
    [72, 72, 64, 72, 64, 72]
    """
    even = 1 << (domain_gpus.bit_length() - 1)
    return even if ranks > domain_gpus and ranks % domain_gpus and ranks % even == 0 else domain_gpus


def _over_preset(given: dict[str, Any], source: Source, path: KeyPath) -> dict[str, Any]:
    preset = _preset(CLUSTERS, given["preset"], source, (*path, "preset"))
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
        data = _preset(GPUS, given["preset"], source, (*path, "preset")).model_dump()
    elif (name := str(given.get("name"))) in GPUS:  # described in full, as in stored results: still that chip
        data = GPUS[name].model_dump(include=CHIP)
    overrides = {key: item for key, item in given.items() if key != "preset"}
    if isinstance(overrides.get("peak_flops_per_s"), dict):
        overrides["peak_flops_per_s"] = _peaks(overrides["peak_flops_per_s"], source, (*path, "peak_flops_per_s"))
    elif isinstance(overrides.get("peak_flops_per_s"), (int, float)):
        said = f"found {show(overrides['peak_flops_per_s'])}; must be a mapping of dtypes, such as {{bf16: 989e12}}"
        raise source.error((*path, "peak_flops_per_s"), said)
    size = overrides.get("memory_bytes")
    if isinstance(size, (int, float)) and 0 < size < LEAST_MEMORY_BYTES:
        raise source.error((*path, "memory_bytes"), f"found {show(size)}; {size:g} bytes? write {size:g}GiB")
    data = merge(data, overrides)
    validate(GpuSpec, data, source, path)
    return data


def _peaks(given: dict[str, Any], source: Source, path: KeyPath) -> dict[str, Any]:
    peaks: dict[str, Any] = {}
    for key, value in given.items():
        name = normalise_dtype(key)
        if name not in PEAK_NAMES:
            raise source.error(
                (*path, key), f"unknown dtype{nearest(key, PEAK_NAMES)} (allowed: {', '.join(PEAK_NAMES)})"
            )
        if not is_number(value) or not 0 < value <= 1e24:
            raise source.error((*path, key), f"found {show(value)}; must be a number above 0 and at most 1e24")
        peaks[name] = float(value)
    return peaks


def _preset(known: Mapping[str, SpecT], name: Any, source: Source, path: KeyPath) -> SpecT:
    if isinstance(name, str) and name in known:
        return known[name]
    if known is CLUSTERS:
        from sim.inputs.cluster_names import no_such_cluster

        raise source.error(path, f"found {show(name)}; {no_such_cluster(str(name))}")
    raise source.error(
        path, f"found {show(name)}; no such GPU preset{nearest(name, known)} (`stepsim clusters` lists them)"
    )
