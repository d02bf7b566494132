"""The figures that `build_profiles.py` puts into shipped profiles and that are in no table of kernels, with sources."""

from __future__ import annotations

from attention_coefficients import (
    A100_FLASH,
    A100_FLASH2,
    B200_FLASH,
    H100_FLASH,
    PCIE_ATTENTION,
    Coefficients,
    sparse,
)

from topology.presets import GPUS

_SOURCE = (
    "kernels and collectives: NVIDIA AIConfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0, {}), "
    "its performance database{}; coefficients as each of them says"
)
_NEWER = ("package aiconfigurator_core 0.12.0", ", TensorRT-LLM 1.3.0rc20, the engine of the tables of H100 to GB200")
_PCIE_NCCL = (
    ", NCCL 2.27.3 for pairs; groups of 4 and 8 had no direct way on that host, 1 to 5 GB/s each, and are left out"
)
# Parts of a profile's source that differ: where its kernels are from, and which engine ran them.
_FROM = {
    "b300-sxm": (_NEWER[0], f"{_NEWER[1]}, NCCL 2.29.2"),
    "gb300": (_NEWER[0], f"{_NEWER[1]}, NCCL 2.29.2"),
    "l40s": (_NEWER[0], f"{_NEWER[1]}{_PCIE_NCCL}"),
    "rtx-pro-6000-server": (_NEWER[0], f"{_NEWER[1]}, NCCL 2.29.2"),
}


def source_of(gpu: str) -> str:
    """Return the source of a GPU's measured kernels."""
    return _SOURCE.format(*_FROM.get(gpu, ("commit 095f58a", "")))


# For each GPU without measured kernels the GPU whose kernels it takes: the nearest relative by architecture.
RELATIVES = {"v100": "a100-sxm", "a100-pcie": "a100-sxm"}

_STREAM = "assumption: a streaming kernel reaches 0.85 of the data sheet's bandwidth, as published STREAM runs do"
_NORM = "torch's LayerNorm in liger_kernels.json (A100, H100, by eye over its rows): 3.7 accesses' time for two"
_TE_NORM = (
    "RMSNorm, both ways, of Transformer Engine 2.11 under Megatron-Core 0.16 on an H100: four layers of Llama 3 8B "
    "over 8,192 tokens (scenarios/measured/gpu_megatron)"
)
_RAMP = "assumption: an empty kernel occupies the device for about 2 us"
_POWER = {
    "a100": "every second row of megatron_sc21_table1, from a prior of 1.17 (random data run 0.89 of the speed of "
    "zeros: H. He, 2024, thonking.ai)",
    "h100": "the median of 598 matmuls in bf16 and of 446 in fp8 that calibrate.run measured on an H200 is met to 1 % "
    "(scenarios/cuda/h200.json); loops of one matmul that have settled would have 1.34 (h200_power.json)",
    "b200": "least soft-L1 loss over every second GEMM of b200_kernels from 1e12 flops on (shorter ones end before the "
    "clock has settled), with result_exposed: 1.35 of the time of AIConfigurator's",
    "gb200": "a B200's watts, 500 and 0.573 a Tflop/s in 16 bits (1.79 at 2,250), at a GB200's 2,500 by its 1,200 W",
    "b300": "a B200's watts, 500 and 0.573 a Tflop/s in 16 bits, by a B300's 1,100 W",
    "gb300": "a B200's watts, 500 and 0.573 a Tflop/s in 16 bits, at a GB300's 2,500 by its 1,400 W",
}
_FITTED = (
    "tools/fit_power.py: dense steps in 8 bits of {}; not a power that was measured, as a B200 and a GB200 differ more "
    "than one chip on two boards should"
)
_WATTS = "a {}'s energy for a flop, by this GPU's {:,} W"
# In 8 bits: value and source.
NARROW_POWER: dict[str, tuple[float, str]] = {
    "b200": (1.43, _FITTED.format("mlperf_training_lora and mlperf_training_gpt3")),
    "gb200": (1.77, _FITTED.format("megatron_bridge_h100_gb200, mlperf_training_405b and mlperf_training_lora")),
    "b300": (1.35, _WATTS.format("B200", 1100)),
    "gb300": (1.59, _WATTS.format("GB200", 1400)),
}
_FALLBACK = "assumption: a large matmul of a dtype that was not measured reaches 0.75 of its peak"
_SPREAD = (
    "clocks of equal GPUs under their power limit differ by 8 % (P. Sinha et al. 2022, arXiv 2208.11035), read as 5.4 "
    "standard deviations (outliers set apart); an A100's power_at_peak, fitted to whole steps, has it in"
)
_GROUPS = "every second grouped matmul of b200_kernels, where groups are small: a launch each (Transformer Engine)"
_LAUNCH = "assumption: an eager framework issues about 200,000 kernels a second from one host thread"


