"""TRL's defaults beside those of `TrainingArguments` (trl/trainer), known by `max_length`, which its files have."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings

CHUNKED_NLL, CHUNK_TOKENS = "chunked_nll", 256


def take_precision(s: Settings, given: set[str]) -> None:
    """TRL computes in bf16 unless told otherwise (trl/trainer/base_config.py)."""
    if s.values.get("max_length") is not None and not {"bf16", "fp16"} & given:
        s.values = {**s.values, "bf16": True}
        s.notes.append("bf16: on, as TRL has it by default since mid-2025; before it was off")


def loss_in_chunks(s: Settings, training: dict[str, Any], length: int, zero: int) -> dict[str, Any]:
    """TRL's loss in chunks of 256 tokens, its default without Liger's (trl/trainer/sft_config.py; sft_trainer.py:
    `_CHUNKED_LM_HEAD_CHUNK_SIZE`)."""
    named = s.take("loss_type") if s.values.get("max_length") is not None else "nll"
    if named not in (None, CHUNKED_NLL) or "cross_entropy" in training:
        return {}
    default = "" if named else ", as TRL has it by default since 2026"
    if training.get("param_dtype") == "fp32" and zero < 3:
        s.notes.append(f"loss_type: {CHUNKED_NLL}{default}, is simulated with all logits at once under autocast")
        return {}
    s.notes.append(f"loss_type: {CHUNKED_NLL}{default}; each chunk's logits, computed twice, are simulated once")
    tokens = training["micro_batch_size"] * length
    return {"cross_entropy": "chunked", "loss_chunks": -(-tokens // CHUNK_TOKENS)}
