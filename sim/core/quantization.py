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
Part = Literal["attention", "mlp", "shared_experts", "experts"]
# Parts of a layer whose matrices a checkpoint may keep in formats of their own: all of attention's or of a recurrent
# layer's, those of a dense MLP, of shared experts, of routed experts.
PARTS: tuple[Part, ...] = ("attention", "mlp", "shared_experts", "experts")


class QuantizationFormat(NamedTuple):
    """Hold one format; what a record leaves out is as without quantization.

    `weight_bytes`: of a weight, its scales included; None: of `precision`. `matmul`: the dtype that linear layers
    multiply in where the GPU has its peak, elsewhere and where it is None 16 bits. `expert_bytes`: of an expert's
    weight, if it differs. `expert_matmul`: the dtype that routed experts multiply in, if it differs, where the GPU has
    its peak, elsewhere 16 bits. `table` and `table_peak`: measured matmuls of a kernel file and the peak that bounds
    them (`sim.prices.weight_only`).
    """

    weight_bytes: float | None = None
    matmul: str | None = None
    expert_bytes: float | None = None
    expert_matmul: str | None = None
    table: str = ""
    table_peak: str = "fp16"

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


QUANTIZATIONS: Mapping[Quantization, QuantizationFormat] = {
    "none": QuantizationFormat(),
    # Weight-only kernels convert weights to 16 bits in registers, so they multiply at the 16-bit peak.
    "int8_weight_only": QuantizationFormat(1.0, table="int8_wo"),
    "int4_weight_only": QuantizationFormat(0.5 + 2.0 / INT4_GROUP, table="int4_wo"),
    "llm_int8": QuantizationFormat(1.0, "int8", table="sq", table_peak="int8"),
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