_HOST = (
    "fitted to every fifth configuration of vtrain_single_node (sums of one profiled layer, A100): see docs/accuracy.md"
)
A100_HOST: Coefficients = {
    "host_operator_s": (5.3e-5, _HOST),
    "host_collective_s": (1.8e-5, _HOST),
    "host_message_s": (1.2e-4, _HOST),
    "host_step_s": (1.2e-3, _HOST),
}
_EAGER = (
    "53 us an operator as fitted for Megatron on A100 hosts, times 0.96: Liger's LayerNorm, both ways, bound by "
    "the host at small widths, took 278 to 285 us beside an A100 and 266 to 275 beside an H100 (liger_kernels)"
)
_UNMEASURED = "assumption: as on A100 hosts"
_H200 = "measured on two H200 machines (calibrate.run, scenarios/cuda/h200.json and h200_host.json)"
NEWER_HOST: Coefficients = {
    "host_operator_s": (5.1e-5, _EAGER),
    "host_collective_s": (3e-5, _UNMEASURED),
    "host_message_s": (1e-4, _UNMEASURED),
    "host_operator_eager_s": (3e-5, f"28 and 32 us: plain torch, a narrow GPT, {_H200}"),
    "host_step_s": (5e-4, f"0.37 and 0.72 ms, {_H200}"),
}
_TWICE = (
    "computed: gradients' sums leave the tensor cores every 128 steps to be added in fp32 (Transformer Engine: "
    "_2X_ACC_DGRAD, _2X_ACC_WGRAD; CUTLASS: 4 instructions of 32): a tile of 128 x 128 takes 128 clocks of 128 lanes "
    "beside 512 of the tensor cores, which wait meanwhile"
)
_BLOCKS = (
    "AIConfigurator 0.12.0 (NVIDIA, Apache-2.0), TensorRT-LLM 1.3.0rc20 on {}, gemm_perf (m, n, k, "
    "gemm_dtype, latency): median of fp8_block by fp8 over the 1,470 matmuls from 1e12 flops on, each without the "
    "quantizing of its input (`quantizing` in build_profiles says how); taken by hand, no tool reads it"
)
_ROWS = (
    "pytorch/pytorch issue 147971: CUTLASS's rowwise matmul on an H100, fast accumulation, has 90 to 100 % of cuBLAS's "
    "speed in most shapes: the middle"
)
_CUDA_11 = (
    "pytorch/pytorch issue 100850: a product of 2,048 x 8,192 x 8,192 in 16 bits on an H100 with cuBLAS 11.11.3 has "
    "720 Tflop/s (with cuBLAS 12.0.2 743); this profile's points have 794"
)
_QUANTIZE = (
    "AIConfigurator 0.12.0 (NVIDIA, Apache-2.0), vLLM 0.24.0 on {}: tensors of 2^29 elements and more, the largest "
    "values read (computescale_perf) and cast from 16 to 8 bits (scale_matrix_perf), 5 bytes an element (m, k, "
    "latency); taken by hand, no tool reads them"
)
BLOCKWISE = {"h100-sxm": 1.24, "h200-sxm": 1.23, "b200-sxm": 1.07}  # and their relatives
CASTS = {"h100-sxm": 0.92, "h200-sxm": 0.89, "b200-sxm": 0.85}
_BLOCK_CASTS = (
    "AIConfigurator 0.12.0 (NVIDIA, Apache-2.0), TensorRT-LLM 1.3.0rc20 on {}, gemm_perf (m, n, k, "
    "gemm_dtype, latency): what fp8_block matmuls take to quantize their input (`quantizing` in build_profiles says "
    "how): {} ps an element of 3.03 bytes; taken by hand, no tool reads it"
)
BLOCK_CASTS = {"h100-sxm": (0.52, 1.75), "h200-sxm": (0.36, 1.77), "b200-sxm": (0.74, 0.51)}
_STRIDED = (
    "pytorch/pytorch pull request 137053: casts of 2^29 numbers from 32 to 16 bits by a kernel that is not vectorized, "
    "2.225 ms on a power-limited H100 PCIe, by a vectorized one 1.736 ms: that part of the 0.85 that streaming kernels "
    "reach; taken by hand, no tool reads it"
)
_SOFTMAX = "torch's softmax {} of 2^27 fp32 numbers, measured on an H200 (calibrate.run, scenarios/cuda/h200.json)"
_SHORT_SOFTMAX = "rows of 1,024, with the product before it: GPT-2's attention on an H100 (gpt2l_unfused_dropout)"
_LONG_SOFTMAX = (
    "log-softmax {} in 17 steps of Transformers models on an H100, rows of 30,000 to 260,000 fp32 numbers: the median; "
    "16 are within 6 %, BERT's takes less than half (scenarios/measured/gpu_programs)"
)
_LOSS = (
    "torch's cross-entropy {} of 16,384 x 32,768 fp32 logits on an A100 (Liger 0.2.1, liger_kernels.json) without the "
    "zeros that its backward writes first; longer rows differ by 3 %; taken by hand, no tool reads it"
)
_ODD = (
    "a vocabulary of 50,257 beside one of 50,304 on an H100 (calibrate.run, torch 2.11, CUDA 13): no wgmma kernel "
    "takes rows that are not aligned to 16 bytes"
)
_ODD_BLACKWELL = (
    "assumption: as on an H100 (calibrate.run); its tensor cores, too, take their input by TMA, which needs rows that "
    "are aligned to 16 bytes"
)
_COLUMNS = (
    "torchao's rowwise recipe under torch.compile on an H100 (torch 2.11): kernels beside matmuls take 30 ms more in "
    "four layers of Llama 8B, 8,192 tokens, than in 16 bits; casts along rows explain 4. Weights' casts reach 0.17"
)
_FUSED_ADAMW = f"fused AdamW from 60 to 800 million parameters, {_H200}"
ADAMW = {  # part of the bandwidth
    "h200-sxm": (0.72, _FUSED_ADAMW),
    "h100-sxm": (
        0.78,
        "fused AdamW from 50 to 800 million fp32 parameters on an H100 (scenarios/cuda/h100.json)",
    ),
}
HOPPER: Coefficients = {
    "fp8_gradient_slowdown": (1.25, _TWICE),
    "unaligned_matmul_slowdown": (6.1, _ODD),
    "matmul_slowdown_rowwise": (1.05, _ROWS),
    "memory_efficiency_cast_transposed": (0.2, _COLUMNS),
    "memory_efficiency_strided": (0.66, _STRIDED),
    "memory_efficiency_softmax_torch_short_backward": (0.45, _SHORT_SOFTMAX),
    "memory_efficiency_softmax_torch": (0.53, _SOFTMAX.format("forward")),
    "memory_efficiency_softmax_torch_backward": (0.39, _SOFTMAX.format("backward")),
    "memory_efficiency_softmax_torch_long": (0.46, _LONG_SOFTMAX.format("forward")),
    "memory_efficiency_softmax_torch_long_backward": (0.66, _LONG_SOFTMAX.format("backward")),
}
A100_SOFTMAX: Coefficients = {
    "memory_efficiency_softmax_torch": (0.4, _LOSS.format("forward")),
    "memory_efficiency_softmax_torch_backward": (0.36, _LOSS.format("backward")),
    "memory_efficiency_softmax_torch_long": (0.4, _LOSS.format("forward")),
    "memory_efficiency_softmax_torch_long_backward": (0.36, _LOSS.format("backward")),
}
_SIMUMAX = "SimuMax v1.2 (Moore Threads, Apache-2.0), its fit of B200 kernels: memory_{} in b200_kernels.json"
BLACKWELL_MEMORY: Coefficients = {
    "memory_efficiency_optimizer": (0.72, f"assumption: as on Hopper ({_FUSED_ADAMW})"),
    "result_exposed": (1.1, "fitted with power_at_peak: all of the traffic, at 0.9 of the bandwidth"),
    "memory_efficiency_cross_entropy": (0.3, _SIMUMAX.format("ce and memory_ce_fusion")),
    "memory_efficiency_permute": (0.5, _SIMUMAX.format("permute_fwd and memory_permute_bwd")),
}


