"""The indexer of DeepSeek V4: that of V3.2 over compressed keys (DeepSeek-V4 report, 2026, section 2.3.1)."""

from __future__ import annotations

from sim.models.layers.indexer import Indexer
from sim.models.layers.matrix import Matrix


class CompressedIndexer(Indexer, frozen=True):
    """A key for each `rate` tokens, made of the tokens of two windows by a softmax, as the attention's own vectors are
    (`DeepseekV4Indexer` in transformers/models/deepseek_v4/modeling_deepseek_v4.py)."""

    rate: int

    @property
    def key_width(self) -> int:
        """Numbers of a token that go into keys: `head_dim` into its own window's, `head_dim` into the next one's."""
        return 2 * self.head_dim

    @property
    def kept_key_numbers(self) -> int:
        """Numbers of a token that training keeps of its keys: projections and gates."""
        return 2 * self.key_width

    def matrices(self, hidden: int, query_rank: int) -> tuple[Matrix, ...]:
        """Projections, whole on every rank: the key's has a gate of equal size."""
        return (
            Matrix("index_query", query_rank, (self.heads * self.head_dim,), "plain"),
            Matrix("index_key", hidden, (self.key_width, self.key_width), "plain"),
            Matrix("index_weights", hidden, (self.heads,), "plain", sixteen_bit=True),
        )

    @property
    def norm_parameters(self) -> int:
        """Weights of the key's RMS norm, and a bias of the gate for each place in a window."""
        return self.head_dim + self.rate * self.key_width
