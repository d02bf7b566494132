"""Groups of equally many layers between which vLLM divides its cache, against its own examples and closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.inputs.scenario import parse_scenario
from sim.models.layers import layer_specs
from sim.serve.cache.layer_groups import has_state, state_block
from sim.serve.memory import Capacity
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.stages import attentions_of
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


def test_a_drafts_layers_are_divided_with_the_models() -> None:
    """One of attention makes 13 of 12, so that 36 layers with a state are 3 groups of 13, not of 12."""
    model = {"preset": "qwen3-next-80b-a3b", "mtp_layers": 1}
    found = capacity(model, "vllm-0.19", 544, speculative={"tokens": 1, "acceptance": 0.5})
    token, block = 2 * 2 * 256, 544
    assert found.token_bytes[0] * 544 == pytest.approx((2 * 39 + 13) * block * token, rel=1e-12)


def test_a_draft_of_a_kind_of_its_own_has_groups_of_its_own() -> None:
    """gpt-oss-20b: 12 layers that see all, 12 with windows; 5 of a draft with half the keys make groups of 5."""
    draft = {"preset": "llama3.2-1b", "layers": 5, "kv_heads": 4, "vocab": 201088}
    found = capacity("gpt-oss-20b", "vllm-0.19", 128, speculative={"draft": draft, "tokens": 1, "acceptance": 0.5})
    each = 2 * 4 * 64 * 2
    assert found.token_bytes == ((15 + 15) * each + 5 * each // 2,)


@pytest.mark.parametrize(
    ("keys", "heads", "block", "padded"), [(2, 16, 544, 1.0264), (4, 48, 784, 1.0013)], ids=["0.8B", "27B"]
)
def test_blocks_of_qwen_35_are_those_that_vllm_logs(
    keys: int, heads: int, block: int, padded: float, tmp_path: Path
) -> None:
    """Its config says that states are fp32: "Setting attention block size to 544 tokens", "Padding mamba page size by
    2.64%" for 0.8B, 784 tokens for 27B."""
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": keys,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": 16,
        "linear_conv_kernel_dim": 4,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "mamba_ssm_dtype": "float32",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    served = {"requests": {"prompt_len": 8, "output_len": 8}}
    d = serving_dims(parse_scenario({"model": str(path), "cluster": "dgx-h200", "inference": served}))
    attentions = attentions_of(layer_specs(d.model))
    found = state_block(d, attentions)
    assert found is not None
    assert found.tokens == block
    assert found.bytes / max(a.sequence_bytes(d, 1) for a in attentions) == pytest.approx(padded, abs=5e-5)


def test_kda_keeps_its_state_in_fp32(tmp_path: Path) -> None:
    families = yaml.safe_load((Path(__file__).parents[3] / "docs" / "families.yaml").read_text())
    for title, heads in (("Kimi Linear 48B-A3B", 32), ("Ling 3 Flash", 32)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(next(f["config"] for f in families if f["title"] == title)))
        served = {"requests": {"prompt_len": 8, "output_len": 8}}
        d = serving_dims(parse_scenario({"model": str(path), "cluster": "dgx-h200", "inference": served}))
        (state,) = (a for a in attentions_of(layer_specs(d.model)) if has_state(a))
        assert state.sequence_bytes(d, 1) == heads * 128 * 128 * 4 + 3 * 3 * heads * 128 * 2


def test_sglang_keeps_states_in_fp32() -> None:
    """Qwen3-Next's on two ranks; its config says no dtype."""
    token, length = 2 * 2 * 256, 600
    found = capacity("qwen3-next-80b-a3b", "sglang-0.5", length).token_bytes[0] * length
    state = 4 * 16 * 128 * 128 + 2 * 3 * 4096
    assert found == pytest.approx(36 * state + 12 * length * token, rel=1e-12)
