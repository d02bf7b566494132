"""Phi-3 in Transformers slices query, key and value, gate and up out of one matmul's result each: as captured."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Compute
from sim.models.layer import layer_block

MATMULS = ("gemm", "attention_forward", "attention_backward")


def test_kernels_beside_matmuls_move_what_the_captured_ones_move(tmp_path: Path) -> None:
    """Gradients of slices are put into zeros and added up; those of gate and up are joined by one kernel."""
    program = capture(tmp_path, "phi3", "sdpa", weights="bf16")
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "param_dtype": "bf16"}
    layer = layer_block(make(MODELS["phi3"], sizes), 1)
    assert {i.bytes for i in layer.backward if isinstance(i, Compute) and i.name == "swiglu_join_backward"} == {
        sum(t.bytes for t in (*o.inputs, *o.outputs))
        for o in program.operators
        if o.phase == "backward" and o.name == "aten.cat" and o.module.endswith("layers.1.mlp")
    }
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [o for o in program.operators if o.phase == phase and LAYER["phi3"] in o.module and o.launches]
        kernels = [o for o in mine if not ("mm" in o.name or "attention" in o.name)]
        moved = sum(t.bytes for o in kernels for t in (*o.inputs, *o.outputs))
        described = [i for i in items if isinstance(i, Compute) and i.kind not in MATMULS]
        found = sum(i.bytes for i in described if not i.name.endswith("_accumulate"))  # one backward adds nothing up
        assert found == pytest.approx(moved, rel=0.07)
