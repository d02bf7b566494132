"""Shipped GPUs and machines: files of `topology/gpus` and `topology/machines`, each figure with its document.

Peaks are dense (a sheet that prints "with sparsity" is halved) and accumulate in fp32; a dtype that a sheet does not
name has none. Bandwidths are per direction. Memory is binary: what sheets print as GB is GiB, less under 1 %
(nvidia-smi shows 81,559 MiB of an H100's 80 GB, 183,359 MiB of a B200's 180 GB). `link_bandwidth_bytes_per_s` is what
one chip sends to others of its node over links of its own.

What no data sheet has is taken from NCCL's own cost model: seconds of a step (`protocols`), and the part of a link's
bandwidth that is left for data (`preset_files`). A measured profile replaces them where it has points. Device-side
floors of a kernel are the quickest matmuls of NVIDIA AIConfigurator's database.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from topology.preset_files import NVLINK_EFFICIENCY, NVLS_EFFICIENCY, read_gpu, read_machine
from topology.spec import ClusterSpec, GpuSpec

__all__ = [
    "CLUSTERS",
    "CLUSTER_SOURCES",
    "GPUS",
    "GPU_CAPABILITIES",
    "GPU_PRODUCTS",
    "GPU_SOURCES",
    "NVLINK_EFFICIENCY",
    "NVLS_EFFICIENCY",
]

_HERE = Path(__file__).parent


def _files(folder: str) -> Iterable[Path]:
    return sorted((_HERE / folder).glob("*.json"), key=lambda path: path.stem)


_GPU_FILES = [read_gpu(path) for path in _files("gpus")]
GPUS: dict[str, GpuSpec] = {file.gpu.name: file.gpu for file in _GPU_FILES}
GPU_SOURCES: dict[str, dict[str, str]] = {file.gpu.name: file.sources for file in _GPU_FILES}
"""By GPU and figure, the document that it is from."""
GPU_PRODUCTS: dict[str, str] = {file.product: file.gpu.name for file in _GPU_FILES if file.product}
"""GPUs by a word in their maker's name for them, in capitals."""
GPU_CAPABILITIES: dict[int, str] = {file.cuda_capability: file.gpu.name for file in _GPU_FILES if file.cuda_capability}
"""The GPU that stands for a CUDA compute capability, 90 for 9.0."""

_MACHINE_FILES = [read_machine(path, GPUS) for path in _files("machines")]
CLUSTERS: dict[str, ClusterSpec] = {cluster.name: cluster for cluster, _ in _MACHINE_FILES}
CLUSTER_SOURCES: dict[str, dict[str, str]] = {cluster.name: sources for cluster, sources in _MACHINE_FILES}
"""By machine and figure, the document that it is from."""
