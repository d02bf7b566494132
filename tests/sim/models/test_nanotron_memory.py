"""Bytes that nanotron's layers, loss and gradient sums hold, counted in its source, and what its runs reserved."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.simulation import simulate
from tests.sim.cases import llama_like

LLAMA_1B: dict[str, Any] = llama_like(
    layers=16, hidden=2048, heads=32, kv_heads=32, ffn=8192, vocab=131072, tied_embeddings=True
)
TOKENS = 4096


def scenario(framework: str = "nanotron", micro_batch: int = 1, dp: int = 8, zero: int = 0, **model: Any) -> Scenario:
    training = {"seq_len": TOKENS, "global_batch_size": 2 * dp * micro_batch, "micro_batch_size": micro_batch}
    training |= {"grad_dtype": "fp32", "attention": "fused", "cross_entropy": "unfused", "framework": framework}
    parallelism = {"dp": dp, "zero": zero}
    model = LLAMA_1B | model
    return parse_scenario({"model": model, "cluster": "dgx-h100", "parallelism": parallelism, "training": training})


@pytest.mark.parametrize(("kv_heads", "kept"), [(32, 4), (8, 0)])
def test_queries_stay_beside_keys_and_values_of_as_many_heads(kv_heads: int, kept: int) -> None:
    """Of equal heads one tensor holds all three put in order, and keys and values are copied once more."""
    plain, nanotron = (
        sum(s.bytes for s in layer_block(scenario(name, kv_heads=kv_heads), 1).saved) for name in ("eager", "nanotron")
    )
    # Fused norms keep what those of separate operators do.
    assert nanotron - plain == kept * TOKENS * 2048


def test_the_loss_holds_fp32_logits_beside_its_softmax_and_then_works_in_place() -> None:
    """8 bytes a logit at the end of the forward, of which 4 are saved; the 16-bit gradient beside them afterwards."""
    head, logits = head_block(scenario()), TOKENS * 131072
    assert (head.forward_peak_bytes, head.backward_peak_bytes) == pytest.approx((4 * logits, 2 * logits), rel=0.02)


@pytest.mark.parametrize(("dp", "zero", "kept"), [(8, 0, 6), (1, 0, 4), (8, 1, 4)])
def test_buckets_of_16_bits_are_ddp_s_alone(dp: int, zero: int, kept: int) -> None:
    found = simulate(scenario(dp=dp, zero=zero)).result["memory"][0]
    assert found["gradients"] == kept / 2 * found["parameters"]


def test_a_backward_holds_its_gradients_until_it_ends() -> None:
    """The sums take them when all of a micro-batch's are there: at the end nothing else is left of it."""
    last = [max(simulate(scenario(name), expand=True).memory[0].buffers[-3:]) for name in ("eager", "nanotron")]
    assert last[1] - last[0] == pytest.approx(2 * 1.342e9, rel=0.2)


@pytest.mark.parametrize(("micro_batch", "reserved_gib"), [(1, 36.7), (2, 48.5)])
def test_reserved_memory_is_what_runs_without_zero_published(micro_batch: int, reserved_gib: float) -> None:
    """Ultra-Scale Playbook, 1B on 8 to 128 H100: within the page's rounding and 1 %."""
    reserved = simulate(scenario(micro_batch=micro_batch)).result["peak_reserved_bytes"]
    assert reserved / 2**30 == pytest.approx(reserved_gib, rel=0.01)
