"""Copies that Megatron-Core and Transformer Engine make of a merged projection, counted against torch's own."""

from __future__ import annotations

import pytest
import torch
from counted_accesses import counted

from sim.core.program import Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block

TOKENS, HEADS, WIDTH = 32, 8, 64


def split_kernels(kv_heads: int, positions: str = "rope", tp: int = 1, **training: object) -> dict[str, Compute]:
    model = {"layers": 1, "hidden": HEADS * WIDTH, "heads": HEADS, "kv_heads": kv_heads, "ffn": 512, "vocab": 1024}
    steps = {"seq_len": TOKENS, "global_batch_size": 1, "framework": "megatron", **training}
    asked = {"model": {**model, "positions": positions}, "training": steps, "parallelism": {"tp": tp}}
    block = layer_block(parse_scenario({**asked, "cluster": "dgx-h100"}), 0)
    items = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute)]
    return {i.name: i for i in items if i.name in ("split_copies", "split_copies_backward")}


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_copies_are_those_of_torch(kv_heads: int) -> None:
    """Rope has made queries and keys anew, so values alone lie in the projection's rows."""
    grouped = HEADS // kv_heads
    merged = torch.randn(TOKENS, 1, kv_heads, (grouped + 2) * WIDTH, dtype=torch.bfloat16)
    cuts = [grouped * WIDTH, WIDTH, WIDTH]
    query, key, value = torch.split(merged, cuts, dim=3)
    _, copies = counted(lambda: (query.reshape(TOKENS, 1, HEADS, WIDTH), value.contiguous()))
    gradients = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (query, key, value)]
    _, join = counted(lambda: torch.cat(gradients, dim=3))
    found = split_kernels(kv_heads)
    assert (found["split_copies"].bytes, found["split_copies"].kernels) == (copies.bytes, copies.operators)
    assert (found["split_copies_backward"].bytes, found["split_copies_backward"].kernels) == (
        join.bytes,
        join.operators,
    )


def test_the_kernel_reads_equal_heads_where_they_are() -> None:
    assert not split_kernels(8, "learned")


def test_one_head_of_keys_leaves_queries_together() -> None:
    values = TOKENS * WIDTH
    assert split_kernels(2, tp=2)["split_copies"].bytes == 2 * 2 * values


def test_grouped_queries_that_are_not_turned() -> None:
    assert split_kernels(2, "learned")["split_copies"].bytes == 2 * 2 * TOKENS * HEADS * WIDTH


@pytest.mark.parametrize("changed", [{"framework": "compiled"}, {"attention": "unfused"}, {"software_date": "2023-06"}])
def test_others_copy_nothing(changed: dict[str, object]) -> None:
    assert not split_kernels(2, **changed)
