"""torchao's quantized linear layers, to compare with the products of `calibrate.quantization`.

torchao (github.com/pytorch/ao) replaces the weights of linear layers by quantized tensors: int8 or E4M3 with a scale
for each output, int4 in groups of 64, and int8 with activations quantized row by row, which is vector-wise
quantization. It has no zero points and no outlier decomposition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from calibrate.bundled_model.linear import Linear

ABSENT = "torchao: skipped, it is not installed (pip install 'stepsim[torchao]')"
GROUP = 64


def here() -> bool:
    """Return whether torchao is installed."""
    return find_spec("torchao") is not None


def configs() -> Mapping[str, Callable[[], Any]]:
    """Return torchao's configurations by the names used here."""
    from torchao import quantization as q

    return {
        "torchao_int8_weight_only": q.Int8WeightOnlyConfig,
        "torchao_int8_dynamic": q.Int8DynamicActivationInt8WeightConfig,
        "torchao_float8_weight_only": q.Float8WeightOnlyConfig,
        "torchao_int4_weight_only": lambda: q.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=q.PerGroup(GROUP),
        ),
    }


def plain_linear(layer: Linear) -> nn.Linear:
    """Return a `torch.nn.Linear` with the parameters of a linear layer of `calibrate.bundled_model.model`."""
    n, k = layer.weight.shape
    out = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
    out.weight = layer.weight
    out.register_parameter("bias", layer.bias)
    return out


def quantized_by_torchao(blocks: list[nn.Module], name: str) -> list[nn.Module]:
    """Copy a model and quantize the linear layers of its transformer layers; embedding and output are unchanged."""
    from torchao.quantization import quantize_

    out = copy.deepcopy(blocks)
    for layer in out[1:-1]:
        for part in ("qkv", "proj", "up", "down"):
            setattr(layer, part, plain_linear(getattr(layer, part)))
        quantize_(layer, configs()[name]())
    return out
