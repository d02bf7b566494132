"""The figures of shipped profiles that no table of kernels has, each with where it comes from."""

from __future__ import annotations

SOURCE = (
    "kernels and collectives: NVIDIA AIConfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0, commit 095f58a), "
    "its performance database; coefficients as each of them says"
)

# Whose kernels stand in for a GPU that nobody measured: the nearest relative by architecture.
RELATIVES = {"v100": "a100-sxm", "a100-pcie": "a100-sxm", "b300-sxm": "b200-sxm", "gb300": "gb200"}

Coefficients = dict[str, tuple[float, str]]

_STREAM = "assumption: a streaming kernel reaches 0.85 of the data sheet's bandwidth, as published STREAM runs do"
_RAMP = "assumption: an empty kernel occupies the device for about 2 us"
_THROTTLE = "H. He, 2024 (thonking.ai): matmuls of random data run 0.88 of the speed of zeros at the power limit"
_BACKWARD = "FlashAttention-2 (arXiv 2307.08691), figures 5 and 6: backward reaches about 0.8 of the forward's FLOP/s"
_FALLBACK = "assumption: a large matmul of a dtype that was not measured reaches 0.75 of its peak"
_LAUNCH = "assumption: an eager framework issues about 200,000 kernels a second from one host thread"


def _gpu(throttle: float) -> Coefficients:
    return {
        "launch_overhead_s": (5e-6, _LAUNCH),
        "memory_efficiency": (0.85, _STREAM),
        "memory_latency_s": (2e-6, _RAMP),
        "matmul_efficiency": (0.75, _FALLBACK),
        "power_throttle": (throttle, _THROTTLE),
        "attention_backward_share": (0.8, _BACKWARD),
    }


COEFFICIENTS: dict[str, Coefficients] = {
    "v100": _gpu(0.12),
    "a100-sxm": _gpu(0.12),
    "a100-pcie": _gpu(0.12),
    "h100-sxm": _gpu(0.12),
    "h200-sxm": _gpu(0.12),
    "b200-sxm": _gpu(0.12),
    "b300-sxm": _gpu(0.12),
    "gb200": _gpu(0.12),
    "gb300": _gpu(0.12),
    "cpu": {
        "launch_overhead_s": (0.0, "a CPU does not queue kernels: see kernel_gap_s"),
        "kernel_gap_s": (2.5e-6, "torch 2.13 on an AMD Zen 5 core: an elementwise operator on a tiny tensor, forward"),
    },
}
