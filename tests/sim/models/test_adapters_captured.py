"""Adapters beside frozen weights: what a layer keeps and moves, against captured programs of Transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Block, Compute
from sim.inputs.program_file import CapturedProgram
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block

FP32 = {"param_dtype": "fp32"}
NARROW = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False, "optimizer_dtype": "bf16"}
MATMULS = ("gemm", "attention_forward", "attention_backward")
WEIGHTS = ("parameter", "frozen parameter")
# What is captured, and the keys that say it.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 bits": ({"weights": "bf16"}, {**NARROW, "autocast": False}),
    "16 bits under autocast": ({"weights": "bf16", "autocast": "bf16"}, NARROW),
    "fp32 under autocast": ({"autocast": "bf16"}, {**FP32, "autocast": True}),
    "fp32": ({}, {**FP32, "precision": "fp32"}),
}
CASES = [("llama", "sdpa", way) for way in WAYS] + [("llama", "eager", way) for way in WAYS]
CASES += [("olmo2", "sdpa", way) for way in WAYS] + [
    ("gpt2", "sdpa", "fp32 under autocast"),
    ("gpt2", "sdpa", "16 bits"),
    ("gpt2", "sdpa", "16 bits under autocast"),
    ("gpt2", "eager", "16 bits under autocast"),
    ("bloom", "eager", "16 bits under autocast"),
]
# Of an element of an RMS norm's backward, bytes of the two operators that `rms_norm_eager` leaves out; less those that
# profiles count more of the gradients of a cut projection: those of zeros are filled first (`split_gradients`).
LEFT_OUT = {"llama": 12, "gpt2": 0, "bloom": -3}


def described(name: str, attention: str, way: str) -> Block:
    pytest.importorskip("peft", reason="the adapters are peft's")
    kind = {"sdpa": "fused", "eager": "unfused"}[attention]
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": kind}
    return layer_block(make(MODELS[name], {**sizes, "lora": {"rank": 8}, **WAYS[way][1]}), 1)


def layer_of(program: CapturedProgram, name: str) -> list[Any]:
    return [o for o in program.operators if LAYER[name] in o.module and o.launches]


@pytest.mark.parametrize(("name", "attention", "way"), CASES)
def test_a_layer_keeps_what_the_captured_one_keeps(tmp_path: Path, name: str, attention: str, way: str) -> None:
    """No normalized values of a norm whose weight is frozen; an adapter's own copy beside the attention's result. Casts
    of weights apart, which are among a rank's copies of parameters."""
    block = described(name, attention, way)
    program = capture(tmp_path, name, attention, lora_rank=8, **WAYS[way][0])
    weights = {i for i, s in enumerate(program.storages) if s.kind in WEIGHTS}
    mine = [s for s in program.storages if s.kind == "activation" and LAYER[name] in s.name]
    kept = [s.bytes for s in mine if not (weights & {*program.operators[s.born].reads} and _casts(program, s.born))]
    assert sum(s.bytes for s in block.saved) == pytest.approx(sum(kept), rel=0.001)


def _casts(program: CapturedProgram, operator: int) -> bool:
    return program.operators[operator].name.endswith("_to_copy")


@pytest.mark.parametrize(
    ("name", "attention", "way"),
    [
        ("llama", "sdpa", "16 bits under autocast"),
        ("llama", "sdpa", "fp32 under autocast"),
        ("gpt2", "sdpa", "16 bits under autocast"),
        ("gpt2", "eager", "16 bits under autocast"),
        ("gpt2", "sdpa", "fp32 under autocast"),
        ("bloom", "eager", "16 bits under autocast"),
    ],
)
def test_kernels_beside_matmuls_move_what_the_captured_ones_move(
    tmp_path: Path, name: str, attention: str, way: str
) -> None:
    """Under autocast each adapter copies its own input in 16 bits, once more than the frozen layer beside it does.
    GPT-2's norms, powers and softmax read and write fp32, whatever the weights have. BLOOM's residual stream has fp32
    beside 16-bit weights, as the norm behind its embedding gives it."""
    block = described(name, attention, way)
    program = capture(tmp_path, name, attention, lora_rank=8, **WAYS[way][0])
    left_out = {"forward": 0, "backward": 2 * LEFT_OUT[name] * BATCH * SEQ * 512}
    for phase, items in (("forward", block.forward), ("backward", block.backward)):
        mine = [o for o in layer_of(program, name) if o.phase == phase]
        kernels = [o for o in mine if not ("mm" in o.name or "attention" in o.name)]
        found = [i for i in items if isinstance(i, Compute) and i.kind not in MATMULS]
        found = [i for i in found if i.name != "attention_biases"]  # copied by the matmul that adds to them
        moved = sum(t.bytes for o in kernels for t in (*o.inputs, *o.outputs))
        assert sum(i.bytes for i in found) == pytest.approx(moved - left_out[phase], rel=0.005)
        launched = sum(i.kernels for o in kernels for i in computes_of(o))
        assert sum(i.kernels for i in found) == pytest.approx(launched, rel=0.06)


@pytest.mark.parametrize(("name", "norms"), [("llama", "layernorm"), ("gpt2", ".ln_")])
def test_frozen_norms_get_no_gradient_of_their_weights(tmp_path: Path, name: str, norms: str) -> None:
    """The sum with the residual branch's gradient, which the captured program has among a norm's operators, apart."""
    found = [i for i in described(name, "sdpa", "16 bits").backward if isinstance(i, Compute) and "norm" in i.name]
    program = capture(tmp_path, name, "sdpa", lora_rank=8, **WAYS["16 bits"][0])
    mine = [o for o in layer_of(program, name) if o.phase == "backward" and norms in o.module]
    moved = sum(t.bytes for o in mine for t in (*o.inputs, *o.outputs))
    elements = BATCH * SEQ * 512
    left_out = 2 * (6 + LEFT_OUT[name]) * elements
    assert sum(i.bytes for i in found) == pytest.approx(moved - left_out, rel=0.01)
    assert sum(i.kernels for i in found) == len(mine) - 2
