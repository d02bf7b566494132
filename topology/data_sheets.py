"""GPUs and other accelerators known by their data sheets alone: no measured kernel, so the roofline prices them.

Peaks are dense and accumulate in fp32, in Tflop/s; a dtype that a sheet does not name has none. `link` is what one chip
sends to others of its node over links of its own, a direction: meshes and tori (xGMI, ICI, Gaudi's Ethernet) count as a
switch of that bandwidth, so all ranks of a node together are right and a single pair is too fast. Where it is left out
and `nvlink` is false, PCIe.
"""

from __future__ import annotations

from topology.spec import Architecture, GpuSpec

_PCIE4_X16 = 31.5e9  # 16 GT/s * 16 lanes * 128/130, a direction
_PCIE5_X16 = 63e9
_NVIDIA_LAUNCH_S = 2.5e-6  # as A100, H100 and H200 (topology.presets)


def _known(
    name: str,
    source: str,
    memory_gib: float,
    memory_gb_per_s: float,
    peaks: dict[str, float],
    power_w: float,
    architecture: Architecture = "other",
    units: int = 1,
    host: float = _PCIE5_X16,
    link_gb_per_s: float | None = None,
) -> GpuSpec:
    """One record; `units`: multiprocessors or compute units."""
    nvidia = architecture != "other"
    return GpuSpec(
        name=name,
        architecture=architecture,
        memory_bytes=memory_gib * 2**30,
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9,
        peak_flops_per_s={dtype: value * 1e12 for dtype, value in peaks.items()},
        power_limit_w=power_w,
        sm_count=units,
        host_bandwidth_bytes_per_s=host,
        nvlink=link_gb_per_s is not None,
        link_bandwidth_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
        source=source,
        **({"launch_overhead_s": _NVIDIA_LAUNCH_S} if nvidia else {}),
    )


def _peaks(fp32: float, sixteen: float, tf32: float | None = None, **more: float) -> dict[str, float]:
    peaks = {"fp32": fp32, "bf16": sixteen, "fp16": sixteen, **more}
    return peaks if tf32 is None else {**peaks, "tf32": tf32}


_CDNA3 = _peaks(163.4, 1307.4, 653.7, fp8=2614.9, int8=2614.9)
_CDNA4 = _peaks(157.3, 2516.6, fp8=5033.2, mxfp8=5033.2, fp4=10066.3, int8=5033.2)
_HOPPER = _peaks(67, 989.4, 494.7, fp8=1978.9, int8=1978.9)
_ADA_4090 = _peaks(82.6, 165.2, 82.6, fp8=330.3, int8=660.6)
_RTX_5090 = _peaks(104.8, 209.5, 104.8, fp8=419, mxfp8=419, nvfp4=1676, int8=838)
_RTX_PRO = _peaks(125, 503.8, 251.9, fp8=1007.6, mxfp8=1007.6, nvfp4=2015.2)
_RTX_PRO_SERVER = _peaks(117, 467.8, 233.9, fp8=935.6, mxfp8=935.6, nvfp4=1871.2)

