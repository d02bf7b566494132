"""Small spaces of layouts that the tests of the search share, with faults, experts and all, and all their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sim.commands.options import Narrowing, Study
from sim.commands.search import Asked, search_one
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.search.evaluation import Outcome, evaluate, pack
from sim.search.found import SearchResult
from sim.search.space import Layout, Space, layouts_of, mesh_is_legal, meshes_of, partial_layouts_of
from sim.search.space_of_scenario import make_space

GPT: dict[str, Any] = {
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 1024,
    "vocab": 1000,
    "tied_embeddings": True,
}
MOE = {
    **GPT,
    "tied_embeddings": False,
    "moe": {"experts": 4, "top_k": 2, "ffn": 256, "shared_experts": 1, "dense_layers": 1},
}
BASE: dict[str, Any] = {
    "model": GPT,
    "cluster": {"preset": "dgx-h100", "gpus_per_node": 4},
    "calibration": "roofline",
    "training": {"seq_len": 256, "global_batch_size": 16},
    "parallelism": {"dp": 8},
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"model": MOE},
    {
        "training": {"recompute": {"mode": "full", "layers": 1}, "grad_dtype": "bf16"},
        "parallelism": {"dp_sync": "after_backward"},
    },
    {
        "training": {"activation_offload": True},
        "calibration": "h100-sxm",
        "parallelism": {"dp_sync": "per_parameter", "cp_method": "all_gather"},
    },
    {"training": {"activation_offload": {"layers": 1}}, "calibration": "h100-sxm"},
    {
        "calibration": "h100-sxm",
        "parallelism": {
            "rank_order": "pp-dp-tp-cp",
            "p2p_scatter": True,
            "tp_overlap": "full",
            "param_gather_overlap": False,
        },
    },
    {
        "parallelism": {
            "accumulate_unsharded": True,
            "reshard_after_forward": False,
            "bucket_bytes": 100_000,
            "cp_method": "all_to_all",
        }
    },
    {
        "model": {**MOE, "mtp_layers": 1},
        "calibration": "h100-sxm",
        "parallelism": {"ep_overlap": True, "shard_size": 2, "all_reduce_once": True},
    },
    {"training": {"param_dtype": "fp32"}, "calibration": "h100-sxm"},
    {
        "training": {"precision": "fp8", "framework": "megatron"},
        "calibration": "h100-sxm",
        "parallelism": {"p2p_overlap": True},
    },
    {
        "training": {"framework": "deepspeed", "optimizer_offload": "cpu"},
        "calibration": "h100-sxm",
        "parallelism": {"gather_bucket_bytes": 100_000, "bucket_bytes": 300_000},
    },
    {"parallelism": {"cp_split": "contiguous"}, "model": {"positions": "learned"}},
    {"model": {**MOE, "moe": {**MOE["moe"], "imbalance": {"seed": 1, "zipf": 1.2}}}},
    {"model": {"mtp_layers": 2}, "parallelism": {"dp": 2, "pp": 4, "mtp_stage": 2}},
    {
        "faults": {
            "stragglers": [{"rank": 3, "compute_scale": 1.3}, {"rank": 5, "compute_scale": 1.0}],
            "links": [
                {"between": ["node0", "node1"], "bandwidth_scale": 0.5},
                {"between": ["node0", "node0"], "bandwidth_scale": 1.25},
            ],
        }
    },
    {"training": {"framework": "compiled", "software_date": "2025-07"}, "calibration": "h100-sxm"},
    {
        "training": {"framework": "transformers"},
        "calibration": "h100-sxm",
        "parallelism": {"fsdp_version": 1, "backward_prefetch": False},
    },
    {
        "training": {"framework": "megatron", "zero_grad": "keep"},
        "parallelism": {"accumulate_unsharded": True, "dp_sync": "after_backward"},
    },
    {"model": {**MOE, "mtp_layers": 3, "mtp_repeated": True}},
    {
        "model": {"mtp_layers": 2, "mtp_repeated": True},
        "parallelism": {"dp": 2, "pp": 4, "mtp_stage": 2},
    },
)


def run_search(
    path: Path, overrides: Sequence[str] = (), only: Sequence[str] = (), memory_limit: str | None = None, **asked: Any
) -> SearchResult:
    """The result of the command on a file, by one worker; `asked` are fields of `Asked`."""
    study = Study(workers=1, overrides=tuple(overrides))
    return search_one(path, study, Asked(narrowing=Narrowing(tuple(only), memory_limit), **asked))


def varied(changes: dict[str, Any], gpus: int | None, only: dict[str, Any] | None = None) -> Space:
    """The space of BASE with changes."""
    return make_space(Source("test", merge(BASE, changes)), gpus, "test", only)


@cache
def space_of(variant: int, gpus: int | None = None) -> Space:
    """The space of a variant of BASE."""
    return varied(VARIANTS[variant], gpus)


def legal(space: Space) -> list[Layout]:
    """All legal layouts of a space."""
    return [
        x
        for mesh in meshes_of(space)
        if mesh_is_legal(space, mesh)
        for way in partial_layouts_of(space, mesh)
        for x, fine in layouts_of(space, way)
        if fine
    ]


@cache
def legal_layouts(variant: int) -> list[Layout]:
    """All legal layouts of a variant's own GPUs."""
    return legal(space_of(variant))


def small_space(variant: int, **only: Any) -> Space:
    """Few enough layouts to simulate them all."""
    few = {"schedule": ("1f1b", "interleaved_1f1b", "zb_h1"), "micro_batch_size": (1, 4)}
    return varied(VARIANTS[variant], 4, {**few, "recompute": ("none", "full"), **only})


@cache
def all_outcomes(variant: int) -> tuple[Space, list[Outcome]]:
    """A small space with every one of its layouts simulated."""
    space = small_space(variant)
    packed = pack(space)
    return space, [evaluate(packed, x) for x in legal(space)]
