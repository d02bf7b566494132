"""The tiny model that the tools serve with vLLM on a CPU, so that its host's time is seen and not the model's."""

from __future__ import annotations

from typing import Any

WIDTH = 64


def tiny_llama(vocab: int, max_positions: int) -> dict[str, Any]:
    """A Hugging Face config of one layer of `WIDTH`, for a vocabulary and prompts of these sizes (tokens)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": WIDTH,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    }
