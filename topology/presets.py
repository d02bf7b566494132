"""Load shipped GPUs and machines from `topology/gpus` and `topology/machines`; each figure has its document.

Peaks are dense (figures "with sparsity" are halved) and accumulate in fp32; a dtype that a data sheet does not name has
no peak. Bandwidths are per direction. Memory is binary: the GB of data sheets are GiB, less under 1 % (nvidia-smi shows
81,559 MiB of an H100's 80 GB, 183,359 MiB of a B200's 180 GB). `link_bandwidth_bytes_per_s` is the bandwidth of one
chip's own links to others of its node.

Figures that no data sheet has are from NCCL's own cost model: seconds of a step (`protocols`), and the part of a link's
bandwidth that is left for data (`preset_files`). Points of a measured profile replace them. The shortest time of a
kernel is that of the fastest matmul of NVIDIA AIConfigurator's database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from topology.preset_files import GpuFile, read_gpu, read_machine
from topology.spec import ClusterSpec, GpuSpec

T = TypeVar("T")


class Shipped(MutableMapping[str, T]):
    """Map the names of a folder's files to what `read` returns for them.

    A file is read when its record is first used, because most commands need one GPU and one machine of fifty.
    """

    def __init__(self, folder: str, read: Callable[[Path], T]) -> None:
        self._folder, self._read = Path(__file__).parent / folder, read
        self._records: dict[str, T | None] = dict.fromkeys(sorted(p.stem for p in self._folder.glob("*.json")))

    def __getitem__(self, name: str) -> T:
        record = self._records[name]
        if record is None:
            record = self._records[name] = self._read(self._folder / f"{name}.json")
        return record

    def __setitem__(self, name: str, record: T) -> None:
        self._records[name] = record

    def __delitem__(self, name: str) -> None:
        del self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records  # the inherited method would read the file


_GPU_FILES: Shipped[GpuFile] = Shipped("gpus", read_gpu)
GPUS: Shipped[GpuSpec] = Shipped("gpus", lambda path: _GPU_FILES[path.stem].gpu)
GPU_SOURCES: Shipped[dict[str, str]] = Shipped("gpus", lambda path: _GPU_FILES[path.stem].sources)
"""The document that a figure is from, by GPU and figure."""

_MACHINE_FILES: Shipped[tuple[ClusterSpec, dict[str, str]]] = Shipped("machines", lambda path: read_machine(path, GPUS))
CLUSTERS: Shipped[ClusterSpec] = Shipped("machines", lambda path: _MACHINE_FILES[path.stem][0])
CLUSTER_SOURCES: Shipped[dict[str, str]] = Shipped("machines", lambda path: _MACHINE_FILES[path.stem][1])
"""The document that a figure is from, by machine and figure."""


def machines_of(gpu: str) -> Iterator[ClusterSpec]:
    """Yield the shipped machines with a GPU of this name, in the order of their names; files are read as needed."""
    return (machine for machine in CLUSTERS.values() if machine.gpu.name == gpu)


@cache
def gpu_products() -> dict[str, str]:
    """Return GPUs by a word in their maker's product name, in capitals."""
    return {file.product: file.gpu.name for file in _GPU_FILES.values() if file.product}


@cache
def gpu_capabilities() -> dict[int, str]:
    """Return the GPU that represents each CUDA compute capability (90 for 9.0)."""
    return {file.cuda_capability: file.gpu.name for file in _GPU_FILES.values() if file.cuda_capability}
