"""peft's adapters: fp32 beside 16-bit weights, and dropout of their inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Block, Compute
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.simulation import simulate
from sim.validation.what_ran import with_what_ran
from tests.sim.cases import llama_like

H200 = Path(__file__).parents[3] / "scenarios" / "measured" / "gpu_programs_h200" / "table.json"
SMALL = llama_like(layers=3, hidden=256, heads=8, kv_heads=4, ffn=768, vocab=512)
NARROW = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False, "optimizer_dtype": "bf16"}
TOKENS, INPUTS, RESULTS = 128, 6 * 256 + 768, 2 * 256 + 2 * 128 + 2 * 768 + 256  # of a layer's seven adapters; k, n


def scenario(lora: dict[str, Any], **training: Any) -> Scenario:
    own = {"seq_len": TOKENS, "global_batch_size": 1, "framework": "transformers", "lora": {"rank": 8, **lora}}
    return parse_scenario({"model": SMALL, "cluster": {"gpu": "h200-sxm"}, "training": {**own, **NARROW, **training}})


def items(block: Block, words: str) -> list[Compute]:
    found = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute)]
    return [i for i in found if i.name.endswith(words) and "lora" in i.name]


def kept(block: Block) -> float:
    return sum(s.bytes for s in block.saved)


def test_adapters_have_fp32_beside_16_bits() -> None:
    wide = layer_block(scenario({}, autocast=False), 1)
    plain = layer_block(scenario({}, framework="eager"), 1)
    matmuls = [i for i in (*wide.forward, *wide.backward) if isinstance(i, Compute) and i.kind == "gemm"]
    assert {i.dtype for i in matmuls if "lora" in i.name} == {"fp32"}
    assert {i.dtype for i in matmuls if "lora" not in i.name} == {"bf16"}
    # Copies to fp32 and back: of inputs and their gradients, of results, and twice of results' gradients.
    copies = sum(sum(i.bytes for i in items(wide, words)) for words in ("lora_cast", "dgrad_cast"))
    assert copies == TOKENS * INPUTS * 2 * (2 + 4)
    copies = sum(sum(i.bytes for i in items(wide, words)) for words in ("result_cast", "grad_cast"))
    assert copies == TOKENS * (RESULTS * 3 + INPUTS) * (2 + 4)
    assert not items(plain, "cast")


def test_autocast_copies_to_fp32_and_back() -> None:
    """As Transformers' Trainer runs 16-bit models: matmuls of each adapter's own 16-bit copy, and copies of weights."""
    block = layer_block(scenario({}), 1)
    assert all(i.dtype == "bf16" for i in (*block.forward, *block.backward) if getattr(i, "kind", "") == "gemm")
    for words in ("_lora_cast", "_autocast", "_dgrad_cast", "_autocast_backward"):
        assert sum(i.bytes for i in items(block, words)) == TOKENS * INPUTS * (2 + 4)
    weights = 8 * (INPUTS + RESULTS)
    assert [sum(i.bytes for i in items(block, f"_weights_cast{w}")) for w in ("", "_backward")] == [6 * weights] * 2
    assert kept(layer_block(scenario({}, autocast=False), 1)) - kept(block) == TOKENS * (INPUTS * 2 + 7 * 8 * 2)
    compiled = layer_block(scenario({}, framework="transformers_compiled"), 1)
    assert not items(compiled, "cast")
    assert not items(layer_block(scenario({}, framework="deepspeed"), 1), "cast")


def test_each_adapter_keeps_what_dropout_left_and_its_mask() -> None:
    dropped, whole = (layer_block(scenario(lora, autocast=False), 1) for lora in ({"dropout": 0.1}, {}))
    assert kept(dropped) - kept(whole) == TOKENS * INPUTS  # the masks: fp32 inputs are each adapter's own anyway
    ops = items(dropped, "_dropout")
    assert sum(i.bytes for i in ops) == TOKENS * INPUTS * (4 + 4 + 1)
    assert sum(i.random_numbers for i in ops) == TOKENS * INPUTS


def test_a_measured_step_and_its_peak() -> None:
    """Llama 3.2 1B on an H200, adapters of rank 16, recomputed, without autocast."""
    table = json.loads(H200.read_text(encoding="utf-8"))
    row = next(r for r in table["rows"] if r["id"] == "llama1b_lora_checkpoint")
    own = {"lora": {"rank": row["program"]["lora_rank"]}, "recompute": "full", "autocast": False, **NARROW}
    data = merge(merge(table["scenario"], row["scenario"]), {"training": own})
    result = simulate(parse_scenario(with_what_ran(data, row, "row")))
    assert result.step_time_s == pytest.approx(row["measured"]["step_time_s"], rel=0.08)
    assert result.outcome.peak_memory_bytes == pytest.approx(row["measured"]["peak_memory_bytes"], rel=0.02)
