"""GPUs and clusters as data. Every figure is the vendor's; `source` names the document.

Peaks are dense (a sheet that prints "with sparsity" is halved), bandwidths per direction. Memory is binary:
what sheets print as GB is GiB, less under 1 % (nvidia-smi shows 81,559 MiB of an H100's 80 GB, 183,359 MiB of
a B200's 180 GB).

What no data sheet has is taken from NCCL's own cost model: seconds of a step (version 2.21,
src/graph/tuning.cc), and the part of a link's bandwidth that is left for data (src/graph/topo.h: of an
NVLink's 25 GB/s 20 on Volta and Ampere, 20.6 on Hopper, of Blackwell's 50 40.1; `nvlsEfficiency` in
tuning.cc, 2.27). A measured profile replaces them where it has points.
"""

from __future__ import annotations

from typing import Any

from topology.data_sheets import DATA_SHEET_GPUS
from topology.protocols import SIMPLE_NETWORK_S, SIMPLE_NVLINK_S
from topology.spec import Architecture, ClusterSpec, GpuSpec, InterNode, IntraNode

_T = 1e12

NVLINK_EFFICIENCY: dict[Architecture, float] = {
    "volta": 20 / 25,
    "ampere": 20 / 25,
    "hopper": 20.6 / 25,
    "blackwell": 40.1 / 50,
}
NVLS_EFFICIENCY: dict[Architecture, float] = {"hopper": 0.85, "blackwell": 0.74}
# Device-side floor of one kernel: the quickest GEMMs of NVIDIA AIConfigurator's database (Apache-2.0, commit 095f58a):
# 2.5 µs on A100, H100 and H200, 1.8 on B200, 1.9 on GB200, 1.7 on B300, GB300 and L40S, 1.8 on RTX PRO 6000; V100 is
# taken to be as A100. A host CPU has no such queue: one call of a library, nominal.
_LAUNCH_FLOOR_S = 2.5e-6
_LOOPBACK_LATENCY_S = 5e-5  # assumption: one TCP message between two processes of a busy host

_PCIE3_X16 = 15.75e9  # 8 GT/s * 16 lanes * 128/130, a direction (PCI Express base specification)
_PCIE4_X16 = 31.5e9
_PCIE5_X16 = 63e9
_GRACE_C2C_PER_GPU = 225e9  # NVLink-C2C 900 GB/s both ways per Grace, shared by its two GPUs

_AMPERE = {"fp32": 19.5 * _T, "tf32": 156 * _T, "bf16": 312 * _T, "fp16": 312 * _T, "int8": 624 * _T}
_HOPPER = {"fp32": 67 * _T, "tf32": 494.7 * _T, "bf16": 989.4 * _T, "fp16": 989.4 * _T}
_HOPPER |= {"fp8": 1978.9 * _T, "int8": 1978.9 * _T}


def _blackwell(fp32: float, fp16: float, nvfp4: float) -> dict[str, float]:
    """Peaks in Tflop/s of a Blackwell GPU: TF32 is half of 16-bit, 8-bit (fp8, mxfp8) twice."""
    peaks = {"fp32": fp32, "tf32": fp16 / 2, "bf16": fp16, "fp16": fp16}
    peaks |= {"fp8": 2 * fp16, "mxfp8": 2 * fp16, "nvfp4": nvfp4}
    return {dtype: value * _T for dtype, value in peaks.items()}


_V100 = {"fp32": 15.7 * _T, "fp16": 125 * _T}  # no bf16 and no fp8 tensor cores
# One rank of a CPU host: nominal figures of one AVX-512 core at 4 GHz (two 512-bit FMA units: 64 fp32 flops a
# cycle; bf16 dot products twice that). Real hosts differ by factors; `calibrate.run` measures the one at
# hand.
_CPU = {"fp32": 0.256 * _T, "bf16": 0.512 * _T}


