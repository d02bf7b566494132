"""Real ranks once: of each kind of parallelism the smallest, and random layouts, have one device's gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.conftest import small
from tests.real.random_layouts import QUICK, drawn

CASES: dict[str, Any] = {
    "1f1b": {"scenario": small({"pp": 2, "schedule": "1f1b"})},
    "zb_h1": {"scenario": small({"pp": 2, "schedule": "zb_h1"})},
    "tp": {"scenario": small({"tp": 2, "sp": True})},
    "cp": {"scenario": small({"cp": 2}, attention="fused")},
    "experts": {"scenario": small({"dp": 2, "ep": 2}, moe={"experts": 4, "top_k": 2, "ffn": 48})},
    "zero 3": {"scenario": small({"dp": 2, "zero": 3})},
}
CASES |= {name: {"scenario": scenario} for name, scenario in list(drawn().items())[:QUICK]}
SPOILT = {"wrong": CASES["zero 3"] | {"spoil": "gradient"}}


@pytest.fixture(scope="module")
def found(prove: Any) -> Any:
    return prove(CASES | SPOILT, 2)


@pytest.mark.parametrize("name", CASES)
def test_one_devices_loss_and_gradients(found: Any, name: str) -> None:
    assert found[name]["holds"], found[name]
    assert found[name]["parallel"] == pytest.approx(found[name]["single"], rel=1e-12)


def test_a_wrong_gradient_is_found(found: Any) -> None:
    assert not found["wrong"]["holds"]
