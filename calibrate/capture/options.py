"""Options of a run of a Hugging Face model."""

from __future__ import annotations

from msgspec import Struct


class Options(Struct, frozen=True):
    """Options of a Hugging Face model's training, or run without training; a function of your own decides this itself.

    `autocast`, `attention`: None for none, and for Transformers' own choice. `forward`: a forward alone. `new_tokens`:
    of `generate`, which is also without training. `random_values`: for a real run, whose speed depends on its data.
    """

    seq_len: int = 1024
    micro_batch_size: int = 1
    weights: str = "fp32"
    autocast: str | None = None
    attention: str | None = None
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    lora_rank: int | None = None
    clip_grad_norm: float | None = 1.0
    compiled: bool = False
    forward: bool = False
    new_tokens: int | None = None
    random_values: bool = False