def _blackwell(gpu: str, calls: tuple[int, int], attention: float, scores: float) -> Coefficients:
    """Return coefficients of attention and memory as on a B200, of odd matmuls, and of this GPU's sparse attention."""
    odd: Coefficients = {"unaligned_matmul_slowdown": (6.1, _ODD_BLACKWELL)}
    return B200_FLASH | BLACKWELL_MEMORY | odd | sparse(gpu, calls, attention, scores)


_SHARE = "a collective's channels by the GPU's SMs: NCCL runs 24 channels, one SM each, within a node"
_OLDER = ("volta", "ampere")  # architectures whose hosts are those of 2022-23


def _gpu(name: str, power: str, power_at_peak: float, attention: Coefficients) -> Coefficients:
    """Return the coefficients of a shipped GPU; `power`: the GPU whose measurement gives its power, "" for none.

    A GPU without one has no share of collectives either, as its collectives run over PCIe.
    """
    gpu = GPUS[name]
    older = gpu.architecture in _OLDER
    draw = {
        "power_at_peak": (power_at_peak, _POWER.get(power, "")),
        **({"power_at_peak_8_bits": NARROW_POWER[power]} if power in NARROW_POWER else {}),
        **({} if older else {"power_spread": (0.015, _SPREAD)}),
        "collective_sm_share": (round(24 / gpu.sm_count, 3), _SHARE),
    }
    return {
        "launch_overhead_s": (5e-6, _LAUNCH),
        "memory_efficiency": (0.85, _STREAM),
        "memory_efficiency_norm": (0.54, _NORM),
        "memory_efficiency_norm_transformer_engine": (
            0.86,
            _TE_NORM if name == "h100-sxm" else f"assumption: {_TE_NORM}",
        ),
        "memory_latency_s": (2e-6, _RAMP),
        "matmul_efficiency": (0.75, _FALLBACK),
        "group_launch_s": (9e-6, _GROUPS),
        **(draw if power else {}),
        **attention,
        **(A100_HOST if older else NEWER_HOST),
        **(HOPPER | {"memory_efficiency_optimizer": ADAMW[name]} if gpu.architecture == "hopper" else {}),
        **_quantizing(name, gpu.architecture),
    }


