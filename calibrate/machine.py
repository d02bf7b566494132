"""Facts of this machine: a profile holds them, and a calibration resumes only if they are still the same."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from calibrate.machine_load import machine_busy_s
from sim.core.executors import available_cores
from sim.prices.profile import Facts

RANKS_SHARING = 2  # ranks on one GPU; on an H200 with CUDA's multi-process service four hung in an all-reduce of 4 MiB


def hardware(device: str) -> Facts:
    """Return the device, its memory and, on CUDA, the number of devices."""
    if device == "cuda":
        props = torch.cuda.get_device_properties(0)
        return {
            "device": "cuda",
            "gpu": props.name,
            "gpus": torch.cuda.device_count(),
            "memory_bytes": props.total_memory,
            "sm_count": props.multi_processor_count,
            "compute_capability": f"{props.major}.{props.minor}",
            "host_cpu": _cpu_name(),
            "host_cores": available_cores(),
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": "cpu",
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_bytes": memory,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def software(device: str) -> Facts:
    """Return the versions of software that speed depends on."""
    facts: dict[str, str | int | float | bool] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which msgspec does not write
        "kernel": platform.release(),
        "system": platform.system(),
    }
    if device == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(str(x) for x in torch.cuda.nccl.version())
    return facts


def settings(device: str, quick: bool) -> Facts:
    """Return how the machine is measured; a CPU uses one thread for each rank, as real runs do."""
    facts: dict[str, str | int | float | bool] = {"quick": quick}
    if device == "cpu":
        facts |= {"threads_per_rank": torch.get_num_threads(), "malloc": "keeps freed memory"}
    elif ranks_share_gpus():
        facts |= {"collectives": "loopback: ranks share a GPU, nothing crosses NVLink"}
    return facts


def gpu_ranks() -> int:
    """Return how many ranks NCCL allows on this machine's GPUs: one each, or two each if ranks may share a GPU.

    NCCL 2.30.7 and later allow sharing with NCCL_MULTI_RANK_GPU_ENABLE=1. Such ranks compute at once under CUDA's
    multi-process service and in turns without it, and their messages stay in the GPU's memory.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus * RANKS_SHARING if ranks_share_gpus() else gpus


def ranks_share_gpus() -> bool:
    """Return whether NCCL is set to allow several ranks on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def busy_cores(seconds: float = 0.3) -> float:
    """Sleep for `seconds` and return how many cores other processes used; 0 if the system does not say."""
    before = machine_busy_s()
    time.sleep(seconds)
    return (machine_busy_s() - before) / seconds


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
