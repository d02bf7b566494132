"""Rope of torchtitan under torch.compile: a product of complex numbers, for which Inductor generates no kernel."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import LLAMA, make

from sim.core.program import Compute
from sim.models.dims import Shard, dims
from sim.models.layer import layer_block, layer_parts
from sim.models.output.head import head_block

ROTATED = 512 * 2 * (1024 + 256)  # numbers of queries and keys
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
BYTES = 2 * 2 + 4 * 4  # of a number: read and written in 16 bits, and in fp32 by the product and both casts


def ropes(model: Any, **training: Any) -> list[Compute]:
    block = layer_block(make(model, {"framework": "compiled", **training}), 0)
    items = (*block.forward, *block.backward)
    return [i for i in items if isinstance(i, Compute) and i.name in ("rope", "rope_backward")]


@pytest.mark.parametrize("date", ["2024-12", "2026-11"])
def test_a_cast_a_product_and_a_cast_back(date: str) -> None:
    """As torch 2.6 and 2.14 compile `apply_rotary_emb` on a CPU: `aten.mul` of complex numbers between two generated
    kernels a tensor; backward also the conjugate of the angles, which both share."""
    forward, backward = ropes(LLAMA, software_date=date)
    assert (forward.kernels, backward.kernels) == (6, 7)
    assert forward.bytes == backward.bytes == BYTES * ROTATED


@pytest.mark.parametrize("key", ["qk_norm", "scaled_rope"])
def test_qwen_3_and_gpt_oss_have_real_products(key: str) -> None:
    """torchtitan's have cosines and sines (backend "cos_sin"), which Inductor joins in one kernel a tensor."""
    forward, backward = ropes({**LLAMA, key: True})
    assert (forward.kernels, forward.bytes) == (backward.kernels, backward.bytes) == (2, 4 * ROTATED)


def test_latent_attention_multiplies_complex_numbers_too() -> None:
    assert ropes({**LLAMA, "kv_heads": 16, "mla": LATENT})[0].kernels == 6


@pytest.mark.parametrize("framework", ["transformers_compiled", "compiled_real_rope"])
def test_other_trainers_multiply_real_numbers(framework: str) -> None:
    """Transformers' modules; layers of torchtune, LitGPT, OLMo-core and prime-rl."""
    assert [rope.kernels for rope in ropes(LLAMA, framework=framework)] == [2, 2]


def test_these_trainers_compile_layers_and_not_the_loss() -> None:
    def kernels(framework: str) -> list[int]:
        block = head_block(make(LLAMA, {"framework": framework}))
        losses = [
            i
            for i in (*block.forward, *block.backward)
            if isinstance(i, Compute) and i.name.startswith("cross_entropy")
        ]
        return [i.kernels for i in losses]

    assert kernels("compiled_real_rope") == kernels("eager") != kernels("compiled")


def test_numbers_in_fp32_are_in_memory_before_and_behind_the_product() -> None:
    scenario = make(LLAMA, {"framework": "compiled"})
    (rope,) = (o for o in layer_parts(scenario, dims(scenario), 0, Shard()) if o.name == "rope")
    assert rope.forward_bytes == rope.backward_bytes == 2 * 4 * ROTATED
