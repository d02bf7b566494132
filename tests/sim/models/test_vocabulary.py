"""How frameworks pad a vocabulary: the entries of a rank's part, whose matmuls are fast if 8 divides them."""

from __future__ import annotations

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.embedding import table_elements
from sim.models.output.head import head_block

CASES = [
    # Megatron-LM: a multiple of 128 · tp. nanotron, whose make_vocab_size_divisible_by is 1: of tp.
    ("megatron", 50257, 1, 50304, 8),
    ("megatron", 128256, 8, 129024 // 8, 8),
    ("megatron_bridge", 50257, 2, 50432 // 2, 8),
    ("eager", 50257, 1, 50304, 8),  # as calibrate/bundled_model/model.py pads
    ("nanotron", 50257, 2, 50258 // 2, 1),
    ("transformers", 50257, 1, 50257, 1),
    ("deepspeed", 30522, 1, 30522, 2),
    ("compiled", 128256, 8, 128256 // 8, 8),
    ("composer", 50368, 1, 50368, 8),
]


def described(framework: str, vocab: int, tp: int) -> Scenario:
    model = {"layers": 2, "hidden": 1024, "heads": 16, "vocab": vocab, "tied_embeddings": False}
    training = {"seq_len": 512, "global_batch_size": 1, "framework": framework}
    return parse_scenario({"model": model, "training": training, "parallelism": {"tp": tp}, "cluster": "dgx-h100"})


@pytest.mark.parametrize(("framework", "vocab", "tp", "entries", "alignment"), CASES)
def test_a_rank_has_its_part_of_the_padded_vocabulary(
    framework: str, vocab: int, tp: int, entries: int, alignment: int
) -> None:
    scenario = described(framework, vocab, tp)
    block = head_block(scenario)
    product = next(i for i in block.forward if isinstance(i, Compute) and i.kind == "gemm")
    assert (product.shape[2], product.alignment) == (entries, alignment)
    assert table_elements(scenario) == entries * 1024
    padded = entries * tp
    assert any(f"{vocab} is padded to {padded}" in w for w in scenario.warnings) == (padded != vocab)