def _gpu(
    name: str,
    architecture: Architecture,
    *,
    memory_gib: float,
    memory_gb_per_s: float,
    peaks: dict[str, float],
    power_w: float,
    sms: int,
    host: float,
    source: str,
    launch_s: float = _LAUNCH_FLOOR_S,
    **more: Any,
) -> GpuSpec:
    """One record; `host`: bytes a second to host memory; `more`: other fields of `GpuSpec`."""
    return GpuSpec(
        name=name,
        architecture=architecture,
        memory_bytes=memory_gib * 2**30,
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9,
        peak_flops_per_s=peaks,
        power_limit_w=power_w,
        sm_count=sms,
        host_bandwidth_bytes_per_s=host,
        launch_overhead_s=launch_s,
        source=source,
        **more,
    )


# A multiprocessor's scratch memory and dense 16-bit flops a clock: NVIDIA's V100, A100 and H100 whitepapers.
_VOLTA_SM = {"sm_sram_bytes": 96 << 10, "sm_flops_per_clock": 1024}
_AMPERE_SM = {"sm_sram_bytes": 164 << 10, "sm_flops_per_clock": 2048}
_HOPPER_SM = {"sm_sram_bytes": 228 << 10, "sm_flops_per_clock": 4096}

_GPU_LIST = (
    _gpu(
        "v100",
        "volta",
        memory_gib=32,
        memory_gb_per_s=900,
        peaks=_V100,
        power_w=300,
        sms=80,
        host=_PCIE3_X16,
        source="NVIDIA V100 data sheet (SXM2 32 GB), 2020; Volta whitepaper",
        **_VOLTA_SM,
    ),
    _gpu(
        "a100-sxm",
        "ampere",
        memory_gib=80,
        memory_gb_per_s=2039,
        peaks=_AMPERE,
        power_w=400,
        sms=108,
        host=_PCIE4_X16,
        source="NVIDIA A100 data sheet (80 GB SXM), 2021",
        **_AMPERE_SM,
    ),
    _gpu(
        "a100-sxm-40g",
        "ampere",
        memory_gib=40,
        memory_gb_per_s=1555,
        peaks=_AMPERE,
        power_w=400,
        sms=108,
        host=_PCIE4_X16,
        source="NVIDIA A100 data sheet (40 GB SXM), 2020",
        variant_of="a100-sxm",
        **_AMPERE_SM,
    ),
    _gpu(
        "a100-pcie",
        "ampere",
        memory_gib=80,
        memory_gb_per_s=1935,
        peaks=_AMPERE,
        power_w=300,
        sms=108,
        host=_PCIE4_X16,
        source="NVIDIA A100 data sheet (80 GB PCIe), 2021",
        nvlink=False,
        **_AMPERE_SM,
    ),
    _gpu(
        "h100-sxm",
        "hopper",
        memory_gib=80,
        memory_gb_per_s=3350,
        peaks=_HOPPER,
        power_w=700,
        sms=132,
        host=_PCIE5_X16,
        source="NVIDIA H100 data sheet (SXM); Hopper whitepaper",
        **_HOPPER_SM,
    ),
    _gpu(
        "h200-sxm",
        "hopper",
        memory_gib=141,
        memory_gb_per_s=4800,
        peaks=_HOPPER,
        power_w=700,
        sms=132,
        host=_PCIE5_X16,
        source="NVIDIA H200 data sheet (SXM)",
        **_HOPPER_SM,
    ),
    _gpu(
        "b200-sxm",
        "blackwell",
        memory_gib=180,
        memory_gb_per_s=8000,
        peaks=_blackwell(75, 2250, 9000),
        power_w=1000,
        sms=148,
        host=_PCIE5_X16,
        launch_s=1.8e-6,
        source="NVIDIA DGX B200 data sheet and HGX platform page, an eighth of the system's figures",
    ),
    _gpu(
        "b300-sxm",
        "blackwell",
        memory_gib=270,
        memory_gb_per_s=8000,
        peaks=_blackwell(75, 2250, 13500),
        power_w=1100,
        sms=148,
        host=_PCIE5_X16,
        launch_s=1.7e-6,
        source="NVIDIA DGX B300 data sheet and HGX platform page, an eighth of the system's figures",
    ),
    _gpu(
        "gb200",
        "blackwell",
        memory_gib=186,
        memory_gb_per_s=8000,
        peaks=_blackwell(80, 2500, 10000),
        power_w=1200,
        sms=152,
        host=_GRACE_C2C_PER_GPU,
        launch_s=1.9e-6,
        collectives_like="gb200",
        source="NVIDIA GB200 NVL72 data sheet, a 72nd of the rack's figures",
    ),
    _gpu(
        "gb300",
        "blackwell",
        memory_gib=279,
        memory_gb_per_s=8000,
        peaks=_blackwell(80, 2500, 15000),
        power_w=1400,
        sms=152,
        host=_GRACE_C2C_PER_GPU,
        launch_s=1.7e-6,
        collectives_like="gb300",
        source="NVIDIA GB300 NVL72 data sheet, a 72nd of the rack's figures; Blackwell Ultra technical blog",
    ),
    _gpu(
        "cpu",
        "cpu",
        memory_gib=8,
        memory_gb_per_s=20,
        peaks=_CPU,
        power_w=100,
        sms=1,
        host=20e9,
        launch_s=5e-6,
        nvlink=False,
        source="nominal figures of one core with AVX-512: an assumption",
    ),
    *DATA_SHEET_GPUS,
)

