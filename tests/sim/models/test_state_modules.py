"""Transformers' own operators around scans, counted as its modules run them in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest

from sim.models.layers.state_modules import (
    GATED_NORM,
    GATED_NORM_BACKWARD,
    OF_CHANNELS,
    OF_HEADS,
    OF_WHOLE_CHANNELS,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
TOKENS, HEADS, WIDTH = 256, 8, 64
NUMBERS = TOKENS * HEADS * WIDTH


def measured(forward: Any) -> tuple[tuple[float, int], tuple[float, int]]:
    """Bytes and operators, forward and backward."""
    from counted_accesses import counted

    result, ahead = counted(forward)
    gradient = torch.ones_like(result)
    _, back = counted(lambda: result.backward(gradient))
    return (ahead.bytes, ahead.operators), (back.bytes, back.operators)


def heads(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_next", "Qwen3NextRMSNormGated"), ("kimi_linear", "KimiLinearRMSNormGated")],
)
def test_a_norm_with_a_gate_is_separate_operators(family: str, name: str) -> None:
    module = getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), name)
    norm = module(WIDTH).to(torch.bfloat16)
    x, gate = heads(TOKENS * HEADS, WIDTH), heads(TOKENS * HEADS, WIDTH)
    for of_all, found in zip((GATED_NORM, GATED_NORM_BACKWARD), measured(lambda: norm(x, gate)), strict=True):
        assert of_all[0] * NUMBERS == pytest.approx(found[0], rel=0.01)
        assert of_all[1] == pytest.approx(found[1], abs=1)


@pytest.mark.parametrize(
    ("family", "name", "gates"),
    [
        ("kimi_linear", "KimiLinearForgetGate", OF_CHANNELS),
        ("bailing_hybrid", "BailingHybridForgetGate", OF_WHOLE_CHANNELS),
    ],
)
def test_gates_of_channels(family: str, name: str, gates: Any) -> None:
    code = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, hidden_size=128, linear_num_heads=HEADS, linear_head_dim=WIDTH)
    module = getattr(code, name)(config).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    given = heads(1, TOKENS, HEADS * WIDTH)
    for child in [n for n, _ in module.named_children()]:
        setattr(module, child, torch.nn.Identity())
    for of_all, found in zip((gates.forward, gates.backward), measured(lambda: module(given)), strict=True):
        assert of_all[0] * NUMBERS == pytest.approx(found[0], rel=0.12)
        assert of_all[1] == pytest.approx(found[1], abs=6)


def test_decays_of_heads() -> None:
    """qwen3_next/modeling_qwen3_next.py: Qwen3NextGatedDeltaNet.forward."""
    steps, rate = heads(1, TOKENS, HEADS * WIDTH), torch.zeros(HEADS * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(HEADS * WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Any:
        return -rate.float().exp() * torch.nn.functional.softplus(steps.float() + bias)

    for of_all, found in zip((OF_HEADS.forward, OF_HEADS.backward), measured(forward), strict=True):
        assert of_all[0] * NUMBERS == pytest.approx(found[0], rel=0.12)
