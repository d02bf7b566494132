"""Tensor, sequence, context and expert parallelism for real: one device's loss and gradients, in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.real.conftest import ROOT, small

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}
ONE_KEY_HEAD = LLAMA | {"kv_heads": 1, "bias": True}
MOE = {"moe": {"experts": 4, "top_k": 2, "ffn": 48}}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT = LLAMA | {"kv_heads": 4, "mla": MLA}
WHOLE_QUERIES = {"mla": MLA | {"q_lora_rank": None, "v_head_dim": 12}}  # layernorms, biases and positions beside it
INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
SHARED = {"moe": {"experts": 8, "top_k": 3, "ffn": 32, "shared_experts": 1, "dense_layers": 1}}


def _ring(split: str, **model: Any) -> dict[str, Any]:
    return small({"cp": 2, "cp_split": split}, attention="fused", **model)


TWO_RANKS: dict[str, Any] = {
    "tp": small({"tp": 2}),
    "tp, odd vocabulary": small({"tp": 2}, vocab=300),
    "tp, tied embeddings": small({"tp": 2}, tied_embeddings=True),
    "tp, llama, fused": small({"tp": 2}, attention="fused", **LLAMA),
    "tp, one KV head": small({"tp": 2}, **ONE_KEY_HEAD),
    "tp, all-reduce beside the weight gradient": small({"tp": 2, "tp_overlap": "wgrad"}),
    "tp, relu2, no positions": small({"tp": 2}, mlp="relu2", positions="none"),
    "sp": small({"tp": 2, "sp": True}),
    "sp, llama, fused": small({"tp": 2, "sp": True}, attention="fused", **LLAMA),
    "sp, one KV head": small({"tp": 2, "sp": True}, **ONE_KEY_HEAD),
    "tp, dropout": small({"tp": 2}, dropout=0.1),
    "tp, dropout, shared KV head": small({"tp": 2}, dropout=0.1, **ONE_KEY_HEAD),
    "sp, dropout, llama": small({"tp": 2, "sp": True}, dropout=0.1, **LLAMA),
    "sp, dropout, recomputed": small({"tp": 2, "sp": True}, dropout=0.1, recompute="full"),
    "sp, overlapped": small({"tp": 2, "sp": True, "tp_overlap": "wgrad"}),
    "tp, chunked": small({"tp": 2, "tp_overlap": "full"}),
    "sp, chunked": small({"tp": 2, "sp": True, "tp_overlap": "full"}),
    "sp, chunked, one KV head": small({"tp": 2, "sp": True, "tp_overlap": "full"}, **ONE_KEY_HEAD),
    "tp, latents": small({"tp": 2}, **LATENT),
    "tp, latents, whole queries": small({"tp": 2}, dropout=0.1, **WHOLE_QUERIES),
    "sp, latents": small({"tp": 2, "sp": True}, **LATENT),
    "sp, latents, whole queries, fused": small({"tp": 2, "sp": True}, attention="fused", **WHOLE_QUERIES),
    "sp, latents, experts split": small({"tp": 2, "sp": True, "expert_tp": 2}, recompute="full", **(LATENT | SHARED)),
    "ring, contiguous": _ring("contiguous"),
    "ring, latents": _ring("zigzag", **WHOLE_QUERIES),
    "ring, zigzag": _ring("zigzag"),
    "ring, striped": _ring("striped"),
    "ring, zigzag, llama": _ring("zigzag", **LLAMA),
    "ring, striped, llama": _ring("striped", **LLAMA),
    "all-gather, contiguous": small({"cp": 2, "cp_method": "all_gather", "cp_split": "contiguous"}, attention="fused"),
    "all-gather, zigzag": small({"cp": 2, "cp_method": "all_gather"}, attention="fused", **LLAMA),
    "all-gather, striped": small({"cp": 2, "cp_method": "all_gather", "cp_split": "striped"}, attention="fused"),
    "all-to-all": small({"cp": 2, "cp_method": "all_to_all"}, attention="fused"),
    "all-to-all, one KV head": small({"cp": 2, "cp_method": "all_to_all"}, attention="fused", **ONE_KEY_HEAD),
    "tp, fused dropout": small({"tp": 2}, attention="fused", dropout=0.1, **ONE_KEY_HEAD),
    "ring, contiguous, dropout": _ring("contiguous", dropout=0.1),
    "ring, zigzag, dropout": _ring("zigzag", dropout=0.1, recompute="selective", **LLAMA),
    "ring, striped, dropout": _ring("striped", dropout=0.1, recompute="full"),
    "all-gather, dropout": small({"cp": 2, "cp_method": "all_gather"}, attention="fused", dropout=0.1),
    "all-to-all, dropout": small({"cp": 2, "cp_method": "all_to_all"}, attention="fused", dropout=0.1, **LLAMA),
    "ep": small({"dp": 2, "ep": 2}, **MOE),
    "ep, capacity": small({"dp": 2, "ep": 2}, moe=MOE["moe"] | {"capacity_factor": 0.75}),
    "ep, roomy": small({"dp": 2, "ep": 2}, moe=MOE["moe"] | {"capacity_factor": 1.25}),
    "ep, shared experts": small({"dp": 2, "ep": 2, "dp_sync": "after_backward"}, **(LLAMA | SHARED)),
    "experts on every rank": small({"dp": 2, "dp_sync": "after_backward"}, **MOE),
    "ep over cp": small({"cp": 2, "ep": 2}, attention="fused", **MOE),
    "ep over tp": small({"tp": 2, "ep": 2, "sp": True}, **SHARED),
    "experts whole beside sp": small({"tp": 2, "sp": True}, **MOE),
    "experts split": small({"dp": 2, "expert_tp": 2}, **MOE),
    "experts split over tp": small({"tp": 2, "sp": True, "expert_tp": 2}, **(LLAMA | SHARED)),
}
FOUR_RANKS: dict[str, Any] = {
    "dp2 tp2": small({"dp": 2, "tp": 2, "sp": True, "bucket_bytes": 20_000}),
    "tp2 pp2": small({"tp": 2, "pp": 2, "schedule": "1f1b"}),
    "tp2 pp2 sp, split backward": small({"tp": 2, "pp": 2, "sp": True, "schedule": "zb_h1"}, **LLAMA),
    "tp2 cp2, dropout": small({"tp": 2, "cp": 2, "sp": True}, attention="fused", dropout=0.1, **LLAMA),
    "tp2 all-to-all, dropout": small({"tp": 2, "cp": 2, "cp_method": "all_to_all"}, attention="fused", dropout=0.1),
    "cp2 dp2": small({"cp": 2, "dp": 2, "dp_sync": "after_backward"}, attention="fused"),
    "cp2 pp2": small({"cp": 2, "pp": 2, "schedule": "1f1b", "cp_method": "all_gather"}, attention="fused"),
    "tp2 cp2": small({"tp": 2, "cp": 2, "sp": True}, attention="fused", **LLAMA),
    "ep2 dp2": small({"dp": 4, "ep": 2, "dp_sync": "after_backward"}, **SHARED),
    "ep2 pp2": small({"dp": 2, "pp": 2, "ep": 2, "schedule": "zb_h1"}, **MOE),
    "ep2 in dualpipe's pairs": small({"dp": 2, "pp": 2, "ep": 2, "schedule": "dualpipe", "ep_overlap": True}, **MOE),
    "ep2 in a V's pairs": small({"dp": 2, "pp": 2, "ep": 2, "schedule": "dualpipe_v", "ep_overlap": True}, **MOE),
    "ep2 in 1F1B's pairs": small({"dp": 2, "pp": 2, "ep": 2, **INTERLEAVED, "ep_overlap": True}, **MOE),
    "ep4 in one rank's pairs": small({"dp": 4, "ep": 4, "ep_overlap": True}, **MOE),
    "ep2 of experts split over tp2": small({"dp": 2, "tp": 2, "sp": True, "ep": 2, "expert_tp": 2}, **SHARED),
    "experts split, pp2": small({"dp": 2, "pp": 2, "expert_tp": 2, "schedule": "zb_h1"}, **MOE),
    "tp4, two KV heads": small({"tp": 4, "sp": True}, **LLAMA),
    "tp2 pp2 sp, latents, split backward": small({"tp": 2, "pp": 2, "sp": True, "schedule": "zb_h1"}, **LATENT),
    "ring of four, contiguous": small({"cp": 4, "cp_split": "contiguous"}, attention="fused", **LLAMA),
    "ring of four, zigzag": small({"cp": 4}, attention="fused", **LLAMA),
    "ring of four, striped": small({"cp": 4, "cp_split": "striped"}, attention="fused"),
    "all-gather of four": small({"cp": 4, "cp_method": "all_gather"}, attention="fused"),
    "all-to-all of four": small({"cp": 4, "cp_method": "all_to_all"}, attention="fused", **LLAMA),
}
FOUR_RANKS |= {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "scenarios" / "cpu4").glob("*.yaml"))
}


def _sharded(zero: int, sp: bool, **model: Any) -> dict[str, Any]:
    """Buckets that end within matrices; a vocabulary that two ranks share without padding."""
    return small({"dp": 2, "tp": 2, "sp": sp, "zero": zero, "bucket_bytes": 20_000}, vocab=256, **model)


SHARDED = {
    "zero 1 beside tp": _sharded(1, False),
    "zero 1 beside sp": _sharded(1, True, **LLAMA),
    "zero 2 beside sp": _sharded(2, True),
    "zero 3 beside sp": _sharded(3, True),
    "zero 2, one KV head": _sharded(2, False, **ONE_KEY_HEAD),
    "zero 3 beside sp, one KV head": _sharded(3, True, **ONE_KEY_HEAD),
    "zero 3 beside sp, latents": _sharded(3, True, **LATENT),
    "zero 3, experts split": small({"dp": 4, "expert_tp": 2, "zero": 3}, vocab=256, **MOE),
}
ROUTED = {name: TWO_RANKS[name] for name in ("ep", "ep over tp", "ep, capacity", "experts split")}
SPOILT = {  # what a rank forgets → a case that must notice
    "tp sum": "tp",
    "tp gather": "sp",
    "sum over tokens": "sp",
    "shared KV heads": "tp, one KV head",
    "ring step": "ring, zigzag",
    "expert gradients": "experts on every rank",
    "dispatch": "ep",
    "places": "ring, zigzag, dropout",
    "expert parts' sum": "experts split",
    "shared key": "tp, latents",
}


LARGE_MLA = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
LARGE = {"moe": {"experts": 4, "top_k": 2, "ffn": 512}}


def _sized(parallelism: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Large enough for activations to outweigh row statistics and token numbers."""
    data = small(parallelism, m=1, layers=2, hidden=256, vocab=512, **model)
    data["training"]["seq_len"] = 256
    return data


