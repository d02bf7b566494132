"""A paged KV cache: block tables on the device, prefixes in host memory.

Kwon et al. 2023 (PagedAttention), section 4: a sequence's i-th block may lie anywhere; its block table says where.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sim.inputs.model_config import ModelConfig


@dataclass(slots=True)
class PagedCache:
    """`keys` and `values` are [layers, blocks, block_tokens, kv_heads, head_dim]; `free` lists the unused blocks."""

    keys: Tensor
    values: Tensor
    free: list[int]
    tables: dict[int, list[int]] = field(default_factory=dict)  # by sequence

    @property
    def block_tokens(self) -> int:
        return int(self.keys.shape[2])

    def grow(self, sequence: int, tokens: int) -> None:
        """Give a sequence blocks for `tokens` tokens in all.

        Raises:
            IndexError: if no block is free.
        """
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.block_tokens < tokens:
            table.append(self.free.pop())

    def release(self, sequence: int) -> None:
        """Free a sequence's blocks, if it has any."""
        self.free += reversed(self.tables.pop(sequence, []))

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        """Return the slots of a sequence's tokens `start` to `end`, counted over all blocks: [end − start] int64."""
        place = torch.arange(start, end)
        table = torch.tensor(self.tables[sequence])
        return table[place // self.block_tokens] * self.block_tokens + place % self.block_tokens

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] of one layer."""
        self.keys[layer].view(-1, *k.shape[1:])[slots] = k
        self.values[layer].view(-1, *v.shape[1:])[slots] = v

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values: [sequences, blocks] → [sequences, blocks · block_tokens, kv_heads, head_dim]."""
        k, v = self.keys[layer][table], self.values[layer][table]
        return k.flatten(1, 2), v.flatten(1, 2)


def make_cache(m: ModelConfig, blocks: int, block_tokens: int, dtype: torch.dtype, device: str = "cpu") -> PagedCache:
    """Make an empty cache of `blocks` blocks."""
    shape = (m.layers, blocks, block_tokens, m.kv_heads, m.head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    return PagedCache(keys, values, list(range(blocks - 1, -1, -1)))


@dataclass(slots=True)
class HostSequences:
    """Blocks of preempted sequences in host memory, by sequence."""

    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def swap_out(self, cache: PagedCache, sequence: int, tokens: int) -> None:
        """Copy the blocks of a sequence's first `tokens` tokens to host memory."""
        table = cache.tables[sequence][: -(-tokens // cache.block_tokens)]
        keys, values = (t[:, table].to("cpu", copy=True) for t in (cache.keys, cache.values))
        self.kept[sequence] = keys, values

    def swap_in(self, cache: PagedCache, sequence: int) -> None:
        """Copy a sequence's blocks back, into its new blocks."""
        keys, values = self.kept.pop(sequence)
        table = cache.tables[sequence][: keys.shape[1]]
        cache.keys[:, table] = keys.to(cache.keys.device)
        cache.values[:, table] = values.to(cache.values.device)


@dataclass(slots=True)
class HostPrefixes:
    """Whole blocks of prompts in host memory. The key is all tokens up to a block's end, so equal prefixes match.

    The scheduler decides which blocks stay (`sim.serve.cache.kv_cache.HostCache`); this class holds their contents.
    """

    blocks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def store(self, cache: PagedCache, sequence: int, tokens: tuple[int, ...], count: int) -> None:
        """Copy to host memory the blocks of a prompt's first `count` tokens (whole blocks) that are not there yet."""
        size = cache.block_tokens
        for i in range(count // size):
            name = tokens[: (i + 1) * size]
            if name not in self.blocks:
                block = cache.tables[sequence][i]
                k, v = cache.keys[:, block], cache.values[:, block]
                self.blocks[name] = (k.to("cpu", copy=True), v.to("cpu", copy=True))

    def load(self, cache: PagedCache, sequence: int, tokens: tuple[int, ...], count: int) -> None:
        """Copy a prompt's first `count` tokens into the sequence's blocks.

        Raises:
            KeyError: if a block is not in host memory.
        """
        size = cache.block_tokens
        for i in range(count // size):
            k, v = self.blocks[tokens[: (i + 1) * size]]
            block = cache.tables[sequence][i]
            cache.keys[:, block].copy_(k)
            cache.values[:, block].copy_(v)