GPUS: dict[str, GpuSpec] = {gpu.name: gpu for gpu in _GPU_LIST}


def _dgx(
    name: str, gpu: str, nvlink_gb_per_s: float, nics: int, nic_gb_per_s: float, source: str, switched: bool = True
) -> ClusterSpec:
    """Eight GPUs a node. From Hopper on, the NVSwitches can reduce and multicast (NVLink SHARP)."""
    return ClusterSpec(
        name=name,
        gpu=GPUS[gpu],
        gpus_per_node=8,
        nvlink_domain=8,
        intra_node=IntraNode(
            kind="nvswitch" if switched else "nvlink_mesh",
            bandwidth_bytes_per_s=nvlink_gb_per_s * 1e9,
            latency_s=SIMPLE_NVLINK_S,
            efficiency=NVLINK_EFFICIENCY[GPUS[gpu].architecture],
            nvls_efficiency=NVLS_EFFICIENCY.get(GPUS[gpu].architecture, 0.0),
        ),
        inter_node=_fabric(nics, nic_gb_per_s),
        source=source,
    )


def _fabric(nics: int, nic_gb_per_s: float) -> InterNode:
    """A rail-optimized, full fat tree (NVIDIA DGX SuperPOD reference architectures)."""
    return InterNode(
        kind="rail_optimized",
        nics_per_node=nics,
        nic_bandwidth_bytes_per_s=nic_gb_per_s * 1e9,
        latency_s=SIMPLE_NETWORK_S,
        rendezvous=False,
    )


def _nvl72(name: str, gpu: str, nic_gb_per_s: float, source: str) -> ClusterSpec:
    """Compute trays of 4 GPUs; 18 trays share one NVLink domain."""
    return ClusterSpec(
        name=name,
        gpu=GPUS[gpu],
        gpus_per_node=4,
        nvlink_domain=72,
        intra_node=IntraNode(
            kind="nvswitch",
            bandwidth_bytes_per_s=900e9,
            latency_s=SIMPLE_NVLINK_S,
            efficiency=NVLINK_EFFICIENCY[GPUS[gpu].architecture],
            nvls_efficiency=NVLS_EFFICIENCY[GPUS[gpu].architecture],
        ),
        inter_node=_fabric(4, nic_gb_per_s),
        source=source,
    )


