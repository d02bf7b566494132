"""The description of a cluster: what a user may write under `cluster`, with every default filled in."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GpuSpec(_Spec):
    """One accelerator's data-sheet figures. `peak_flops_per_s`: dense, per dtype (fp32, tf32, bf16, fp16, fp8, ...)."""

    name: str
    memory_bytes: float = Field(gt=0, le=1e15)
    memory_bandwidth_bytes_per_s: float = Field(gt=0, le=1e18)
    peak_flops_per_s: dict[str, float]
    power_limit_w: float = Field(default=500.0, gt=0, le=1e5)
    sm_count: int = Field(default=1, ge=1, le=10_000)
    host_bandwidth_bytes_per_s: float = Field(default=25e9, gt=0, le=1e18)  # PCIe or C2C to host memory, a direction
    launch_overhead_s: float = Field(default=5e-6, ge=0, le=1)  # device-side floor of one kernel
    source: str = ""


class IntraNode(_Spec):
    """Links within a node (or NVLink domain). Bandwidth: per GPU and direction."""

    kind: Literal["nvswitch", "nvlink_mesh", "pcie"] = "nvswitch"
    bandwidth_bytes_per_s: float = Field(default=450e9, gt=0, le=1e18)
    latency_s: float = Field(default=2e-6, ge=0, le=10)


class InterNode(_Spec):
    """Links between nodes. `oversubscription`: 2.0 halves the bandwidth above the leaf switches."""

    kind: Literal["fat_tree", "rail_optimized", "torus"] = "fat_tree"
    nics_per_node: int = Field(default=8, ge=1, le=1024)
    nic_bandwidth_bytes_per_s: float = Field(default=50e9, gt=0, le=1e18)
    latency_s: float = Field(default=5e-6, ge=0, le=10)
    oversubscription: float = Field(default=1.0, ge=1.0, le=1000)


class ClusterSpec(_Spec):
    """Nodes of equal GPUs. `nvlink_domain`: GPUs that share NVLink (the node's, or 72)."""

    name: str = "custom"
    gpu: GpuSpec
    gpus_per_node: int = Field(default=8, ge=1, le=1024)
    nodes: int = Field(default=1, ge=1, le=1_000_000)
    nvlink_domain: int = Field(default=8, ge=1, le=1024)
    intra_node: IntraNode = IntraNode()
    inter_node: InterNode = InterNode()
    source: str = ""