def _quantizing(name: str, architecture: str) -> Coefficients:
    """Return coefficients of casts, and of matmuls with block scales ÷ those with one scale for each tensor."""
    if architecture not in ("hopper", "blackwell"):
        return {}
    of = name if name in BLOCKWISE else "b200-sxm"
    return {
        "matmul_slowdown_blockwise": (BLOCKWISE[of], _BLOCKS.format(of)),
        "memory_efficiency_cast": (CASTS[of], _QUANTIZE.format(of)),
        "memory_efficiency_cast_blockwise": (BLOCK_CASTS[of][0], _BLOCK_CASTS.format(of, BLOCK_CASTS[of][1])),
    }


_L40S_POWER: Coefficients = {
    "power_at_peak": (
        1.05,
        "assumption: half of its 350 W at rest, as other GPUs, and at its peak of 362 Tflop/s an H100's 0.53 pJ a flop",
    ),
    "power_spread": (0.015, _SPREAD),
}
_AITER = "kernels: tuning records of AITER (github.com/ROCm/aiter, MIT, commit e4048607)"
_RCCL = "rccl-tests of AMD's clusters (hisohara/ai-scripts, commit 0780bb3)"
_LATENT = "latent attention: ROCm/aiter pull requests 5456 and 2039"
_REST = "coefficients as each of them says"
AMD_SOURCES = {
    "mi300x": f"{_AITER}; matmuls in 16 bits and in fp8 by token, experts in fp8 by token, and attention: an MI355X's "
    f"efficiencies; {_LATENT}; all-reduces of 8 ranks: {_RCCL}, of 4: sgl-project/sglang pull request 6619; {_REST}",
    "mi325x": f"an MI300X's kernels scaled by the two data sheets; {_AITER}; all-reduces from 4 GiB on: {_RCCL}, "
    f"smaller ones an MI300X's; {_REST}",
    "mi355x": f"{_AITER}; {_LATENT}; engines' all-reduces of 8 ranks: vllm-project/vllm pull request 39080; {_REST}",
}
_BABEL = "AMD, ROCm documentation, MI300X performance validation: BabelStream's Copy, 4.18 of 5.3 TB/s{}"
_CHAIN = (
    "a kernel that does next to nothing, in a chain: 3.85 us in a HIP graph (ROCm/rocm-systems issue 10834, gfx1100), "
    "3.74 us in a stream (PETSc ex1hip, MI250X); assumption: as long on this GPU"
)
_MAF = (
    'AMD, ROCm blogs, "Measuring Max-Achievable FLOPs" (2025): an MI300X sustains {} Tflop/s in {}, where an MI355X\'s '
    "kernels reach {} of the peak in bursts (AITER)"
)
_FMHA = (
    "fitted to the seven lengths of ROCm/aiter pull request 4205 (MI355X, bf16, causal, heads of 192 and 128), all "
    "within 6 %{}"
)
_DEFAULT = (
    "geometric mean of six kernels of AITER's default configuration by tuned ones in 8 and 4 bits: ROCm/aiter pull "
    "requests 1232 (1.88, 2.96, 2.60), 5279 (1.34, 1.24) and 2452 (1.37); without a record of the weights' sizes AITER "
    "runs the default (pull request 4816)"
)
_AS_SUSTAINED = (
    "; times 0.855, the ratio of the parts of the peak that large matmuls sustain on an MI300X and an MI355X"
)
_AS_FLASH = "assumption: as FlashAttention-2's published on A100"
_AS_NCCL = "assumption: as NCCL's on an H100"