# Processes of one host that talk over loopback TCP. Nominal; a profile of the host replaces it. 64 ranks a
# node, so that every local run stays inside one.
_CPU_HOST = ClusterSpec(
    name="cpu-host",
    gpu=GPUS["cpu"],
    gpus_per_node=64,
    nvlink_domain=64,
    intra_node=IntraNode(kind="pcie", bandwidth_bytes_per_s=2.5e9, latency_s=_LOOPBACK_LATENCY_S, efficiency=1.0),
    inter_node=InterNode(
        nics_per_node=1, nic_bandwidth_bytes_per_s=1.25e9, latency_s=_LOOPBACK_LATENCY_S, efficiency=1.0
    ),
    source="nominal loopback and 10 Gbit/s Ethernet figures: assumptions",
)

# AWS p5.48xlarge: four EFA NICs of 100 Gbit/s a GPU. `latency_s` is what AWS's NCCL plugin declares (aws-ofi-nccl,
# platform-aws.c). `spread` is not of the machine but of a cluster that many share: from the 5th and 95th percentiles
# of bus bandwidths that the Ultra-Scale Playbook published, none of its medians (docs/collectives.md); 0 where nobody
# else is on the network.
_P5_EFA = _dgx("p5-efa", "h100-sxm", 450, 32, 12.5, "AWS EC2 P5 instances page; Ultra-Scale Playbook").model_copy(
    update={
        "inter_node": InterNode(
            kind="fat_tree",
            nics_per_node=32,
            nic_bandwidth_bytes_per_s=12.5e9,
            latency_s=75e-6,
            rendezvous=True,
            transport="posted",
            spread=0.8,
        )
    }
)

_CLUSTER_LIST = (
    _CPU_HOST,
    _dgx("dgx-v100", "v100", 150, 4, 12.5, "DGX-1 (V100) data sheet: 6 NVLink at 25 GB/s, 4 EDR NICs", switched=False),
    _dgx("dgx-a100", "a100-sxm", 300, 8, 25, "DGX A100 data sheet: 12 NVLink at 25 GB/s, 8 HDR NICs"),
    _dgx("dgx-h100", "h100-sxm", 450, 8, 50, "DGX H100 data sheet: 18 NVLink at 25 GB/s, 8 NDR NICs"),
    _dgx("dgx-h200", "h200-sxm", 450, 8, 50, "DGX H200 data sheet: 18 NVLink at 25 GB/s, 8 NDR NICs"),
    _dgx(
        "dgx-b200",
        "b200-sxm",
        900,
        8,
        50,
        "DGX B200 user guide: 14.4 TB/s NVLink, 8 ConnectX-7 at 400 Gbit/s",
    ),
    _dgx(
        "dgx-b300",
        "b300-sxm",
        900,
        8,
        100,
        "DGX B300 data sheet: 14.4 TB/s NVLink, 8 ConnectX-8 at 800 Gbit/s",
    ),
    _P5_EFA,
    _nvl72("gb200-nvl72", "gb200", 50, "GB200 NVL72 data sheet: 130 TB/s NVLink, 72 ConnectX-7 at 400 Gbit/s"),
    _nvl72("gb300-nvl72", "gb300", 100, "GB300 NVL72 data sheet: 130 TB/s NVLink, 72 ConnectX-8 at 800 Gbit/s"),
)


def _mesh(name: str, gpu: str, link: IntraNode, nics: int, nic_gb_per_s: float, source: str) -> ClusterSpec:
    """Eight chips, each with links to all seven others."""
    return ClusterSpec(
        name=name,
        gpu=GPUS[gpu],
        gpus_per_node=8,
        nvlink_domain=8,
        intra_node=link,
        inter_node=_fabric(nics, nic_gb_per_s),
        source=source,
    )


def _full_mesh(gb_per_s: float, efficiency: float) -> IntraNode:
    """`gb_per_s`: of a chip's links together."""
    bandwidth = gb_per_s * 1e9
    step_s = SIMPLE_NVLINK_S  # nobody published a library's step on such links
    return IntraNode(kind="full_mesh", bandwidth_bytes_per_s=bandwidth, latency_s=step_s, efficiency=efficiency)


