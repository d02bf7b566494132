"""What machine this is: the facts that a profile carries and that a resumed calibration must agree with."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from calibrate.machine_load import machine_busy_s
from sim.prices.profile import Facts

RANKS_SHARING = 2  # of an H200, by way of the multi-process service; four hung in an all-reduce of 4 MiB


def hardware(device: str) -> Facts:
    """Device, its memory and, on CUDA, how many there are."""
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
            "host_cores": cores(),
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": "cpu",
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_bytes": memory,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def software(device: str) -> Facts:
    """Versions that speed depends on."""
    facts: dict[str, str | int | float | bool] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "system": platform.system(),
    }
    if device == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(str(x) for x in torch.cuda.nccl.version())
    return facts


def settings(device: str, quick: bool) -> Facts:
    """How it was measured. One thread per rank on a CPU, as in the real runs."""
    facts: dict[str, str | int | float | bool] = {"quick": quick}
    if device == "cpu":
        facts |= {"threads_per_rank": torch.get_num_threads(), "malloc": "keeps freed memory"}
    elif ranks_share_gpus():
        facts |= {"collectives": "loopback: ranks share a GPU, nothing crosses NVLink"}
    return facts


def gpu_ranks() -> int:
    """Ranks that NCCL lets this machine's GPUs take: one each, or two each where ranks may share a GPU.

    NCCL 2.30.7 and later allow that with NCCL_MULTI_RANK_GPU_ENABLE=1. It is for trying things out: such ranks share
    one GPU, at once under CUDA's multi-process service and in turns without it, and what they send each other stays
    in its memory.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus * RANKS_SHARING if ranks_share_gpus() else gpus


def ranks_share_gpus() -> bool:
    """Whether NCCL was told that several ranks may use one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.3) -> float:
    """How many cores others keep busy while this process sleeps; 0 where the system does not say."""
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