def _amd(name: str, attention: float, borrowed: str, power: Coefficients) -> Coefficients:
    """Return the coefficients of an AMD GPU: what is published of it, and what every accelerator has."""
    kept = ("matmul_efficiency", "launch_overhead_s", "group_launch_s", "memory_efficiency_norm")
    kept += ("memory_efficiency_norm_transformer_engine", *NEWER_HOST)
    usual = {key: each for key, each in _gpu(name, "", 0.0, {}).items() if key in kept}
    other = "" if name == "mi300x" else "; assumption: the same part on this GPU"
    return {
        **usual,
        "memory_efficiency": (0.79, _BABEL.format(other)),
        "memory_latency_s": (3.8e-6, _CHAIN),
        "untuned_slowdown": (1.79, _DEFAULT),
        "attention_efficiency_128": (attention, _FMHA.format(borrowed)),
        "attention_ramp_tokens": (795, _FMHA.format("")),
        "attention_backward_share": (0.85, _AS_FLASH),
        "collective_sm_share": (0.182, _AS_NCCL),
        **power,
    }


_MI300_POWER: Coefficients = {
    "power_at_peak": (1.56, _MAF.format(708, "bf16", 0.634)),
    "power_at_peak_8_bits": (1.71, _MAF.format("1,273", "fp8", 0.595)),
}
COEFFICIENTS: dict[str, Coefficients] = {
    "v100": _gpu("v100", "a100", 1.25, A100_FLASH),
    "a100-sxm": _gpu("a100-sxm", "a100", 1.25, A100_FLASH | A100_FLASH2 | A100_SOFTMAX),
    "a100-pcie": _gpu("a100-pcie", "a100", 1.25, A100_FLASH | A100_FLASH2 | A100_SOFTMAX),
    "h100-sxm": _gpu("h100-sxm", "h100", 1.25, H100_FLASH | sparse("h100", (1462, 994), 0.597, 0.438))
    | {"matmul_slowdown_cuda_11": (1.1, _CUDA_11)},
    "h200-sxm": _gpu("h200-sxm", "h100", 1.25, H100_FLASH | sparse("h200", (1462, 994), 0.586, 0.437)),
    "b200-sxm": _gpu("b200-sxm", "b200", 1.79, _blackwell("b200", (1584, 1244), 0.255, 0.37)),
    "b300-sxm": _gpu("b300-sxm", "b300", 1.63, _blackwell("b300", (1696, 1244), 0.268, 0.401)),
    "gb200": _gpu("gb200", "gb200", 1.61, _blackwell("gb200", (1584, 1244), 0.24, 0.368)),
    "gb300": _gpu("gb300", "gb300", 1.38, _blackwell("gb300", (1702, 1244), 0.291, 0.413)),
    "l40s": _gpu("l40s", "", 0.0, _L40S_POWER | PCIE_ATTENTION),
    "rtx-pro-6000-server": _gpu("rtx-pro-6000-server", "", 0.0, PCIE_ATTENTION),
    "mi300x": _amd("mi300x", 0.525, _AS_SUSTAINED, _MI300_POWER),
    "mi325x": _amd("mi325x", 0.525, _AS_SUSTAINED, _MI300_POWER),
    "mi355x": _amd("mi355x", 0.614, "", {}),
    "cpu": {
        "launch_overhead_s": (0.0, "a CPU does not queue kernels: see kernel_gap_s"),
        "kernel_gap_s": (2.5e-6, "torch 2.13 on an AMD Zen 5 core: an elementwise operator on a tiny tensor, forward"),
    },
}
