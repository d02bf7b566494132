"""Transformers' models under torch.compile: the causal mask as numbers, and logits whose gradient is zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_programs import LLAMA, make, named

from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.simulation import simulate
from sim.validation.what_ran import with_what_ran

ROOT = Path(__file__).parents[3]
NARROW = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False, "optimizer_dtype": "bf16"}


def test_attention_computes_all_pairs_of_copied_heads() -> None:
    own, compiled = (
        next(i for i in layer_block(make(LLAMA, {"framework": f}), 0).forward if i.kind == "attention_forward")
        for f in ("compiled", "transformers_compiled")
    )
    assert (own.shape[-1], own.masked) == (1, False)
    assert (compiled.shape[-1], compiled.masked) == (0, True)
    assert compiled.shape[2] == compiled.shape[1] == own.shape[1]  # a key and value head for each query head
    assert compiled.flops == pytest.approx(2 * own.flops, rel=0.01)
    # Another kernel than torch's own function gets no mask.
    flash = layer_block(make(LLAMA, {"framework": "transformers_compiled", "attention_kernel": "flash2"}), 0)
    assert not any(i.masked for i in flash.forward if i.kind == "attention_forward")


def test_the_loss_adds_to_zeros_of_the_logits_gradient() -> None:
    found = []
    for framework in ("compiled", "transformers_compiled"):
        block = head_block(make(LLAMA, {"framework": framework}))
        (back,) = named(block.backward, "cross_entropy_backward")
        found.append((back.bytes, back.kernels, back.shape[0]))
    (own, kernels, n), (compiled, more, _) = found
    assert (compiled - own, more - kernels) == (2 * 2 * n, 1)


@pytest.mark.parametrize(
    ("table", "row", "off"),
    [
        ("gpu_programs", "llama8b_4l_compile", 0.08),
        ("gpu_programs", "llama8b_4l_tensorwise", 0.08),
        ("gpu_programs_h200", "llama1b_compile", 0.08),
    ],
)
def test_described_steps_are_near_the_measured_ones(table: str, row: str, off: float) -> None:
    """Llama 3 8B cut to four layers on an H100, in 16 and 8 bits, and Llama 3.2 1B on an H200."""
    data: dict[str, Any] = json.loads((ROOT / "scenarios" / "measured" / table / "table.json").read_text("utf-8"))
    ran = next(r for r in data["rows"] if r["id"] == row)
    eight_bits = {"precision": "fp8"} if ran["program"].get("float8") else {}
    own = merge(data["scenario"], ran["scenario"])
    own = merge(own, {"training": {**NARROW, **eight_bits, "framework": "compiled"}})
    result = simulate(parse_scenario(with_what_ran(own, ran, row)))
    assert result.step_time_s == pytest.approx(ran["measured"]["step_time_s"], rel=off)
    assert result.outcome.peak_memory_bytes == pytest.approx(ran["measured"]["peak_memory_bytes"], rel=0.05)
