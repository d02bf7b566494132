"""How a Hugging Face model is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """How a Hugging Face model is trained; a function of your own decides this itself."""

    seq_len: int = 1024
    micro_batch_size: int = 1
    weights: str = "fp32"
    autocast: str = ""
    attention: str = ""
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    lora_rank: int | None = None
    clip_grad_norm: float | None = 1.0
    compiled: bool = False
