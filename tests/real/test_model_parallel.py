"""Tensor, sequence, context and expert parallelism for real: one device's loss and gradients, in double precision."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.conftest import small

pytestmark = pytest.mark.real

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}
ONE_KEY_HEAD = LLAMA | {"kv_heads": 1, "bias": True}
MOE = {"moe": {"experts": 4, "top_k": 2, "ffn": 48}}
SHARED = {"moe": {"experts": 8, "top_k": 3, "ffn": 32, "shared_experts": 1, "dense_layers": 1}}


def _ring(split: str, **model: Any) -> dict[str, Any]:
    return small({"cp": 2, "cp_split": split}, attention="fused", **model)


TWO_RANKS: dict[str, Any] = {
    "tp": small({"tp": 2}),
    "tp, odd vocabulary": small({"tp": 2}, vocab=300),
    "tp, tied embeddings": small({"tp": 2}, tied_embeddings=True),
    "tp, llama, fused": small({"tp": 2}, attention="fused", **LLAMA),
    "tp, one key head": small({"tp": 2}, **ONE_KEY_HEAD),
    "tp, all-reduce beside the weight gradient": small({"tp": 2, "tp_overlap": "wgrad"}),
    "tp, relu2, no positions": small({"tp": 2}, mlp="relu2", positions="none"),
    "sp": small({"tp": 2, "sp": True}),
    "sp, llama, fused": small({"tp": 2, "sp": True}, attention="fused", **LLAMA),
    "sp, one key head": small({"tp": 2, "sp": True}, **ONE_KEY_HEAD),
    "sp, overlapped": small({"tp": 2, "sp": True, "tp_overlap": "wgrad"}),
    "ring, contiguous": _ring("contiguous"),
    "ring, zigzag": _ring("zigzag"),
    "ring, striped": _ring("striped"),
    "ring, zigzag, llama": _ring("zigzag", **LLAMA),
    "ring, striped, llama": _ring("striped", **LLAMA),
    "all-gather, contiguous": small({"cp": 2, "cp_method": "all_gather", "cp_split": "contiguous"}, attention="fused"),
    "all-gather, zigzag": small({"cp": 2, "cp_method": "all_gather"}, attention="fused", **LLAMA),
    "all-gather, striped": small({"cp": 2, "cp_method": "all_gather", "cp_split": "striped"}, attention="fused"),
    "all-to-all": small({"cp": 2, "cp_method": "all_to_all"}, attention="fused"),
    "all-to-all, one key head": small({"cp": 2, "cp_method": "all_to_all"}, attention="fused", **ONE_KEY_HEAD),
    "ep": small({"dp": 2, "ep": 2}, **MOE),
    "ep, shared experts": small({"dp": 2, "ep": 2, "dp_sync": "after_backward"}, **(LLAMA | SHARED)),
    "experts on every rank": small({"dp": 2}, **MOE),
    "ep over cp": small({"cp": 2, "ep": 2}, attention="fused", **MOE),
    "ep over tp": small({"tp": 2, "ep": 2, "sp": True}, **SHARED),
    "experts whole beside sp": small({"tp": 2, "sp": True}, **MOE),
}
