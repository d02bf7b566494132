"""Local attention: a window that slides with the query, or chunks of the sequence that see nothing of one another.

Sliding: Beltagy et al. 2020 (arXiv 2004.05150, section 3.1), as Mistral, Gemma and gpt-oss have it. Chunks: Llama 4's
layers with rope (`attention_chunk_size`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.inputs.model_config import LOCAL

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

WITHOUT_SCORES = ("state_space", "none")  # kinds of attention


class Window(Struct, frozen=True):
    """The most keys that a query sees, its own among them; `chunked`: only those of its own chunk of the sequence."""

    tokens: int
    chunked: bool = False

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Query-key pairs of the last `q_len` of `kv_len` tokens.

        The token at place p (from 1) sees min(p, w) keys, in chunks ((p − 1) mod w) + 1. With T(n) = n·(n + 1)/2 the
        first n tokens see T(n) − T(n − w) in all, in chunks ⌊n/w⌋·T(w) + T(n mod w); those before the last q are
        taken off.

        >>> Window(2).pairs(4, 4), Window(2).pairs(2, 4), Window(8).pairs(4, 4), Window(3, chunked=True).pairs(4, 4)
        (7, 4, 10, 7)
        """
        return self._up_to(kv_len) - self._up_to(kv_len - q_len)

    def _up_to(self, n: int) -> int:
        if self.chunked:
            return n // self.tokens * _triangle(self.tokens) + _triangle(n % self.tokens)
        return _triangle(n) - _triangle(max(0, n - self.tokens))

    def reach(self, q_len: int, kv_len: int) -> int:
        """Keys that at least one of the last `q_len` of `kv_len` tokens sees."""
        first = kv_len - q_len  # tokens before the first query
        before = first % self.tokens if self.chunked else min(first, self.tokens - 1)
        return q_len + before

    def kept(self, length: float) -> float:
        """Tokens of a sequence of `length` that its cache keeps for the next one; in chunks the mean over a chunk."""
        if length <= self.tokens:
            return length
        return (self.tokens + 1) / 2 if self.chunked else float(self.tokens)

    def blocks(self, q_len: int, kv_len: int) -> tuple[int, int, int]:
        """Equal causal blocks with as many pairs: their number, and the queries and keys of each.

        Kernels of windows skip tiles that no query sees. Each block has at most a window's queries, so `tokens` keys
        and a triangle: its kernel's price is that of the windowed one. Whole chunks are just such blocks.

        >>> Window(128).blocks(4096, 4096), Window(128, chunked=True).blocks(4096, 4096), Window(128).blocks(1, 4096)
        ((32, 128, 190), (32, 128, 128), (1, 1, 128))
        """
        number = -(-q_len // self.tokens)
        queries = -(-q_len // number)
        return number, queries, max(1, round(self.pairs(q_len, kv_len) / q_len + (queries - 1) / 2))


def window_of(model: ModelConfig, layer: int) -> Window | None:
    """The window of layer `layer` by `model.attention_pattern`, which repeats over the layers."""
    kind = model.attention_kind(layer)
    if model.window is None or kind not in LOCAL:
        return None
    return Window(model.window, kind == "chunked")


def windows_of(model: ModelConfig) -> tuple[tuple[Window | None, int], ...]:
    """The windows of layers with attention, and how many layers have each; None: they see all earlier tokens."""
    attending = [n for n in range(model.layers) if model.attention_kind(n) not in WITHOUT_SCORES]
    return tuple(Counter(window_of(model, n) for n in attending).items())


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
