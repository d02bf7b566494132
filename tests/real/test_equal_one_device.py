"""Loss and all gradients of every real parallel run equal one device's, in double precision."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.real.conftest import small

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}
MERGED = LLAMA | {"merged_projections": True}
TWO_RANKS: dict[str, Any] = {
    "naive": small({"pp": 2, "schedule": "naive"}),
    "gpipe": small({"pp": 2, "schedule": "gpipe"}),
    "1f1b": small({"pp": 2, "schedule": "1f1b"}),
    "1f1b, one micro-batch": small({"pp": 2, "schedule": "1f1b"}, m=1),
    "1f1b, uneven": small({"pp": 2, "schedule": "1f1b", "layers_per_stage": [4, 0]}),
    "1f1b, overlapped messages": small({"pp": 2, "schedule": "1f1b", "p2p_overlap": True}),
    "interleaved": small({"pp": 2, "schedule": "interleaved_1f1b"}),
    "interleaved, three in a row": small({"pp": 2, "schedule": "interleaved_1f1b", "micro_batch_group": 3}, m=5),
    "zb_h1": small({"pp": 2, "schedule": "zb_h1"}),
    "zb_h2": small({"pp": 2, "schedule": "zb_h2"}),
    "zb_v": small({"pp": 2, "schedule": "zb_v"}),
    "dualpipe_v": small({"pp": 2, "schedule": "dualpipe_v"}),
    "looped_bfs": small({"pp": 2, "schedule": "looped_bfs"}),
    "interleaved_zb": small({"pp": 2, "schedule": "interleaved_zb"}),
    "dropout": small({"pp": 2, "schedule": "1f1b"}, dropout=0.1),
    "dropout, split backward": small({"pp": 2, "schedule": "zb_h1"}, dropout=0.1),
    "llama": small({"pp": 2, "schedule": "1f1b"}, attention="fused", **LLAMA),
    "llama, split backward, unfused": small({"pp": 2, "schedule": "zb_h1"}, **LLAMA),
    "relu2": small({"pp": 2, "schedule": "gpipe"}, mlp="relu2", positions="none"),
    "dualpipe": small({"pp": 2, "schedule": "dualpipe"}),
    "zb_search": small({"pp": 2, "schedule": "zb_search"}),
    "tied, 1f1b": small({"pp": 2, "schedule": "1f1b"}, tied_embeddings=True),
    "tied, split backward": small({"pp": 2, "schedule": "zb_h1"}, tied_embeddings=True),
    "recompute full": small({"pp": 2, "schedule": "1f1b"}, recompute="full", dropout=0.1),
    "recompute full, split backward": small({"pp": 2, "schedule": "zb_h1"}, recompute="full"),
    "recompute every second": small({"pp": 2, "schedule": "gpipe"}, recompute={"mode": "full", "every": 2}),
    "recompute selective": small({"pp": 2, "schedule": "1f1b"}, recompute="selective", dropout=0.1),
    "recompute selective, llama": small({"pp": 2}, recompute="selective", attention="fused", **LLAMA),
    "recompute by operator": small({"pp": 2, "schedule": "1f1b"}, recompute="selective_op", dropout=0.1),
    "recompute by operator, llama": small({"pp": 2}, recompute="selective_op", attention="fused", **MERGED),
    "recompute by operator, split backward": small({"pp": 2, "schedule": "zb_h1"}, recompute="selective_op"),
    "recompute by operator, tp": small({"tp": 2}, recompute="selective_op", **MERGED),
    "recompute by operator, zero 3": small({"dp": 2, "zero": 3}, recompute="selective_op", dropout=0.1),
    "dp after backward": small({"dp": 2, "dp_sync": "after_backward"}),
    "dp by one rank": small({"dp": 2, "dp_sync": "reduce_broadcast"}),
    "dp per parameter": small({"dp": 2, "dp_sync": "per_parameter"}),
    "dp bucketed": small({"dp": 2, "dp_sync": "bucketed", "bucket_bytes": 100_000}),
    "dp with tied embeddings and dropout": small({"dp": 2}, tied_embeddings=True, dropout=0.1),
    "zero 1": small({"dp": 2, "zero": 1, "bucket_bytes": 50_000}),
    "zero 1 after backward": small({"dp": 2, "zero": 1, "dp_sync": "after_backward"}),
    "zero 1, tied": small({"dp": 2, "zero": 1, "bucket_bytes": 50_000}, tied_embeddings=True),
    "zero 2": small({"dp": 2, "zero": 2, "bucket_bytes": 50_000}, dropout=0.1),
    "zero 2 after backward": small({"dp": 2, "zero": 2, "dp_sync": "after_backward"}),
    "zero 2 per parameter": small({"dp": 2, "zero": 2, "dp_sync": "per_parameter"}),
    "zero 2 accumulating": small({"dp": 2, "zero": 2, "accumulate_unsharded": True}),
    "zero 3": small({"dp": 2, "zero": 3}, dropout=0.1),
    "zero 3 kept after forward": small({"dp": 2, "zero": 3, "reshard_after_forward": False}),
    "zero 3, recompute full": small({"dp": 2, "zero": 3}, recompute="full", dropout=0.1),
    "zero 3 accumulating": small({"dp": 2, "zero": 3, "accumulate_unsharded": True}, **LLAMA),
}
SPOILT = {
    "spoilt gradient": {"scenario": TWO_RANKS["1f1b"], "spoil": "gradient"},
    "lost all-reduce": {"scenario": TWO_RANKS["dp after backward"], "spoil": "all-reduce"},
}
FOUR_RANKS = {
    "dp2 pp2": small({"dp": 2, "pp": 2, "schedule": "1f1b", "dp_sync": "after_backward"}),
    "dp2 pp2 by one rank": small({"dp": 2, "pp": 2, "dp_sync": "reduce_broadcast"}),
    "dp2 pp2 bucketed": small({"dp": 2, "pp": 2, "schedule": "gpipe", "bucket_bytes": 50_000}, dropout=0.1),
    "dp2 pp2 split": small({"dp": 2, "pp": 2, "schedule": "zb_h1", "dp_sync": "per_parameter"}),
    "dp2 pp2, pipeline ranks adjacent": small({"dp": 2, "pp": 2, "rank_order": "tp-cp-pp-dp"}),
    "zero 1 pp2": small({"dp": 2, "pp": 2, "zero": 1, "bucket_bytes": 50_000}),
    "zero 2 pp2 split": small({"dp": 2, "pp": 2, "zero": 2, "schedule": "zb_h1", "bucket_bytes": 50_000}),
    "zero 3 pp2": small({"dp": 2, "pp": 2, "zero": 3, "schedule": "1f1b"}),
    "zero 3 pp2 split": small({"dp": 2, "pp": 2, "zero": 3, "schedule": "zb_v"}, layers=4),
    "zero 2 hybrid": small({"dp": 4, "zero": 2, "shard_size": 2, "bucket_bytes": 50_000}),
    "zero 3 hybrid": small({"dp": 4, "zero": 3, "shard_size": 2}),
    "zero 2 hybrid, once": small(
        {"dp": 4, "zero": 2, "shard_size": 2, "bucket_bytes": 50_000, "all_reduce_once": True}, m=3
    ),
    "zero 3 hybrid, once": small({"dp": 4, "zero": 3, "shard_size": 2, "all_reduce_once": True}, m=3),
    "pp4": small({"pp": 4, "schedule": "1f1b"}),
    "pp4 dualpipe": small({"pp": 4, "schedule": "dualpipe"}, m=8),
    "dp2 pp2 dualpipe zero 1": small({"dp": 2, "pp": 2, "schedule": "dualpipe", "zero": 1, "bucket_bytes": 50_000}),
    "dp2 pp2 tied": small({"dp": 2, "pp": 2, "dp_sync": "per_parameter"}, tied_embeddings=True),
    "pp4 interleaved": small({"pp": 4, "schedule": "interleaved_1f1b"}, layers=8),
    "pp4 interleaved, two in a row": small(
        {"pp": 4, "schedule": "interleaved_1f1b", "micro_batch_group": 2}, m=5, layers=8
    ),
    "pp4 zb_v": small({"pp": 4, "schedule": "zb_v"}, m=8, layers=8),
}


def _cases(scenarios: dict[str, Any]) -> dict[str, Any]:
    return {name: {"scenario": scenario} for name, scenario in scenarios.items()}


@pytest.fixture(scope="module")
def two_ranks(prove: Any) -> Any:
    return prove(_cases(TWO_RANKS) | SPOILT, 2)


@pytest.fixture(scope="module")
def four_ranks(prove: Any) -> Any:
    return prove(_cases(FOUR_RANKS), 4)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two_ranks: Any, name: str) -> None:
    found = two_ranks[name]
    assert found["holds"], found
    assert found["difference"] <= 1e-10
    assert found["parallel"] == pytest.approx(found["single"], rel=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "naive",
        "gpipe",
        "1f1b",
        "1f1b, uneven",
        "interleaved",
        "relu2",
        "llama",
        "dp bucketed",
        "dualpipe",
        "zero 2",
        "zero 3",
        "zero 3, recompute full",
        "recompute full",
        "recompute every second",
        "recompute selective",
        "recompute by operator",
        "recompute by operator, zero 3",
        "recompute by operator, llama",
        "recompute by operator, tp",
    ],
)
def test_bytes_saved_over_a_step(two_ranks: Any, name: str) -> None:
    """The most a rank holds for backward at once, in flight and all, as simulated: twice that in double precision."""
    simulated = simulate(parse_scenario(TWO_RANKS[name])).result["memory"]
    by_class = [row["activations"] for row in simulated for _ in range(row["count"])]
    assert two_ranks[name]["saved"] == pytest.approx([2 * x for x in by_class], rel=0.03, abs=2000)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(four_ranks: Any, name: str) -> None:
    assert four_ranks[name]["holds"], four_ranks[name]


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_gradient_is_found(two_ranks: Any, name: str) -> None:
    assert not two_ranks[name]["holds"]
    assert two_ranks[name]["difference"] > 1e-3