DATA_SHEET_GPUS = (
    # 7 xGMI links of 64 GB/s; of MI355X 76.8
    _known("mi300x", "AMD Instinct MI300X data sheet", 192, 5300, _CDNA3, 750, units=304, link_gb_per_s=448),
    _known("mi325x", "AMD Instinct MI325X data sheet", 256, 6000, _CDNA3, 1000, units=304, link_gb_per_s=448),
    _known("mi355x", "AMD Instinct MI355X data sheet", 288, 8000, _CDNA4, 1400, units=256, link_gb_per_s=537.6),
    _known(
        "h20",
        "NVIDIA has no public data sheet: figures of its product brief as the press printed them (2023)",
        96,
        4000,
        _peaks(44, 148, 74, fp8=296, int8=296),
        400,
        "hopper",
        78,
        link_gb_per_s=450,
    ),
    _known(
        "h100-pcie",
        "NVIDIA H100 data sheet (PCIe); Hopper whitepaper; pairs by NVLink bridges are not modelled",
        80,
        2000,
        _peaks(51, 756.5, 378, fp8=1513, int8=1513),
        350,
        "hopper",
        114,
    ),
    _known(
        "h100-nvl",
        "NVIDIA H100 NVL data sheet; pairs by NVLink bridges are not modelled",
        94,
        3900,
        _peaks(60, 835.5, 417.5, fp8=1670.5, int8=1670.5),
        400,
        "hopper",
        132,
    ),
    _known(
        "gh200",
        "NVIDIA GH200 data sheet (96 GB HBM3); host by NVLink-C2C, 900 GB/s both ways",
        96,
        4000,
        _HOPPER,
        1000,
        "hopper",
        132,
        450e9,
        link_gb_per_s=450,
    ),
    _known(
        "l40s",
        "NVIDIA L40S data sheet",
        48,
        864,
        _peaks(91.6, 362.05, 183, fp8=733, int8=733),
        350,
        "ada",
        142,
        _PCIE4_X16,
    ),
    _known(
        "l4",
        "NVIDIA L4 data sheet, half of the figures with sparsity",
        24,
        300,
        _peaks(30.3, 121, 60, fp8=242.5, int8=242.5),
        72,
        "ada",
        58,
        _PCIE4_X16,
    ),
    _known("a10", "NVIDIA A10 data sheet", 24, 600, _peaks(31.2, 125, 62.5, int8=250), 150, "ampere", 72, _PCIE4_X16),
    _known("a30", "NVIDIA A30 data sheet", 24, 933, _peaks(10.3, 165, 82, int8=330), 165, "ampere", 56, _PCIE4_X16),
    _known("rtx4090", "NVIDIA Ada whitepaper, appendix A", 24, 1008, _ADA_4090, 450, "ada", 128, _PCIE4_X16),
    _known("rtx5090", "NVIDIA RTX Blackwell whitepaper, appendix A", 32, 1792, _RTX_5090, 575, "blackwell", 170),
    _known(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet; RTX Blackwell PRO whitepaper",
        96,
        1792,
        _RTX_PRO,
        600,
        "blackwell",
        188,
    ),
    _known(
        "rtx-pro-6000-server",
        "RTX Blackwell PRO whitepaper; peaks at the 2,430 MHz, power and memory of the machine that NVIDIA "
        "AIConfigurator measured",
        95.6,
        1792,
        _RTX_PRO_SERVER,
        600,
        "blackwell",
        188,
    ),
    _known(
        "tpu-v5e",
        "Google Cloud documentation, TPU v5e; ICI 400 GB/s both ways; host link and power are assumptions",
        16,
        819,
        {"bf16": 197, "int8": 393},
        500,
        host=25e9,
        link_gb_per_s=200,
    ),
    _known(
        "tpu-v5p",
        "Google Cloud documentation, TPU v5p; ICI 1,200 GB/s both ways; host link and power are assumptions",
        95,
        2765,
        {"bf16": 459, "int8": 918},
        500,
        host=25e9,
        link_gb_per_s=600,
    ),
    _known(
        "tpu-v6e",
        "Google Cloud documentation, TPU v6e; ICI 800 GB/s both ways; power is an assumption",
        32,
        1638,
        {"bf16": 918, "int8": 1836},
        500,
        link_gb_per_s=400,
    ),
    _known(
        "tpu-v7",
        "Google Cloud documentation, TPU7x (Ironwood); ICI 1,200 GB/s both ways; power is an assumption",
        192,
        7380,
        {"bf16": 2307, "fp8": 4614},
        1000,
        link_gb_per_s=600,
    ),
    # 21 of 24 Ethernet ports lead to the node's other chips
    _known(
        "gaudi2",
        "Intel Gaudi 2 data sheet and Gaudi 3 whitepaper: 24 ports of 100 Gbit/s",
        96,
        2450,
        {"bf16": 432, "fp8": 865},
        600,
        host=_PCIE4_X16,
        link_gb_per_s=262.5,
    ),
    _known(
        "gaudi3",
        "Intel Gaudi 3 whitepaper (OAM): 24 ports of 200 Gbit/s",
        128,
        3700,
        {"bf16": 1835, "fp8": 1835},
        900,
        link_gb_per_s=525,
    ),
    _known(
        "trainium2",
        "AWS Neuron documentation, Trainium2: NeuronLink 1.28 TB/s both ways; power is an assumption",
        96,
        2900,
        {"fp32": 181, "bf16": 667, "fp16": 667, "fp8": 1299},
        500,
        host=25e9,
        link_gb_per_s=640,
    ),
)
