"""Kernels that Megatron-Core runs for gpt-oss, counted against torch's own operators as its functions call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_accesses import counted

from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block

TOKENS, HEADS, KEY_HEADS, WIDTH, FFN = 32, 8, 2, 64, 48


def scenario(framework: str, **changes: object) -> Scenario:
    model = {"layers": 1, "hidden": 256, "heads": HEADS, "kv_heads": KEY_HEADS, "head_dim": WIDTH, "vocab": 1024}
    model |= {"positions": "rope", "norm": "rmsnorm", "bias": False, "mlp": "clamped_swiglu", "ffn": FFN}
    training = {"seq_len": TOKENS, "global_batch_size": 1, "framework": framework}
    return parse_scenario({"model": model | changes, "training": training, "cluster": "dgx-h100"})


def said(framework: str, name: str, **changes: object) -> Compute:
    block = layer_block(scenario(framework, **changes), 0)
    return next(i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.name == name)


def turned(t: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """rope_utils.py: `_apply_rotary_pos_emb_bshd`, with a factor."""
    t, rest = t[..., :WIDTH], t[..., WIDTH:]
    cos, sin = (torch.cos(angles) * 1.35).to(t.dtype), (torch.sin(angles) * 1.35).to(t.dtype)
    low, high = torch.chunk(t, 2, dim=-1)
    return torch.cat((t * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)


def test_scaled_rope_is_separate_operators() -> None:
    """12 accesses an element forward, 14 backward; the cosines of each tensor are by themselves."""
    angles = torch.ones(TOKENS, 1, 1, WIDTH)
    forward = kernels = backward = back_kernels = 0
    for heads in (HEADS, KEY_HEADS):
        t = torch.randn(TOKENS, 1, heads, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        out, found = counted(lambda t=t: turned(t, angles))
        forward, kernels = forward + found.bytes - 2 * 2 * angles.numel(), kernels + found.operators
        ones = torch.ones_like(out)
        _, found = counted(lambda t=t, out=out, ones=ones: torch.autograd.grad(out, t, ones))
        backward, back_kernels = backward + found.bytes - 2 * 2 * angles.numel(), back_kernels + found.operators
    rope, cosines = (said("megatron", name, scaled_rope=True) for name in ("rope", "rope_cosines"))
    assert (rope.bytes + cosines.bytes, rope.kernels + cosines.kernels) == (forward, kernels)
    again = said("megatron", "rope_backward", scaled_rope=True)
    assert (again.bytes, again.kernels) == (backward, back_kernels)
    assert rope.plain_host


@pytest.mark.parametrize("framework", ["eager", "transformers_compiled", "nanotron"])
def test_a_factor_changes_nothing_elsewhere(framework: str) -> None:
    assert said(framework, "rope", scaled_rope=True) == said(framework, "rope")


def clamped(merged: torch.Tensor) -> torch.Tensor:
    """fused_bias_geglu.py: the start of `weighted_bias_quick_geglu_impl`."""
    gate, up = merged.chunk(2, -1)
    return torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)


def test_clamps_are_separate_operators() -> None:
    """Beside the kernel of the activation: three operators forward, nine backward."""
    merged = torch.randn(TOKENS, 2 * FFN, dtype=torch.bfloat16, requires_grad=True)
    out, forward = counted(lambda: clamped(merged))
    ones = torch.ones_like(out)
    _, backward = counted(lambda: torch.autograd.grad(out, merged, ones))
    zeros = 4 * 2  # each of two zeros is written and read
    inner = TOKENS * FFN * 2
    there, back = said("megatron", "clamped_swiglu"), said("megatron", "clamped_swiglu_backward")
    assert (there.bytes, there.kernels) == (forward.bytes + 3 * inner, forward.operators + 1)
    assert (back.bytes, back.kernels) == (backward.bytes - zeros + 5 * inner, backward.operators + 1)


EXPERTS: dict[str, Any] = {"moe": {"experts": 8, "top_k": 2, "ffn": FFN}}


def test_weights_of_copies_take_a_second_pass() -> None:
    """Gradient, gate and up are read again for the sum that is the gradient of a copy's weight."""
    elements = 2 * TOKENS * FFN
    for mlp in ("swiglu", "clamped_swiglu"):
        again = said("megatron", "expert_weights_grad", mlp=mlp, **EXPERTS)
        assert (again.bytes, again.kernels) == (3 * 2 * elements, 1)
    for framework, model in (("megatron", {"mlp": "swiglu"}), ("eager", {"mlp": "swiglu"} | EXPERTS)):
        block = layer_block(scenario(framework, **model), 0)
        assert "expert_weights_grad" not in {i.name for i in block.backward if isinstance(i, Compute)}
