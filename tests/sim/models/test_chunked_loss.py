"""The chunked output layer: as many flops as ever, all in the forward, and no logits kept."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import flops

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.models.output.chunked_loss import chunk_rows
from sim.models.output.head import head_block
from tests.sim.cases import scenario_with

TOKENS, HIDDEN, VOCAB = 4096, 4096, 128256


def scenario(loss: str, parallelism: dict[str, int] | None = None, **training: Any) -> Scenario:
    return scenario_with({"seq_len": TOKENS, "global_batch_size": 8, "cross_entropy": loss, **training}, parallelism)


def test_flops_are_those_of_the_whole_layer() -> None:
    chunked, fused = (head_block(scenario(loss)) for loss in ("chunked", "fused"))
    assert flops(chunked.forward) == 6 * TOKENS * HIDDEN * VOCAB == flops(fused.forward) + flops(fused.backward)
    assert flops(chunked.backward) == 0
    assert chunked.params == fused.params


def test_what_is_kept_and_held() -> None:
    """Both gradients, and beside them a chunk's logits and a part of the weight's gradient; not 1 GiB of logits."""
    chunked, fused = (head_block(scenario(loss)) for loss in ("chunked", "fused"))
    kept = {s.name: s.bytes for s in chunked.saved}
    assert kept["input's gradient"] == 2 * TOKENS * HIDDEN
    assert kept["weight's gradient"] == 2 * VOCAB * HIDDEN
    chunk = chunk_rows(TOKENS, VOCAB, HIDDEN)
    assert chunk == 128
    assert chunked.forward_peak_bytes == 2 * (chunk * VOCAB + VOCAB * HIDDEN)
    assert not any("logits" in s.name for s in chunked.saved)
    assert any("logits" in s.name for s in fused.saved)


def test_long_batches_save_most() -> None:
    """Logits grow with the tokens, the weight's gradient does not: Liger's point."""
    saved = {}
    for loss in ("unfused", "fused", "chunked"):
        saved[loss] = sum(s.bytes for s in head_block(scenario(loss, micro_batch_size=8)).saved)
    assert saved["chunked"] < 0.3 * saved["fused"] < 0.2 * saved["unfused"]


def test_frozen_weights_need_no_gradient() -> None:
    block = head_block(scenario("chunked", lora={"rank": 8}))
    assert flops(block.forward) == 4 * TOKENS * HIDDEN * VOCAB
    assert sum(s.bytes for s in block.saved if "gradient" in s.name) == 2 * TOKENS * HIDDEN


@pytest.mark.parametrize("framework", ["eager", "compiled"])
def test_a_loop_of_torch_has_as_many_chunks_as_are_asked_for(framework: str) -> None:
    """torchtitan, components/loss.py: logits of one chunk at a time, all flops in the forward, each chunk's gradient of
    the weight but the first added to the sum."""
    whole, looped = (head_block(scenario("chunked", framework=framework, loss_chunks=chunks)) for chunks in (1, 8))
    assert flops(looped.forward) == 6 * TOKENS * HIDDEN * VOCAB
    names = [getattr(item, "name", "") for item in looped.forward]
    assert len([name for name in names if name.startswith("output_wgrad_sum")]) == 7
    logits = 10 if framework == "eager" else 4  # bytes: 16-bit logits and two of fp32; these and their gradient
    fixed = 4 * TOKENS * HIDDEN
    assert whole.forward_peak_bytes >= logits * TOKENS * VOCAB
    assert looped.forward_peak_bytes < 1.5 * logits * TOKENS * VOCAB / 8 + fixed + 2 * VOCAB * HIDDEN


def test_a_loop_s_loss_is_summed_over_a_split_vocabulary() -> None:
    """Three all-reduces a chunk, and one reduction of the inputs' gradient."""
    block = head_block(scenario("chunked", {"tp": 4}, loss_chunks=8))
    kinds = [getattr(item, "kind", "") for item in (*block.forward, *block.backward)]
    assert kinds.count("all_reduce") == 3 * 8 + 1
    padded = 128512  # to a multiple of 4 · 128
    assert flops(block.forward) == 6 * TOKENS * HIDDEN * padded / 4


def test_chunks_need_the_loss_in_chunks() -> None:
    with pytest.raises(InputError, match="needs cross_entropy chunked"):
        scenario("fused", loss_chunks=8)


def test_a_split_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="Liger's chunks need the whole vocabulary"):
        scenario("chunked", {"tp": 2})