def _ici(name: str, gpu: str, links: int, link_gb_per_s: float, source: str) -> ClusterSpec:
    """Chips on a torus, each a node of its own: its links lead to its neighbours, and there is no other network.

    Of a side's links 0.9 is left for data, and a hop takes a microsecond (both: J. Austin et al., "How to Scale Your
    Model", 2025, appendix of chapter 2: 90 of v5p's 100 GB/s; of 45 GB/s of v5e's 50).
    """
    return ClusterSpec(
        name=name,
        gpu=GPUS[gpu],
        gpus_per_node=1,
        nvlink_domain=1,
        intra_node=IntraNode(kind="pcie", bandwidth_bytes_per_s=GPUS[gpu].host_bandwidth_bytes_per_s),
        inter_node=InterNode(
            kind="torus",
            nics_per_node=links,
            nic_bandwidth_bytes_per_s=link_gb_per_s * 1e9,
            latency_s=1e-6,
            efficiency=0.9,
            rendezvous=False,
        ),
        source=source,
    )


# AMD counts 48 of a link's 64 GB/s as usable (ROCm blog, "Understanding RCCL Bandwidth and xGMI Performance on AMD
# Instinct MI300X", 2025). Of Ethernet the house's share of a NIC is left.
_XGMI_EFFICIENCY = 48 / 64
_UNMEASURED = "no measurement of its collectives"
_WITHOUT_SWITCHES = (
    _mesh(
        "mi300x-node",
        "mi300x",
        _full_mesh(448, _XGMI_EFFICIENCY),
        8,
        50,
        f"AMD Instinct MI300X platform data sheet: 7 links of 64 GB/s; 400 Gbit/s a GPU assumed; {_UNMEASURED}",
    ),
    _mesh(
        "mi325x-node",
        "mi325x",
        _full_mesh(448, _XGMI_EFFICIENCY),
        8,
        50,
        f"AMD Instinct MI325X platform data sheet: 7 links of 64 GB/s; 400 Gbit/s a GPU assumed; {_UNMEASURED}",
    ),
    _mesh(
        "mi355x-node",
        "mi355x",
        _full_mesh(537.6, _XGMI_EFFICIENCY),
        8,
        50,
        f"AMD Instinct MI355X platform data sheet: 7 links of 76.8 GB/s; 400 Gbit/s a GPU assumed; {_UNMEASURED}",
    ),
    _mesh(
        "gaudi2-node",
        "gaudi2",
        _full_mesh(262.5, 0.96),
        24,
        12.5,
        f"Intel Gaudi 2 HLS reference: 3 ports of 100 Gbit/s to each of seven, 3 outward; {_UNMEASURED}",
    ),
    _mesh(
        "gaudi3-node",
        "gaudi3",
        _full_mesh(525, 0.96),
        24,
        25,
        f"Intel Gaudi 3 whitepaper: 3 ports of 200 Gbit/s to each of seven, 3 outward; {_UNMEASURED}",
    ),
    _ici("tpu-v5e-torus", "tpu-v5e", 4, 50, f"Google Cloud documentation: 2D torus, 4 links; {_UNMEASURED}"),
    _ici("tpu-v5p-torus", "tpu-v5p", 6, 100, f"Google Cloud documentation: 3D torus, 6 links; {_UNMEASURED}"),
    _ici("tpu-v6e-torus", "tpu-v6e", 4, 100, f"Google Cloud documentation: 2D torus, 4 links; {_UNMEASURED}"),
    _ici("tpu-v7-torus", "tpu-v7", 6, 100, f"Google Cloud documentation: 3D torus, 6 links; {_UNMEASURED}"),
)

CLUSTERS: dict[str, ClusterSpec] = {cluster.name: cluster for cluster in (*_CLUSTER_LIST, *_WITHOUT_SWITCHES)}
