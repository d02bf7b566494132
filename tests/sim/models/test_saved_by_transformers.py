"""Saved bytes of `framework: transformers` against layers of Hugging Face Transformers that really ran.

`tests/real/saved_by_transformers.py` and `saved_by_state_layers.py` write the tables, tests beside them measure again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_programs import GPT, make, unmasked

from sim.core.program import Block, Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from tests.sim.inputs.test_model_families import written

DATA = Path(__file__).parents[1] / "data"
TABLE, STATES = (
    json.loads((DATA / f"saved_by_{name}.json").read_text(encoding="utf-8"))
    for name in ("transformers", "state_layers")
)

JOINED_GATES = ("qwen4_exp_text",)  # in fp32 the norm's input is kept as a part of what holds attention's gates too


# Under autocast: heads that are turned, in fp32, before their norms; cosines and sines; gate and up of one matmul,
# whose input is cast once.
AUTOCAST_APART = {"hunyuan_v1_dense": 0.044, "helium": 0.011, "glm": 0.037, "glm4": 0.03}

CASES = [(family, way) for family, row in TABLE["families"].items() for way in row["kept_bytes"]]


@pytest.mark.parametrize("family", STATES["families"])
def test_saved_bytes_of_layers_with_a_state(tmp_path: Path, family: str) -> None:
    """Projections within scans, eager gated norms, copies to channels' order, beside stand-ins of the kernels."""
    compare(tmp_path, STATES["families"][family], "bf16", 0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), CASES)
def test_saved_bytes_are_those_of_real_layers(tmp_path: Path, family: str, precision: str) -> None:
    apart = 0.019 if family in JOINED_GATES else 0.01
    if precision == "autocast":
        apart = AUTOCAST_APART.get(family, apart)
    compare(tmp_path, TABLE["families"][family], precision, apart)


def compare(tmp_path: Path, row: dict[str, Any], precision: str, apart: float) -> None:
    attention = {"eager": "unfused", "sdpa": "fused"}[row["attention"]]
    training = {
        "seq_len": TABLE["seq_len"],
        "micro_batch_size": TABLE["batch"],
        "global_batch_size": TABLE["batch"],
        "precision": "fp32" if precision == "fp32" else "bf16",
        "param_dtype": "bf16" if precision == "bf16" else "fp32",
        "framework": "transformers",
        "attention": attention,
    }
    scenario = parse_scenario({"model": written(tmp_path, row["config"]), "training": training, "cluster": "dgx-h100"})
    if attention == "fused":
        scenario = unmasked(scenario)
    before = row.get("before", 0)  # layers that are not compared
    layers = range(before + row["layers"], before + 2 * row["layers"])
    kept = sum(s.bytes for layer in layers for s in layer_block(scenario, layer).saved)
    if precision == "autocast":
        assert not any("torch.autocast" in warning for warning in scenario.warnings)
    assert kept == pytest.approx(row["kept_bytes"][precision], rel=apart)


def test_soft_caps_keep_a_tanh_and_take_kernels() -> None:
    """Gemma 2's caps in separate operators: one more tensor as large as the scores, and one as the logits."""
    capped = GPT | {"attention_softcap": 50.0, "logit_softcap": 30.0}
    training = {"attention": "unfused", "precision": "fp16"}
    plain, new = make(GPT, training), make(capped, training)
    scores, logits = 2 * 16 * 512**2, 2 * 512 * 51200
    assert kept(layer_block(new, 0)) - kept(layer_block(plain, 0)) == 2 * scores
    assert kept(head_block(new)) - kept(head_block(plain)) == 2 * logits
    fused = make(capped, {"attention": "fused", "cross_entropy": "fused"})
    assert kept(layer_block(fused, 0)) == kept(layer_block(make(GPT), 0))
    assert kept(head_block(fused)) == kept(head_block(make(GPT, {"cross_entropy": "fused"})))
    caps = [i for i in head_block(new).forward if isinstance(i, Compute) and i.name == "logit_softcap"]
    assert [(i.kernels, i.bytes) for i in caps] == [(3, 6 * 2 * logits)]


def kept(block: Block) -> float:
    return sum(s.bytes for s in block.saved)


def test_there_are_at_least_thirty_families() -> None:
    assert len(TABLE["families"]) >= 30