SIZED = {
    "tp": _sized({"tp": 2}),
    "sp": _sized({"tp": 2, "sp": True}),
    "tp, chunked": _sized({"tp": 2, "tp_overlap": "full"}),
    "sp, chunked": _sized({"tp": 2, "sp": True, "tp_overlap": "full"}),
    "tp, llama": _sized({"tp": 2, "sp": True}, attention="fused", **LLAMA),
    "tp, latents": _sized({"tp": 2}, **(LATENT | {"mla": LARGE_MLA})),
    "sp, latents": _sized({"tp": 2, "sp": True}, **(LATENT | {"mla": LARGE_MLA})),
    "sp, latents, whole queries": _sized({"tp": 2, "sp": True}, mla=LARGE_MLA | {"q_lora_rank": None}),
    "ring": _sized({"cp": 2}, attention="fused"),
    "ring, llama": _sized({"cp": 2}, attention="fused", **LLAMA),
    "all-gather": _sized({"cp": 2, "cp_method": "all_gather"}, attention="fused"),
    "ep": _sized({"dp": 2, "ep": 2}, attention="fused", **LARGE),
    "experts split": _sized({"dp": 2, "expert_tp": 2}, attention="fused", **LARGE),
    "experts split over tp": _sized({"tp": 2, "sp": True, "expert_tp": 2}, attention="fused", **LARGE),
}


