"""What copies tokens for their experts, step by step, where torch's operators do so."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import MOE, TOKENS, make

from sim.core.program import Block, Comm, Compute, Program
from sim.models.layer import layer_block


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_bytes_of_all_kernels_that_add_up_copies_gradients(top_k):
    """Of each copy its gradient is read; of each token zeros are written, and the sum is read and written, in 16 bits;
    indices and weights' gradients take 20 bytes a copy. No kernel moves less than nothing."""
    block = layer_block(make(MOE | {"moe": MOE["moe"] | {"top_k": top_k}}, {"framework": "transformers"}), 0)
    found = [i for i in block.backward if isinstance(i, Compute) and i.name.startswith("permute_backward")]
    moved = {i.name: i.bytes for i in found if not i.name.endswith("_starts")}
    assert all(size >= 0 for size in moved.values())
    assert sum(moved.values()) == TOKENS * (top_k * (1024 * 2 + 20) + 3 * 1024 * 2)
    assert moved["permute_backward_singly"] == TOKENS * (top_k + 2) * 1024 * 2


def titan(date: str | None, top_k: int = 2, **layout: Any) -> Block:
    model = MOE | {"moe": MOE["moe"] | {"top_k": top_k}}
    return layer_block(make(model, {"framework": "compiled", "software_date": date}, **layout), 0)


def bytes_and_kernels(program: Program, prefix: str) -> tuple[float, int]:
    """Of the operators `prefix` and those that start with it and `_singly`; and of all kernels, those of sorts too."""
    found = [i for i in program if isinstance(i, Compute) and i.name.startswith(prefix)]
    return sum(i.bytes for i in found if not i.name.endswith("_starts")), sum(int(i.kernels) for i in found)


def test_torchtitan_exchanges_counts_for_which_the_host_waits():
    """`all_to_all_single` of 64-bit counts of all experts over ep, before that of the tokens; none where ep is 1."""
    for date in (None, "2026-01", "2025-08"):
        block = titan(date, dp=4, ep=4)
        sent = [i for i in block.forward if isinstance(i, Comm) and i.group == "ep"]
        assert [(i.name, i.kind, i.blocking) for i in sent[:2]] == [
            ("exchange_counts", "all_to_all", True),
            ("dispatch", "all_to_all", True),
        ]
        assert sent[0].bytes == 16 * 8
        assert len([i for i in block.backward if isinstance(i, Comm) and i.group == "ep"]) == 2
        assert not [i for i in titan(date).forward if isinstance(i, Comm)]


@pytest.mark.parametrize("top_k", [2, 8])
def test_torchtitans_steps_of_early_2026_by_hand(top_k):
    """`MoE.forward` as torch dispatches it: bytes of a number of the copies and of the tokens, without indices."""
    block, copies, tokens = titan("2026-01", top_k), TOKENS * top_k * 1024, TOKENS * 1024
    # zeros, rows put, their fp32 copy, the product in fp32; of tokens its result and the cast
    moved, kernels = bytes_and_kernels(block.forward, "unpermute")
    assert moved == copies * (2 + 4 + 6 + 4) + tokens * (4 + 6) + 12 * TOKENS * top_k
    assert kernels == 5
    # of tokens the cast, which both gradients read; of copies theirs, results read again, its cast, rows looked up
    moved, _ = bytes_and_kernels(block.backward, "unpermute_backward")
    assert moved == copies * (4 + 4 + 6 + 4) + tokens * (6 + 4 + 4) + 12 * TOKENS * top_k
    (kept,) = [s.bytes for s in block.saved if s.name == "expert results"]
    assert kept == 4 * copies
    # rows are filled up on one rank, too: joined with a row of zeros and copied
    moved, _ = bytes_and_kernels(block.forward, "sort_chunks")
    assert moved == copies * (4 + 4) + 12 * TOKENS * top_k


@pytest.mark.parametrize(("date", "chunks"), [(None, False), ("2026-01", True), ("2025-08", False)])
def test_torchtitan_fills_rows_of_one_rank_where_it_did(date, chunks):
    assert bool(bytes_and_kernels(titan(date).forward, "sort_chunks")[1]) is chunks


@pytest.mark.parametrize(("date", "accesses", "kernels"), [(None, 1, 0), ("2026-01", 3, 1), ("2025-08", 3, 1)])
def test_torchtitans_experts_have_two_matmuls_of_one_input(date, accesses, kernels):
    """`_grouped_mm` of w1 and of w3: [rows, h] x [h, ffn] each; the input is kept once, its gradients are added up. A
    merged projection (Megatron) has as many flops and parameters."""
    block, merged = titan(date), layer_block(make(MOE, {"framework": "megatron"}), 0)
    shapes = [i.shape for i in block.forward if isinstance(i, Compute) and i.kind == "grouped_gemm"]
    assert shapes == [(16, TOKENS * 2 // 16, 512, 1024)] * 2 + [(16, TOKENS * 2 // 16, 1024, 512)]
    for pair in ((block.forward, merged.forward), (block.backward, merged.backward)):
        ours, theirs = (sum(i.flops for i in p if isinstance(i, Compute) and i.kind == "grouped_gemm") for p in pair)
        assert ours == theirs
    assert block.expert_params == merged.expert_params
    (summed,) = [i for i in block.backward if isinstance(i, Compute) and i.name == "experts_dgrad_sum"]
    assert (summed.bytes, summed.kernels) == (accesses * TOKENS * 2 * 1024 * 2, kernels)
    assert [s.bytes for s in block.saved if "experts" in s.name and s.name.endswith(" input")] == [
        TOKENS * 2 * 1024 * 2,
        TOKENS * 2 * 512 * 2,
    ]
