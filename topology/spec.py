"""The description of a cluster: what a user may write under `cluster`, with every default filled in."""

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)

from topology.architectures import ARCHITECTURES, Architecture, Chip, CollectivesOf
from topology.wiring import Wiring, node_link


# No `from __future__ import annotations` here: pydantic would compile each annotation from its text.
class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


PEAK_NAMES = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp4", "int8", "int4")
"""Dtypes that a GPU may have a peak of."""


class GpuSpec(_Spec):
    """Hold one accelerator's data-sheet figures.

    `peak_flops_per_s`: dense, per dtype (fp32, tf32, bf16, ...). `architecture`: see `chip`. The collectives of `other`
    start and step as Hopper's do, with a warning.
    `collectives_like`: the GPU whose measured collectives are used, if several GPUs of the architecture were measured.
    `variant_of`: the shipped GPU whose machine and profile are used, because only the memory or the links differ.
    `sm_sram_bytes`: the most shared memory that kernels can use on a multiprocessor. `sm_flops_per_clock`: dense 16-bit
    flops of a multiprocessor. Both are 0 if unknown. `memory_shown`: the part of the memory that CUDA reports; 1 if
    unknown. `link_bandwidth_bytes_per_s`: bandwidth per direction of the GPU's own links within a node, if it differs
    from its machine's or no shipped machine has it.
    """

    name: str
    architecture: Architecture = "other"
    collectives_like: CollectivesOf | None = None
    variant_of: str = ""
    nvlink: bool = True  # False: links within a node are PCIe, unless `intra_node` says otherwise
    link_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0, le=1e18)
    memory_bytes: float = Field(gt=0, le=1e15)
    memory_shown: float = Field(default=1.0, gt=0, le=1)
    memory_bandwidth_bytes_per_s: float = Field(gt=0, le=1e18)
    peak_flops_per_s: dict[str, Annotated[float, Field(gt=0, le=1e24)]]
    power_limit_w: float = Field(default=500.0, gt=0, le=1e5)
    sm_count: int = Field(default=1, ge=1, le=10_000)
    host_bandwidth_bytes_per_s: float = Field(default=25e9, gt=0, le=1e18)  # PCIe or C2C, per direction
    launch_overhead_s: float = Field(default=5e-6, ge=0, le=1)  # shortest time of one kernel on the device
    sm_sram_bytes: int = Field(default=0, ge=0, le=10**9)
    sm_flops_per_clock: int = Field(default=0, ge=0, le=10**9)
    source: str = ""

    @property
    def shown_bytes(self) -> float:
        """Memory that CUDA reports as the GPU's total."""
        return self.memory_bytes * self.memory_shown

    @property
    def chip(self) -> Chip:
        """Return what all GPUs of its architecture have in common."""
        return ARCHITECTURES[self.architecture]

    @property
    def kernel_architecture(self) -> Architecture:
        """Return the architecture whose kernels and defaults serving engines have on this GPU."""
        return self.chip.kernels_of or self.architecture

    def same_multiprocessors(self, other: "GpuSpec") -> bool:
        """Tell whether only the board differs: one architecture, as many FLOPs a clock and multiprocessor."""
        rate = self.sm_flops_per_clock
        return self.architecture == other.architecture and rate > 0 and rate == other.sm_flops_per_clock

    @field_validator("peak_flops_per_s")
    @classmethod
    def _of_known_dtypes(cls, peaks: dict[str, float]) -> dict[str, float]:
        unknown = next((name for name in peaks if name not in PEAK_NAMES), None)
        if unknown is not None:
            raise ValueError(f"unknown dtype {unknown!r} (allowed: {', '.join(PEAK_NAMES)})")
        return peaks


