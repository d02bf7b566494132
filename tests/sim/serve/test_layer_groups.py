"""Groups of equally many layers between which vLLM divides its cache, against its own examples and closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.serve.memory import Capacity
from sim.serve.simulation import simulate_serving


def capacity(model: Any, engine: str, length: int, **inference: Any) -> Capacity:
    requests = {"requests": {"prompt_len": length - 8, "output_len": 8}, "engine": engine}
    own = {"model": model, "cluster": "dgx-h200", "parallelism": {"tp": 2}, "inference": {**requests, **inference}}
    return simulate_serving(parse_scenario(own)).capacity


@pytest.mark.parametrize(
    ("model", "engine", "layers"),
    [
        ("gemma3-27b", "vllm-0.19", 70),  # 10 that see all tokens and 52 with windows: groups of 10
        ("gemma3-27b", "vllm-0.8", 62),  # one group, all tokens kept
        ("gemma3-27b", "bundled", 62),
        ("gpt-oss-20b", "vllm-0.19", 24),  # 12 and 12
        ({"preset": "gpt-oss-20b", "layers": 25}, "vllm-0.19", 26),  # 12 and 13: vLLM's own example, with a draft's
        ("llama4-scout", "vllm-0.19", 48),  # 12 and 36
        ("llama3-8b", "vllm-0.19", 32),
    ],
)
def test_a_short_sequence_has_room_in_every_group(model: Any, engine: str, layers: int) -> None:
    """No longer than windows are, so that every layer keeps all of its tokens."""
    found = capacity(model, engine, 128, quantization="fp8")
    own = parse_scenario(
        {"model": model, "cluster": "dgx-h200", "inference": {"requests": {"prompt_len": 8, "output_len": 8}}}
    )
    each = max(1, own.model.kv_heads // 2) * own.model.head_dim * 2 * 2
    assert found.token_bytes == (layers * each,)


def test_a_state_takes_a_block_and_attention_whole_blocks() -> None:
    """Qwen3-Next on two ranks: 36 layers with a state of 16 heads of 128 x 128 and 3 inputs of 4,096 numbers, 12 of
    attention with a key and a value of 256 numbers a token."""
    state, token, length = 2 * (16 * 128 * 128 + 3 * 4096), 2 * 2 * 256, 600
    block = -(-state // token // 16) * 16
    while block * token < state:
        block += 16
    whole = -(-length // block) * block
    assert (block, whole) == (544, 1088)
    grouped = capacity("qwen3-next-80b-a3b", "vllm-0.19", length)
    assert grouped.token_bytes[0] * length == pytest.approx(36 * block * token + 12 * whole * token, rel=1e-12)
    alone = capacity("qwen3-next-80b-a3b", "bundled", length)
    assert alone.token_bytes[0] * length == pytest.approx(36 * state + 12 * length * token, rel=1e-12)


def test_drafted_tokens_take_a_state_each() -> None:
    """The model's own layer of attention drafts: its cache has one layer more."""
    model = {"preset": "qwen3-next-80b-a3b", "mtp_layers": 1}
    plain, drafted = (
        capacity(model, "bundled", 600, **more) for more in ({}, {"speculative": {"tokens": 3, "acceptance": 0.5}})
    )
    state, token = 2 * (16 * 128 * 128 + 3 * 4096), 2 * 2 * 256
    added = 600 * (drafted.token_bytes[0] - plain.token_bytes[0])
    assert added == pytest.approx(3 * 36 * state + 600 * token, rel=1e-9)
