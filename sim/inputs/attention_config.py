"""Sizes of kinds of attention, as a scenario's `model` says them."""

from typing import Literal

from pydantic import Field

from sim.inputs.input_source import UserInput


class MlaConfig(UserInput):
    """Multi-head latent attention (arXiv 2405.04434). `q_lora_rank` null: queries are not compressed."""

    q_lora_rank: int | None = Field(default=None, ge=1, le=1_000_000)
    kv_lora_rank: int = Field(ge=1, le=1_000_000)
    qk_nope_head_dim: int = Field(ge=1, le=65_536)
    qk_rope_head_dim: int = Field(ge=1, le=65_536)
    v_head_dim: int = Field(ge=1, le=65_536)


class IndexerConfig(UserInput):
    """DeepSeek's sparse attention (V3.2): beside `mla`, `heads` queries of `head_dim` and one key a token score all
    keys, and a query attends to the `top_k` best."""

    heads: int = Field(ge=1, le=1_000_000)
    head_dim: int = Field(ge=1, le=65_536)
    top_k: int = Field(ge=1, le=100_000_000)


class BlockIndexerConfig(UserInput):
    """Attention of grouped queries to blocks of keys that an indexer chooses, in layers of kind `selected`: a query
    attends to `top_k` tokens, which are whole blocks of `block`.

    `pools` scores (MiniMax M3): each of `heads` scores every key, a block's score is its best key's, and each head
    chooses for a group of query heads; the query's own block is one of those. `pools` keys (Qwen 4): the keys of a
    whole block are averaged to one, whose scores of all heads are added; the tokens of the unfinished block come on
    top.
    """

    heads: int = Field(ge=1, le=1_000_000)
    head_dim: int = Field(ge=1, le=65_536)
    top_k: int = Field(ge=1, le=100_000_000)
    block: int = Field(ge=1, le=1_000_000)
    pools: Literal["scores", "keys"]


class CompressedAttentionConfig(UserInput):
    """DeepSeek V4's attention: one head of `head_dim` numbers a token is key and value of all query heads, of which
    `rope_head_dim` have rope. A query sees its window, and in layers of kind `compressed` what each `rate` tokens
    before it are compressed to; in layers of kind `compressed_sparse` those of each `sparse_rate` tokens that the
    `indexer` selects.

    Queries come from a latent of `q_lora_rank`. The result of each of `output_groups` groups of heads is brought to
    `output_rank` numbers, and these to the hidden size.
    """

    q_lora_rank: int = Field(ge=1, le=1_000_000)
    rope_head_dim: int = Field(ge=2, le=65_536)
    output_groups: int = Field(ge=1, le=1_000_000)
    output_rank: int = Field(ge=1, le=1_000_000)
    rate: int = Field(default=128, ge=1, le=1_000_000)
    sparse_rate: int = Field(default=4, ge=1, le=1_000_000)


class FullAttentionConfig(UserInput):
    """Sizes of layers that see all keys where the other layers have windows (Gemma 4, Laguna); null: as in those.

    `values_are_keys`: they have no value projection; values are keys before their norm and rope. `sinks`: see the
    model's. `rope: false`: their queries and keys are not rotated.
    """

    heads: int | None = Field(default=None, ge=1, le=1_000_000)
    kv_heads: int | None = Field(default=None, ge=1, le=1_000_000)
    head_dim: int | None = Field(default=None, ge=1, le=65_536)
    values_are_keys: bool = False
    sinks: bool | None = None
    rope: bool = True
