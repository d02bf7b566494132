"""LoRA adapters while serving: what sequences of several adapters add to a layer that all of them share.

A linear layer of weights W gives y = x·W + (x·A)·B for a token of an adapter of rank r, with A [inputs, r] and B
[r, outputs]. Tokens of all adapters go through W together; two kernels for each layer then add every token's own
product: one shrinks x to r numbers, one expands them and adds them to y (Chen et al. 2023, "Punica", arXiv 2310.18547,
section 4: SGMV; Sheng et al. 2023, "S-LoRA", arXiv 2311.03285, section 5; vLLM, vllm/lora/ops/triton_ops:
lora_shrink_op.py and lora_expand_op.py, which take the matrices that share an input in one launch). Both do few flops a
byte (r for each two bytes of x), so their price is what they move, for T tokens of G adapters:

    shrink: T·inputs·e + G·s·r·inputs·e + T·s·r·4      x, every adapter's A of the s matrices, the fp32 result
    expand: T·s·r·4 + G·r·outputs·e + 2·T·outputs·e    that again, every adapter's B, y read and written

Tensor parallelism splits B of a layer whose outputs are split and A of one whose inputs are, as vLLM does without
fully_sharded_loras: partial products join the layer's own sum. Left out: adapters on experts, on the embedding and on
the output.
"""

from __future__ import annotations

from collections.abc import Collection

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program
from sim.models.layers import LayerSpec
from sim.models.layers.dense_mlp import DenseMlp
from sim.models.layers.matrix import Matrix
from sim.models.operators import F, memory_op
from sim.models.serving.operators import ServingDims


def adapted_matrices(spec: LayerSpec, tp: int, targets: Collection[str]) -> tuple[Matrix, ...]:
    """The matrices of a layer on one of `tp` ranks that have adapters."""
    attention = () if spec.attention is None else spec.attention.matrices(tp)
    mlp = spec.mlp.matrices(tp) if isinstance(spec.mlp, DenseMlp) else ()
    return tuple([m for m in (*attention, *mlp) if m.target in targets])


def adapter_elements(spec: LayerSpec, tp: int, targets: Collection[str], rank: int) -> int:
    """Numbers of one adapter's matrices for a layer on one rank."""
    return sum([rank * (len(m.outputs) * m.inputs + m.width) for m in adapted_matrices(spec, tp, targets)])


def adapter_products(
    d: ServingDims, spec: LayerSpec, targets: Collection[str], rank: int, tokens: int, adapters: int
) -> Program:
    """Return what `tokens` tokens of `adapters` different adapters add to a layer."""
    items: list[Compute] = []
    for m in adapted_matrices(spec, d.tp, targets):
        between = tokens * len(m.outputs) * rank
        weights = adapters * rank * d.act_bytes
        shrink = tokens * m.inputs * d.act_bytes + weights * len(m.outputs) * m.inputs + between * FP32_BYTES
        expand = between * FP32_BYTES + weights * m.width + 2 * tokens * m.width * d.act_bytes
        items.append(memory_op(f"{m.name}_lora_shrink", F, "elementwise", tokens * m.inputs, shrink, d.act))
        items.append(memory_op(f"{m.name}_lora_expand", F, "elementwise", tokens * m.width, expand, d.act))
    return tuple(items)
