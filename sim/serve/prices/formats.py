"""Number formats of a serving workload: of weights in memory, of linear layers' matmuls, of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.serve.engines.file import engine_of

if TYPE_CHECKING:
    from sim.inputs.workloads import Inference

# 4-bit weights with an 8-bit scale for 32 (OCP Microscaling Formats v1.0): gpt-oss's experts, multiplied in 16 bits
# (gpt-oss model card, arXiv 2508.10925, section 2.1; Marlin's and triton_kernels' matmuls convert on the way)
MXFP4_BYTES = 0.5 + 1 / 32
MXFP4_EXPERTS = ("mxfp4_experts", "fp8_mxfp4_experts")  # the latter: DeepSeek V4, everything else in fp8
FP8 = ("fp8", "fp8_mxfp4_experts")
# of linear layers, beside which TensorRT-LLM keeps the cache in fp8 (bench/benchmark/utils/general.py: _KV_CACHE_MAP)
NARROW = ("fp8", "mxfp8", "nvfp4")
INT4_GROUP = 128  # weights that share one 16-bit scale in group-wise 4-bit formats (GPTQ, arXiv 2210.17323, section 5)


def linear_format(inference: Inference, peaks: Mapping[str, float]) -> tuple[str, float]:
    """The dtype linear layers multiply in on GPUs of these peaks, and their weights' bytes per element."""
    quantization, act = inference.quantization, sixteen_bit(inference.precision)
    if quantization in ("none", "mxfp4_experts"):
        return inference.precision, dtype_bytes(inference.precision)
    if quantization == "int4_weight_only":
        return act, dtype_bytes("int4") + 2.0 / INT4_GROUP
    if quantization in FP8 and "fp8" in peaks:
        return "fp8", dtype_bytes("fp8")
    if quantization == "llm_int8" and "int8" in peaks:
        return "int8", dtype_bytes("int8")
    return act, 1.0


def cache_dtype(inference: Inference, peaks: Mapping[str, float]) -> str:
    """What keys and values are kept in where `kv_cache.dtype` is left out.

    Unfused attention reads the cache without converting it, so that it stays in 16 bits there.
    """
    linear, _ = linear_format(inference, peaks)
    narrow = engine_of(inference.engine).fp8_cache and linear in NARROW and inference.attention == "fused"
    return "fp8" if narrow else sixteen_bit(inference.precision)
