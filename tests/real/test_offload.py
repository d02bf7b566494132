"""Activations offloaded for real: one device's gradients, and the copies and saved bytes of the simulation."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.real.conftest import small

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}


def _offloaded(parallelism: dict[str, Any], m: int = 2, **model: Any) -> dict[str, Any]:
    data = small(parallelism, m=m, **model)
    data["training"]["activation_offload"] = True
    return data


CASES: dict[str, Any] = {
    "1f1b": _offloaded({"pp": 2, "schedule": "1f1b"}, m=4),
    "split backward": _offloaded({"pp": 2, "schedule": "zb_h1"}, m=4),
    "a V": _offloaded({"pp": 2, "schedule": "zb_v"}, dropout=0.1),
    "dualpipe": _offloaded({"pp": 2, "schedule": "dualpipe"}, m=4),
    "recompute full": _offloaded({"pp": 2, "schedule": "1f1b"}, recompute="full", dropout=0.1),
    "recompute selective": _offloaded({"dp": 2}, recompute="selective"),
    "zero 3": _offloaded({"dp": 2, "zero": 3}),
    "sp": _offloaded({"tp": 2, "sp": True}, **LLAMA),
    "tp, tied": _offloaded({"tp": 2}, tied_embeddings=True),
    "ring": _offloaded({"cp": 2}, attention="fused", **LLAMA),
    "experts": _offloaded({"dp": 2, "ep": 2}, moe={"experts": 4, "top_k": 2, "ffn": 48}),
}
Found = tuple[dict[str, Any], Any]


@pytest.fixture(scope="module")
def proven(prove: Any) -> dict[str, Any]:
    found: dict[str, Any] = prove({name: {"scenario": s} for name, s in CASES.items()}, 2)
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_one_device_s(proven: dict[str, Any], name: str) -> None:
    assert proven[name]["holds"], proven[name]


@pytest.mark.parametrize("name", CASES)
def test_copies_are_the_simulated_ones(proven: dict[str, Any], name: str) -> None:
    """On every rank: each stage's blocks out and back, in the simulated order, of as many bytes (twice those in double
    precision; token numbers stay, masks have a byte in both)."""
    simulation = simulate(parse_scenario(CASES[name]), expand=True)
    plan = simulation.plan
    for rank, copies in enumerate(proven[name]["copies"]):
        like = plan.classes[plan.class_of(rank)].rank  # equal ranks are simulated once
        spans = [s for s in simulation.timeline.spans() if s.rank == like and s.stream == "host"]
        spans.sort(key=lambda s: s.start_s)
        assert [(kind.upper(), stage) for kind, stage, *_ in copies] == [(s.kind, s.stage) for s in spans]
        for (_, _, block, size), span in zip(copies, spans, strict=True):
            assert size == pytest.approx(2 * span.detail.bytes, rel=0.04, abs=1100), (block, span)


@pytest.mark.parametrize("name", CASES)
def test_what_is_on_the_device(proven: dict[str, Any], name: str) -> None:
    """Two blocks' activations at the most, and what a split backward keeps for its weight half."""
    simulated = simulate(parse_scenario(CASES[name])).result["memory"]
    by_class = [2 * row["activations"] for row in simulated for _ in range(row["count"])]
    assert proven[name]["saved"] == pytest.approx(by_class, rel=0.03, abs=1100)