class IntraNode(_Spec):
    """Describe the links within a node (or NVLink domain). The bandwidth is per GPU and direction.

    `efficiency`: the part of the bandwidth that is left for data after headers. `nvls_efficiency`: the part of that
    which is left when the switches reduce and multicast (NVLink SHARP); 0 if they cannot. `nvlink_mesh`: GPUs linked
    without a switch; 8 GPUs form NVIDIA's hybrid cube mesh. `full_mesh`: every two GPUs have the same number of links.
    `latency_s`: one step of a ring with large messages (NCCL's protocol Simple); steps of small messages are shorter.
    """

    kind: Literal["nvswitch", "nvlink_mesh", "full_mesh", "pcie"] = "nvswitch"
    bandwidth_bytes_per_s: float = Field(default=450e9, gt=0, le=1e18)
    latency_s: float = Field(default=3.4e-6, ge=0, le=10)
    efficiency: float = Field(default=0.8, gt=0, le=1)
    nvls_efficiency: float = Field(default=0.0, ge=0, le=1)

    @property
    def meshed(self) -> bool:
        """Tell whether links join GPUs to each other without a switch."""
        return self.kind in ("nvlink_mesh", "full_mesh")

    @property
    def all_linked(self) -> bool:
        """Tell whether every two GPUs have links of their own."""
        return self.kind == "full_mesh"

    @property
    def switched(self) -> bool:
        """Tell whether NVSwitches join the GPUs."""
        return self.kind == "nvswitch"

    @property
    def through_host(self) -> bool:
        """Tell whether messages between GPUs cross the host's PCIe."""
        return self.kind == "pcie"

    @property
    def usable_bytes_per_s(self) -> float:
        """Bandwidth of a GPU that is left for data, per direction."""
        return self.bandwidth_bytes_per_s * self.efficiency


class InterNode(_Spec):
    """Describe the links between nodes. `oversubscription`: 2.0 halves the bandwidth above the leaf switches.

    `nodes_per_leaf`: number of consecutive nodes whose NICs share leaf switches. With the default of 1, every message
    between nodes goes above its leaf, so oversubscription slows all of them. It has no effect on a torus.
    `efficiency`: the part of a NIC's bandwidth that is left for data (NCCL's src/graph/topo.h counts 12 GB/s of
    100 Gbit/s). `rendezvous`: the transport matches sender and receiver for each message, as libfabric does; false if
    receivers post buffers in advance (InfiniBand, RoCE). `transport`: auto (decided by `rendezvous` and the latency) or
    posted (receivers post buffers in advance, whatever the latency: EFA). `spread`: on a shared network, σ of the
    log-normal part of each node's NICs that other jobs leave; a collective gets the median of its slowest node's part.
    `sharp`: the switches reduce (InfiniBand SHARP, with NCCL's plugin and NCCL_COLLNET_ENABLE=1). `pat`: NCCL may
    gather and scatter over parallel trees where a group has one GPU a node, as 2.23 and later do; false: it is older;
    None: as its release does (`nccl.nccl_at`), which for a network by itself is the newest one.
    """

    kind: Literal["fat_tree", "rail_optimized", "torus"] = "fat_tree"
    nics_per_node: int = Field(default=8, ge=1, le=1024)
    nic_bandwidth_bytes_per_s: float = Field(default=50e9, gt=0, le=1e18)
    latency_s: float = Field(default=14e-6, ge=0, le=10)
    oversubscription: float = Field(default=1.0, ge=1.0, le=1000)
    nodes_per_leaf: int = Field(default=1, ge=1, le=100_000)
    efficiency: float = Field(default=0.96, gt=0, le=1)
    rendezvous: bool = False
    transport: Literal["auto", "posted"] = "auto"
    spread: float = Field(default=0.0, ge=0, le=3)
    sharp: bool = False
    pat: bool | None = None

    @property
    def is_torus(self) -> bool:
        """Tell whether nodes are linked to their neighbours, without switches."""
        return self.kind == "torus"

    @property
    def has_rails(self) -> bool:
        """Tell whether a leaf switch joins the NICs of one number only; to others, messages cross NVLink first."""
        return self.kind == "rail_optimized"

    @property
    def usable_bytes_per_s(self) -> float:
        """Bandwidth of one NIC that is left for data, per direction."""
        return self.nic_bandwidth_bytes_per_s * self.efficiency