def _cases(scenarios: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: {"scenario": scenario} | more for name, scenario in scenarios.items()}


@pytest.fixture(scope="module")
def two_ranks(prove: Any) -> Any:
    return prove(_cases(TWO_RANKS), 2)


@pytest.fixture(scope="module")
def four_ranks(prove: Any) -> Any:
    return prove(_cases(FOUR_RANKS) | _cases(SHARDED, cuts=True), 4)


@pytest.fixture(scope="module")
def special(prove: Any) -> Any:
    spoilt = {f"spoilt {what}": {"scenario": TWO_RANKS[case], "spoil": what} for what, case in SPOILT.items()}
    routed = {f"routed {name}": {"scenario": s, "free_routing": True} for name, s in ROUTED.items()}
    sized = {f"sized {name}": {"scenario": s, "cuts": True} for name, s in SIZED.items()}
    return prove(spoilt | routed | sized, 2)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two_ranks: Any, name: str) -> None:
    found = two_ranks[name]
    assert found["holds"], found
    assert found["parallel"] == pytest.approx(found["single"], rel=1e-12)


@pytest.mark.parametrize("name", [*FOUR_RANKS, *SHARDED])
def test_four_ranks(four_ranks: Any, name: str) -> None:
    assert four_ranks[name]["holds"], four_ranks[name]


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters_after_three_steps(four_ranks: Any, name: str) -> None:
    """The norm counts every parameter once, though shards of two data-parallel ranks and two tp ranks share it."""
    assert four_ranks[name]["trained"] <= 1e-9


