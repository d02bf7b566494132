"""Rows of published tables are read, and what a resolved scenario dumps parses to itself."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from tests.sim.cases import llama_like

SMALL: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1000},
    "training": {"seq_len": 128, "global_batch_size": 32},
    "cluster": "dgx-h100",
}

# Rows of published tables, as their tables and rows merge: key by key.
MEGATRON = {
    "mlp": "gelu",
    "norm": "layernorm",
    "bias": True,
    "positions": "learned",
    "tied_embeddings": True,
    "layers": 48,
    "hidden": 6144,
    "heads": 64,
    "kv_heads": 64,
    "ffn": 24576,
    "vocab": 51200,
}
LLAMA_405B = llama_like(
    tied_embeddings=False, layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256
)
MEGATRON_TABLE = {
    "cluster": {"preset": "dgx-a100", "inter_node": {"nics_per_node": 4, "nic_bandwidth_bytes_per_s": 25e9}},
    "calibration": "a100-sxm",
    "training": {
        "optimizer": "adamw",
        "attention": "unfused",
        "grad_dtype": "fp16",
        "framework": "megatron",
    },
    "parallelism": {"dp_sync": "after_backward", "p2p_overlap": False},
    "model": {"dropout": 0.1},
}
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        MEGATRON_TABLE,
        {
            "model": MEGATRON,
            "training": {
                "seq_len": 2048,
                "micro_batch_size": 8,
                "global_batch_size": 1024,
                "precision": "fp16",
                "recompute": "full",
            },
            "parallelism": {
                "dp": 32,
                "tp": 16,
                "sp": False,
                "cp": 1,
                "pp": 1,
                "ep": 1,
                "zero": 0,
                "virtual_stages": 1,
                "schedule": "1f1b",
            },
        },
    ),
    (
        MEGATRON_TABLE,
        {
            "model": {**MEGATRON, "layers": 105, "hidden": 20480, "heads": 128, "kv_heads": 128, "ffn": 81920},
            "training": {
                "seq_len": 2048,
                "micro_batch_size": 1,
                "global_batch_size": 280,
                "precision": "fp16",
                "recompute": "selective",
            },
            "parallelism": {
                "dp": 1,
                "tp": 8,
                "sp": True,
                "cp": 1,
                "pp": 35,
                "ep": 1,
                "zero": 0,
                "virtual_stages": 3,
                "schedule": "interleaved_1f1b",
                "tp_overlap": "wgrad",
                "p2p_scatter": True,
            },
        },
    ),
    (
        {
            "cluster": "dgx-h100",
            "calibration": "h100-sxm",
            "parallelism": {"cp_method": "all_gather"},
            "training": {"optimizer": "adamw", "attention": "fused", "grad_dtype": "fp32", "micro_batch_size": 1},
        },
        {
            "model": LLAMA_405B,
            "training": {"seq_len": 131072, "global_batch_size": 128, "precision": "bf16", "recompute": "none"},
            "parallelism": {
                "dp": 8,
                "tp": 8,
                "sp": True,
                "cp": 16,
                "pp": 16,
                "ep": 1,
                "zero": 2,
                "schedule": "interleaved_1f1b",
                "virtual_stages": 8,
                "layers_per_stage": [0, *[1] * 126, 0],
            },
        },
    ),
    (
        {
            "cluster": {"preset": "dgx-b200", "nodes": 1},
            "calibration": "b200-sxm",
            "training": {"cross_entropy": "fused", "framework": "megatron"},
            "parallelism": {"dp_sync": "after_backward", "p2p_overlap": False},
        },
        {
            "model": {**LLAMA_405B, "layers": 4, "kv_heads": 16},
            "training": {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16"},
            "parallelism": {"dp": 1, "tp": 8, "sp": True, "pp": 1, "zero": 1, "virtual_stages": 1, "schedule": "1f1b"},
        },
    ),
    (
        {
            "training": {"optimizer": "adamw", "attention": "fused", "grad_dtype": "fp32", "param_dtype": "fp32"},
            "parallelism": {},
        },
        {
            "model": {**LLAMA_405B, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
            "training": {
                "seq_len": 8192,
                "micro_batch_size": 2,
                "global_batch_size": 16,
                "precision": "bf16",
                "recompute": "selective_op",
                "framework": "compiled",
            },
            "parallelism": {"dp": 8, "tp": 1, "sp": False, "cp": 1, "pp": 1, "ep": 1, "zero": 3, "virtual_stages": 1},
            "cluster": {
                "preset": "dgx-h100",
                "gpu": {
                    "preset": "h100-sxm",
                    "memory_bytes": 96e9,
                    "memory_bandwidth_bytes_per_s": 2.4e12,
                    "power_limit_w": 500,
                },
            },
            "calibration": "h100-sxm",
        },
    ),
    (
        {"inference": {"batching": "static", "kv_cache": {"layout": "paged"}}},
        {
            "model": {
                "mlp": "gelu",
                "norm": "layernorm",
                "bias": False,
                "positions": "rope",
                "layers": 28,
                "hidden": 4096,
                "heads": 16,
                "kv_heads": 16,
                "ffn": 16384,
                "vocab": 50400,
            },
            "parallelism": {"tp": 1, "pp": 1},
            "cluster": "dgx-a100",
            "calibration": "a100-sxm",
            "inference": {
                "precision": "fp16",
                "requests": {"prompt_len": 128, "output_len": 128, "count": 512},
                "kv_cache": {"dtype": "fp16"},
            },
        },
    ),
]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_rows_of_published_tables(table: dict[str, Any], row: dict[str, Any]) -> None:
    s = parse_scenario(merge(table, row), "row")
    assert s.parallelism.ranks <= s.cluster.nodes * s.cluster.gpus_per_node
    assert s.name == "row"
    assert s.calibration == merge(table, row)["calibration"]


OTHERS: list[dict[str, Any]] = [
    {
        "distillation": {"teacher": {"preset": "llama3-8b", "vocab": 1000}, "teacher_parallelism": {"tp": 4}},
        "parallelism": {"tp": 4},
    },
    {"distillation": {"teacher": "llama3-8b", "mode": "sequence"}},
    {
        "model": {"moe": {"experts": 8, "top_k": 2, "ffn": 64, "imbalance": {"zipf": 1.2}}},
        "parallelism": {"dp": 8, "ep": 8, "ep_dispatch_dtype": "fp8"},
    },
    {
        "model": {"moe": {"experts": 8, "top_k": 2, "ffn": 64, "imbalance": "balanced"}},
        "parallelism": {"dp": 4, "pp": 2, "ep": 4, "schedule": "dualpipe", "ep_overlap": True},
    },
    {
        "faults": {
            "stragglers": [{"rank": 0}],
            "links": [{"between": ["node0", "node0"], "bandwidth_scale": 0.1}],
            "failures": {},
        }
    },
    {"parallelism": {"rank_order": "cp-tp-pp-dp", "cp": 4, "cp_split": "striped", "shard_size": 2, "zero": 3}},
]


@pytest.mark.parametrize(
    "data", [*(merge(table, row) for table, row in ROWS), *(merge(SMALL, other) for other in OTHERS)]
)
def test_a_resolved_scenario_parses_to_itself(data: dict[str, Any]) -> None:
    s = parse_scenario(data)
    dumped = s.model_dump(mode="json")
    assert "warnings" not in dumped
    assert parse_scenario(dumped) == s.unchecked_copy(update={"warnings": parse_scenario(dumped).warnings})
