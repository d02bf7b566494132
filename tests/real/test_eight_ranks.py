"""Three and four kinds of parallelism at once, eight ranks: one device's loss and gradients, in double precision."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.real.conftest import small

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}
MOE = {"moe": {"experts": 4, "top_k": 2, "ffn": 48}}
BUCKET = {"bucket_bytes": 20_000}


def _tp(schedule: str, m: int = 4, **more: Any) -> dict[str, Any]:
    return small({"pp": 4, "tp": 2, "sp": True, "schedule": schedule} | more, m=m, layers=8, **LLAMA)


def _experts(zero: int, **more: Any) -> dict[str, Any]:
    return small({"dp": 8, "ep": 4, "zero": zero} | BUCKET | more, m=1, **MOE)


EIGHT_RANKS: dict[str, Any] = {
    "dp2 tp2 pp2": small({"dp": 2, "tp": 2, "sp": True, "pp": 2} | BUCKET, **LLAMA),
    "cp2 tp2 dp2": small({"cp": 2, "tp": 2, "sp": True, "dp": 2} | BUCKET, attention="fused", **LLAMA),
    "ep4 pp2": small({"dp": 4, "ep": 4, "pp": 2, "schedule": "1f1b"}, **MOE),
    "interleaved, tp2": _tp("interleaved_1f1b"),
    "llama 3's order, tp2": _tp("interleaved_1f1b", m=6, micro_batch_group=6),
    "zb_h1, tp2": _tp("zb_h1"),
    "zb_v, tp2": _tp("zb_v", m=8),
    "zero 1, dp2 tp2 pp2": small({"dp": 2, "tp": 2, "sp": True, "pp": 2, "zero": 1} | BUCKET, **LLAMA),
    "zero 2, dp4 pp2": small({"dp": 4, "pp": 2, "zero": 2} | BUCKET),
    "zero 3, dp2 tp2 pp2": small({"dp": 2, "tp": 2, "sp": True, "pp": 2, "zero": 3}, **LLAMA),
    "zero 1, experts": _experts(1),
    "zero 2, experts": _experts(2),
    "zero 3, experts": _experts(3),
    "zero 2, experts, pp2": small({"dp": 4, "ep": 2, "pp": 2, "zero": 2} | BUCKET, m=2, **MOE),
    "zero 2, experts, hybrid": _experts(2, shard_size=2),
    "zero 1, tied, pp2": small({"dp": 4, "pp": 2, "zero": 1} | BUCKET, m=2, tied_embeddings=True),
    "zero 3, tied, pp2": small({"dp": 4, "pp": 2, "zero": 3} | BUCKET, m=2, tied_embeddings=True),
    "zero 3, tied": small({"dp": 8, "zero": 3}, m=1, tied_embeddings=True),
    "zero 2, tied, pp2": small({"dp": 4, "pp": 2, "zero": 2} | BUCKET, m=2, tied_embeddings=True),
}
TRAINED = ["zero 1, experts", "zero 3, experts", "zero 2, experts, hybrid", "zero 1, tied, pp2"]


@pytest.fixture(scope="module")
def found(prove: Any) -> Any:
    return prove({n: {"scenario": s, "trained": n in TRAINED} for n, s in EIGHT_RANKS.items()}, 8)


@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_one_devices_loss_and_gradients(found: Any, name: str) -> None:
    assert found[name]["holds"], found[name]
    assert found[name]["parallel"] == pytest.approx(found[name]["single"], rel=1e-12)


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_after_three_steps(found: Any, name: str) -> None:
    """The norm counts every parameter once, experts and a matrix at both ends included."""
    assert found[name]["trained"] <= 1e-9


ALL_FOUR = {"dp": 2, "cp": 2, "tp": 2, "pp": 2, "sp": True} | BUCKET
SIXTEEN_RANKS: dict[str, Any] = {
    "1f1b": small(ALL_FOUR, attention="fused", **LLAMA),
    "zero 1": small(ALL_FOUR | {"zero": 1}, attention="fused", **LLAMA),
    "zero 3, zb_h1": small(ALL_FOUR | {"zero": 3, "schedule": "zb_h1"}, attention="fused", **LLAMA),
}
ASKED = "STEPSIM_SIXTEEN_RANKS" in os.environ


@pytest.mark.skipif((os.cpu_count() or 1) < 8 and not ASKED, reason="needs 8 cores or STEPSIM_SIXTEEN_RANKS=1")
def test_data_context_tensor_and_pipeline_parallelism_at_once(prove: Any) -> None:
    """Two ranks along each of the four dimensions: one device's loss and gradients."""
    found = prove({n: {"scenario": s} for n, s in SIXTEEN_RANKS.items()}, 16)
    for name, case in found.items():
        assert case["holds"], (name, case)
        assert case["parallel"] == pytest.approx(case["single"], rel=1e-12)
