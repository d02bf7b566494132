"""Embeddings beside that of tokens, as a scenario's `model` says them."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from sim.inputs.input_source import UserInput, as_tuple

Numbers = Annotated[tuple[Annotated[int, Field(ge=1, le=10**12)], ...], BeforeValidator(as_tuple)]


class NgramEmbeddingConfig(UserInput):
    """Embeddings of hashed n-grams that some layers add to their residual streams (Qwen 4).

    `layers`: these, counted from 1; `rows`: of the table of each. A token reads `heads` rows, together `width` numbers,
    for n-grams of 2 to `size` tokens. `conv_kernel`: taps of a causal convolution, `size` tokens apart.
    """

    layers: Numbers = Field(min_length=1, max_length=10_000)
    rows: Numbers = Field(min_length=1, max_length=10_000)
    heads: int = Field(ge=1, le=10_000)
    width: int = Field(ge=1, le=10_000_000)
    size: int = Field(default=3, ge=2, le=64)
    conv_kernel: int = Field(default=4, ge=1, le=1_024)


class LayerEmbeddingConfig(UserInput):
    """Embeddings of each token for every layer (Gemma 4 E2B and E4B): `width` numbers for each; `vocab` rows."""

    width: int = Field(ge=1, le=1_000_000)
    vocab: int | None = Field(default=None, ge=1, le=100_000_000, description="null: the model's")
