"""What a shipped model, machine or GPU says, in full: each key with its value, unit and source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from sim.core.json_values import is_number
from sim.core.units import n_bytes, plain, rate, seconds
from sim.inputs.model_input import load_model, preset_text
from sim.inputs.yaml_input import parse_yaml
from sim.views.scenario_words import cluster_words, size_words
from topology.presets import CLUSTER_SOURCES, CLUSTERS, GPU_SOURCES, GPUS

# Figures that no data sheet has, and the file of NCCL's source that has them (docs/topology.md).
NCCLS = {
    "intra_node.latency_s": "NCCL: src/graph/tuning.cc",
    "intra_node.efficiency": "NCCL: src/graph/topo.h",
    "intra_node.nvls_efficiency": "NCCL: src/graph/tuning.cc",
    "inter_node.latency_s": "NCCL: src/graph/tuning.cc",
    "inter_node.efficiency": "NCCL: src/graph/topo.h",
}
LEFT_OUT = {"name", "source", "gpu", "others", "topology", "variant_of"}
UNITS = (
    ("_bytes_per_s", lambda value: rate(value, "B/s")),
    ("_flops_per_s", lambda value: rate(value, "FLOP/s")),
    ("_bytes", n_bytes),
    ("_s", seconds),
    ("_w", lambda value: f"{plain(value)} W"),
)


def model_record(name: str) -> str:
    """Return a shipped model's size, its file's source, and its keys."""
    text = preset_text(name)
    said = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    rows = [(key, _written(value), "") for key, value in _flat(parse_yaml(text, name)[0])]
    left_out = "Other keys of `model` have their defaults: stepsim run --explain model"
    return "\n".join([f"{name}: {size_words(load_model(name))}", *said, "", *_lines(rows), "", left_out])


def cluster_record(name: str) -> str:
    """Return a shipped machine's keys with units and sources, and those of its GPU."""
    machine, sources = CLUSTERS[name], CLUSTER_SOURCES[name]
    rows = list(_figures(machine, sources))
    said = [f"{name}: {cluster_words(machine)}", "", *_lines(rows), ""]
    return "\n".join([*said, gpu_record(machine.gpu.name)])


def gpu_record(name: str) -> str:
    """Return a shipped GPU's keys with units and sources, as keys of `cluster.gpu`."""
    rows = list(_figures(GPUS[name], GPU_SOURCES[name]))
    return "\n".join([f"{name}, for cluster: {{gpu: {name}}}", "", *_lines(rows)])


def _figures(record: BaseModel, sources: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and source of each figure; of a word that the file states, no source."""
    stated = {key for key, _ in _flat(record.model_dump(mode="json", exclude_unset=True))}
    for key, value in _flat(record.model_dump(mode="json", exclude=LEFT_OUT)):
        whole = key.rpartition(".")[0]
        found = sources.get(key) or sources.get(whole) or (NCCLS.get(key) if value else None)
        unit = whole if whole in sources else key
        yield key, _with_unit(unit, value), found or ("" if key in stated else "default")


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _with_unit(key: str, value: Any) -> str:
    """Return a value as a scenario writes it, and with the unit that its key names."""
    words = next((words for ending, words in UNITS if key.endswith(ending)), None)
    return _written(value) if words is None or not is_number(value) else f"{plain(value)} ({words(value)})"


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return plain(value) if isinstance(value, float) else str(value)


def _lines(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return rows as aligned columns; the last one is as long as it is."""
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"  {key:{first}}  {value:{second}}  {source}".rstrip() for key, value, source in rows]
