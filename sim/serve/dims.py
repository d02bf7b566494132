"""Sizes of one rank of a serving scenario, as its engine keeps and multiplies numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.models.served import ServingDims
from sim.serve.engines import ENGINES

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

# 4-bit weights with an 8-bit scale for 32 (OCP Microscaling Formats v1.0): gpt-oss's experts, multiplied in 16 bits
# (gpt-oss model card, arXiv 2508.10925, section 2.1; Marlin's and triton_kernels' matmuls convert on the way)
MXFP4_BYTES = 0.5 + 1 / 32
INT4_GROUP = 128  # weights that share one 16-bit scale in group-wise 4-bit formats (GPTQ, arXiv 2210.17323, section 5)


def serving_dims(scenario: Scenario) -> ServingDims:
    """Sizes of one rank of a serving scenario.

    A format that the GPU cannot multiply (fp8 or int8 without a peak for it) still saves memory: weights are
    converted on the fly and multiplied in 16 bits, as Marlin kernels do.
    """
    m, p, i = scenario.model, scenario.parallelism, scenario.for_serving
    act = sixteen_bit(i.precision)
    linear, weight = _formats(i.quantization, i.precision, scenario.cluster.gpu.peak_flops_per_s, act)
    engine = ENGINES[i.engine]
    kept = i.kv_cache.dtype or ("fp8" if engine.fp8_cache and linear == "fp8" else act)
    return ServingDims(
        model=m,
        tp=p.tp,
        sp=p.sp and p.tp > 1,
        ep=p.ep,
        expert_tp=p.expert_tp,
        vocab=m.padded_vocab(p.tp) // p.tp,
        act=act,
        linear=linear,
        quantization=i.quantization,
        act_bytes=dtype_bytes(act),
        weight_bytes=weight,
        expert_weight_bytes=MXFP4_BYTES if i.quantization == "mxfp4_experts" else weight,
        kv_bytes=dtype_bytes(kept),
        dispatch_bytes=dtype_bytes(p.ep_dispatch_dtype or act),
        fused_attention=i.attention == "fused",
        grouped_decode=(i.decode_attention or engine.decode_attention) == "grouped",
        index_dtype="fp8" if "fp8" in scenario.cluster.gpu.peak_flops_per_s else act,
        cp=p.cp,
        cp_method=p.cp_method,
    )


def _formats(quantization: str, precision: str, peaks: dict[str, float], act: str) -> tuple[str, float]:
    """The dtype linear layers multiply in, and their weights' bytes per element."""
    if quantization in ("none", "mxfp4_experts"):
        return precision, dtype_bytes(precision)
    if quantization == "int4_weight_only":
        return act, dtype_bytes("int4") + 2.0 / INT4_GROUP
    if quantization == "fp8" and "fp8" in peaks:
        return "fp8", dtype_bytes("fp8")
    if quantization == "llm_int8" and "int8" in peaks:
        return "int8", dtype_bytes("int8")
    return act, 1.0
