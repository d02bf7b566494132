"""Read files of GPUs and machines, and check that every figure names its document.

A file of `topology/gpus` has the keys of `GpuSpec`, one of `topology/machines` those of `ClusterSpec` with the name of
its `gpu`. Results print `source`. `sources` maps each document to the keys of its figures; a key within a mapping is
written as `inter_node.latency_s`. A GPU's `product` is its name in the maker's tools, `cuda_capability` the compute
capability that it represents. Keys that a machine leaves out have the defaults of `ClusterSpec`; the efficiencies of
`nvswitch` and `nvlink_mesh` are NCCL's for the GPU's architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import DecodeError, Struct, json
from pydantic import BaseModel, ValidationError

from topology.architectures import ARCHITECTURES
from topology.errors import PresetError
from topology.spec import ClusterSpec, GpuSpec

# Keys that identify a chip or a kind of link and are not figures.
_WORDS = {"source", "product", "cuda_capability"}
_WORDS |= {"name", "architecture", "collectives_like", "variant_of", "nvlink", "gpu", "gpus_per_node", "nvlink_domain"}
_WORDS |= {f"{level}_node.{word}" for level in ("intra", "inter") for word in ("kind", "rendezvous", "transport")}


class GpuFile(Struct, frozen=True):
    """Hold a GPU's file: the record, its documents by figure, and its names in tools ("" and 0: not stated)."""

    gpu: GpuSpec
    sources: dict[str, str]
    product: str
    cuda_capability: int


SpecT = TypeVar("SpecT", bound=BaseModel)


def read_gpu(path: Path) -> GpuFile:
    """Return a GPU with the document of each of its figures.

    Raises:
        PresetError: for a wrong key or value, or a figure without a document; the message names the file and the key.
    """
    data, sources = _read(path)
    product, capability = data.pop("product", ""), data.pop("cuda_capability", 0)
    if not isinstance(product, str) or not isinstance(capability, int):
        raise PresetError(f"{path}: product must be a text, cuda_capability an integer (90 for 9.0)")
    gpu = _validated(GpuSpec, data, path)
    return GpuFile(gpu, sources, product, capability)


def read_machine(path: Path, gpus: Mapping[str, GpuSpec]) -> tuple[ClusterSpec, dict[str, str]]:
    """Return a machine with a GPU of `gpus`, and the document of each of its figures.

    Raises:
        PresetError: as `read_gpu`, and for a GPU that `gpus` lacks.
    """
    data, sources = _read(path)
    name, stated = data.get("gpu"), data.get("intra_node", {})
    if not isinstance(name, str) or name not in gpus:
        raise PresetError(f"{path}: gpu: found {name!r}; allowed: {', '.join(gpus)}")
    if not isinstance(stated, dict):
        raise PresetError(f"{path}: intra_node: found {stated!r}; must be a mapping")
    chip, kind = gpus[name].chip, stated.get("kind")
    usual: dict[str, float] = {}
    if kind in ("nvswitch", "nvlink_mesh") and "efficiency" not in stated:
        if chip.nvlink_efficiency is None:
            known = ", ".join(name for name, each in ARCHITECTURES.items() if each.nvlink_efficiency)
            needed = f"is required with a {name} and kind {kind}; NCCL's is known for {known} only"
            raise PresetError(f"{path}: intra_node.efficiency: {needed}")
        usual["efficiency"] = chip.nvlink_efficiency
    if kind == "nvswitch":
        usual["nvls_efficiency"] = chip.nvls_efficiency
    record = {**data, "gpu": gpus[name], "intra_node": {**usual, **stated}}
    return _validated(ClusterSpec, record, path), sources


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's keys without its sources, and the document of each figure."""
    try:
        data = json.decode(path.read_bytes())
    except DecodeError as error:
        raise PresetError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("name") != path.stem:
        raise PresetError(f"{path}: name: must be the file's own name, {path.stem!r}")
    listed = data.pop("sources", None)
    if not isinstance(listed, dict) or not all(isinstance(each, list) for each in listed.values()):
        raise PresetError(f"{path}: sources: must be a mapping from documents to lists of keys")
    named = [(str(figure), document) for document, figures in listed.items() for figure in figures]
    sources, known = dict(named), _figures(data)
    for figure, _ in named:
        if figure not in known or sum(figure == each for each, _ in named) > 1:
            raise PresetError(f"{path}: sources: {figure!r} must be a figure of the file, and of one document only")
    for figure in known:
        if figure not in sources:
            raise PresetError(f"{path}: {figure}: has no document in sources")
    return data, sources


def _figures(data: Mapping[str, Any]) -> list[str]:
    """Return the keys that hold figures, those within links as `intra_node.latency_s`."""
    found = []
    for key, value in data.items():
        within = key in ("intra_node", "inter_node") and isinstance(value, dict)
        found += [f"{key}.{each}" for each in value] if within else [key]
    return [key for key in found if key not in _WORDS]


def _validated(record: type[SpecT], data: dict[str, Any], path: Path) -> SpecT:
    try:
        return record.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PresetError(f"{path}: {where}: {first['msg']}") from None
