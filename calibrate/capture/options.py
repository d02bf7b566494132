"""How a Hugging Face model is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """How a Hugging Face model is trained, or run without training; a function of your own decides this itself.

    `forward`: a forward alone. `new_tokens`: of `generate`, which is also without training; 0: it does not run.
    """

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
    forward: bool = False
    new_tokens: int = 0
