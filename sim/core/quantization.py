"""Formats of `inference.quantization`: how the weights of linear layers are stored and multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from sim.core.dtypes import dtype_bytes

Quantization = Literal[
    "none",
    "int8_weight_only",
    "llm_int8",
    "fp8",
    "int4_weight_only",
    "mxfp4_experts",
    "fp8_mxfp4_experts",
    "nvfp4",
    "nvfp4_experts",
]
# Kernels that write few bits; sums: all-reduces that norm
Quantizing = Literal["norms", "attention", "activations", "sums"]
# 4-bit weights with an 8-bit scale for 32 (OCP Microscaling Formats v1.0): gpt-oss's experts, multiplied in 16 bits
# (gpt-oss model card, arXiv 2508.10925, section 2.1; Marlin's and triton_kernels' matmuls convert on the way)
MXFP4_BYTES = 0.5 + 1 / 32
# 4-bit weights and inputs with an 8-bit scale for 16 (ModelOpt's NVFP4; vLLM 0.33,
# model_executor/layers/quantization/modelopt.py, ModelOptNvFp4LinearMethod: weight_scale of input_size / group_size)
NVFP4_BYTES = dtype_bytes("nvfp4")
INT4_GROUP = 128  # weights that share one 16-bit scale in group-wise 4-bit formats (GPTQ, arXiv 2210.17323, section 5)
# Formats of measured kernels that the dtype in which they multiply does not tell, as the measured tables name them:
# bytes of a weight, scales included, or of a number of a latent cache, which is key and value at once. Inputs have 16
# bits, or the dtype's where that has fewer.
TABLE_FORMATS: Mapping[str, float] = {
    "fp8_block": 1.0,  # a scale for 128 x 128 weights and for 128 inputs (DeepSeek V3)
    "int8_wo": 1.0,
    "sq": 1.0,
    "int4_wo": 0.5 + 2.0 / 128,
    "w4a16_mxfp4": MXFP4_BYTES,
    "w4a8_mxfp4_mxfp8": MXFP4_BYTES,
    "latent": 2.0,
    "latent_fp8": 1.0,
}
Part = Literal["attention", "mlp", "shared_experts", "experts"]
# Parts of a layer whose matrices a checkpoint may keep in formats of their own: all of attention's or of a recurrent
# layer's, those of a dense MLP, of shared experts, of routed experts.
PARTS: tuple[Part, ...] = ("attention", "mlp", "shared_experts", "experts")


class QuantizationFormat(NamedTuple):
    """Hold one format; what a record leaves out is as without quantization.

    `weight_bytes`: of a weight, its scales included; None: of `precision`. `matmul`: the dtype that linear layers
    multiply in where the GPU has its peak, elsewhere and where it is None 16 bits. `expert_bytes`: of an expert's
    weight, if it differs. `expert_matmul`: the dtype that routed experts multiply in, if it differs, where the GPU has
    its peak, elsewhere 16 bits. `table`: the format of weight-only kernels in tables of measurements.
    """

    weight_bytes: float | None = None
    matmul: str | None = None
    expert_bytes: float | None = None
    expert_matmul: str | None = None
    table: str = ""

    @property
    def in_fp8(self) -> bool:
        """Tell whether linear layers have weights in fp8; a checkpoint's have scales of blocks."""
        return self.matmul == "fp8"

    def bytes_of(self, part: Part, group: int | None = None) -> float | None:
        """Bytes of a weight of a part of a layer; None: of `precision`. `group`: weights that share a 16-bit scale in
        int4_weight_only, where it is not the usual number."""
        if part == "experts" and self.expert_bytes is not None:
            return self.expert_bytes
        return 0.5 + 2.0 / group if group and self.table == "int4_wo" else self.weight_bytes

    def matmul_of(self, part: Part) -> str | None:
        """The dtype that a part of a layer multiplies in where the GPU has its peak; None: 16 bits."""
        if part == "experts" and self.expert_bytes is not None:
            return self.expert_matmul
        return self.matmul

    def table_of(self, part: Part, dtype: str, blocks: bool) -> str:
        """The format of `TABLE_FORMATS` of a part that multiplies in `dtype`; empty: the dtype tells it. `blocks`: a
        checkpoint's fp8, which has scales of blocks."""
        if part == "experts" and self.expert_bytes == MXFP4_BYTES:
            return "w4a8_mxfp4_mxfp8" if dtype == "mxfp8" else "w4a16_mxfp4"
        if part == "experts" and self.expert_bytes is not None:
            return ""
        return ("fp8_block" if blocks else "") if dtype == "fp8" else self.table


QUANTIZATIONS: Mapping[Quantization, QuantizationFormat] = {
    "none": QuantizationFormat(),
    # Weight-only kernels convert weights to 16 bits in registers, so they multiply at the 16-bit peak.
    "int8_weight_only": QuantizationFormat(1.0, table="int8_wo"),
    "int4_weight_only": QuantizationFormat(0.5 + 2.0 / INT4_GROUP, table="int4_wo"),
    "llm_int8": QuantizationFormat(1.0, "int8", table="sq"),
    "fp8": QuantizationFormat(1.0, "fp8"),
    "mxfp4_experts": QuantizationFormat(expert_bytes=MXFP4_BYTES),
    # DeepSeek V4: everything else in fp8. Experts take inputs in mxfp8 on compute capability 10.x; Hopper's kernels
    # convert weights to 16 bits (vLLM 0.33, fused_moe/oracle/mxfp4.py, _get_priority_backends and
    # _backend_activation_key: FLASHINFER_TRTLLM_MXFP4_MXFP8, HUMMING, MARLIN; SGLang 0.5.23,
    # layers/quantization/mxfp4.py: "W4A16 by default").
    "fp8_mxfp4_experts": QuantizationFormat(1.0, "fp8", MXFP4_BYTES, "mxfp8"),
    "nvfp4": QuantizationFormat(NVFP4_BYTES, "nvfp4"),
    # Routed experts alone; everything else in 16 bits.
    "nvfp4_experts": QuantizationFormat(expert_bytes=NVFP4_BYTES, expert_matmul="nvfp4"),
}