class GpuKind(_Spec):
    """Describe a further kind of GPU in a mixed cluster, and the links inside its nodes."""

    gpu: GpuSpec
    intra_node: IntraNode


class ClusterSpec(_Spec):
    """Describe nodes of GPUs. `nvlink_domain`: GPUs that share NVLink (72 on NVL72); if left out, those of a node.

    `topology`: the network's parts and links, if it is not regular; the other fields then hold the most frequent value
    of each kind of link (`topology.recognise`). `others`: the further kinds of GPUs of a mixed cluster; `topology` has
    the kind of each rank.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str = "custom"
    gpu: GpuSpec
    gpus_per_node: int = Field(default=8, ge=1, le=1024)
    nodes: int = Field(default=1, ge=1, le=10_000_000)
    nvlink_domain: int = Field(default=8, ge=1, le=1024)
    intra_node: IntraNode = IntraNode.model_construct()
    inter_node: InterNode = InterNode.model_construct()
    host_memory_bandwidth_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1e15,
        description="bandwidth of a node's host memory, all sockets together; null: not known",
    )
    source: str = ""
    others: tuple[GpuKind, ...] = ()
    topology: Annotated[SkipValidation[Wiring | None], WithJsonSchema({"type": ["string", "object", "null"]})] = None

    @field_serializer("topology")
    def _as_node_link(self, topology: Wiring | None) -> dict[str, Any] | None:
        return None if topology is None else node_link(topology)

    @field_validator("others", mode="before")
    @classmethod
    def _as_tuple(cls, others: Any) -> Any:
        return tuple(others) if isinstance(others, list) else others

    @model_validator(mode="before")
    @classmethod
    def _domain_is_the_node(cls, data: Any) -> Any:
        if isinstance(data, dict) and "nvlink_domain" not in data:
            return {**data, "nvlink_domain": data.get("gpus_per_node", 8)}
        return data

    @model_validator(mode="after")
    def _whole_nodes(self) -> "ClusterSpec":
        if self.nvlink_domain > self.gpus_per_node and self.nvlink_domain % self.gpus_per_node:
            raise ValueError(
                f"nvlink_domain is {self.nvlink_domain}; it must be gpus_per_node ({self.gpus_per_node}) "
                "or a multiple of it"
            )
        return self

    @property
    def domain_gpus(self) -> int:
        """GPUs in an NVLink domain: at least a node's, because PCIe within a node counts as its fast level."""
        return max(self.nvlink_domain, self.gpus_per_node) if self.intra_node.switched else self.gpus_per_node

    @property
    def gpus(self) -> tuple[GpuSpec, ...]:
        """The kinds of GPUs, the most frequent first."""
        return (self.gpu, *(other.gpu for other in self.others))

    def gpu_of(self, rank: int) -> GpuSpec:
        """Return the GPU of a rank."""
        name = self.kind_of(rank)
        return next(gpu for gpu in self.gpus if gpu.name == name)

    def kind_of(self, rank: int) -> str:
        """Return the name of a rank's GPU."""
        return self.topology.gpu_of(rank) if self.others and self.topology is not None else self.gpu.name

    def mean_over(self, ranks: int, figure: Callable[[GpuSpec], float]) -> float:
        """Return the mean of a GPU's figure over the first `ranks` ranks."""
        if not self.others:
            return figure(self.gpu)
        counts = Counter(self.kind_of(rank) for rank in range(ranks))
        return sum(counts[gpu.name] * figure(gpu) for gpu in self.gpus) / ranks

    def of_kind(self, name: str) -> "ClusterSpec":
        """Return the cluster as if all its GPUs were of the kind `name`."""
        own: dict[str, Any] = {"others": ()}
        for other in self.others:
            if other.gpu.name == name:
                own |= {"gpu": other.gpu, "intra_node": other.intra_node}
        return self.model_copy(update=own)