@pytest.mark.parametrize("name", ROUTED)
def test_tokens_routed_unevenly(special: Any, name: str) -> None:
    """By the router's own choice, so that ranks exchange as many copies as chance will have it."""
    assert special[f"routed {name}"]["holds"], special[f"routed {name}"]


@pytest.mark.parametrize("what", SPOILT)
def test_what_a_rank_forgets_is_found(special: Any, what: str) -> None:
    found = special[f"spoilt {what}"]
    assert not found["holds"]
    assert found["difference"] > 1e-4


@pytest.mark.parametrize("name", SIZED)
def test_saved_bytes(special: Any, name: str) -> None:
    """Within 1 % of the simulator's (which counts 4 bytes where double precision has 8)."""
    simulated = simulate(parse_scenario(SIZED[name])).result["memory"]
    by_rank = [row["activations"] for row in simulated for _ in range(row["count"])]
    assert special[f"sized {name}"]["saved"] == pytest.approx([2 * x for x in by_rank], rel=0.01)


@pytest.mark.parametrize("name", SIZED)
def test_communications_are_the_simulators(special: Any, name: str) -> None:
    """Every block's communications, forward and backward: the same in the same order, of as many bytes."""
    assert special[f"sized {name}"]["communications"] > 0


def test_ring_needs_less_memory_the_more_ranks(two_ranks: Any, four_ranks: Any) -> None:
    """Twice the ranks, half the activations of each."""
    two, four = two_ranks["ring, zigzag, llama"], four_ranks["ring of four, zigzag"]
    assert max(four["saved"]) == pytest.approx(max(two["saved"]) / 2, rel=0.02)


def test_parameters_after_three_steps(special: Any) -> None:
    """Clipping and optimizer included: the norm counts every parameter once, wherever it is held."""
    for name in SIZED:
        assert special[f"sized {name}"]["trained"] <= 1e-9, name
