"""DeepSeek V3.2 as Transformers trains it: its indexer in separate operators, attention with a mask of numbers."""

from __future__ import annotations

import json
from pathlib import Path

from model_programs import named

from sim.core.program import Block, Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.models.layers.indexer_of_transformers import separate_bytes

HEADS, WIDTH, SEQ, SEQUENCES = 16, 128, 2048, 2
CONFIG = {
    "model_type": "deepseek_v32",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 32000,
    "index_topk": 512,
    "index_n_heads": HEADS,
    "index_head_dim": WIDTH,
}


def layer(folder: Path, framework: str, sequences: int = SEQUENCES) -> Block:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    given: dict[str, object] = {
        "seq_len": SEQ,
        "micro_batch_size": sequences,
        "global_batch_size": sequences,
        "attention": "fused",
    }
    given |= {"framework": framework}
    return layer_block(parse_scenario({"model": str(config), "training": given, "cluster": {"gpu": "h200-sxm"}}), 1)


def test_keys_are_copied_for_each_query(tmp_path: Path) -> None:
    """A captured step has a copy of [2, 2048, 128, 2048] in fp32, and a product for each query: 10 of its 18 ms."""
    block = layer(tmp_path, "transformers")
    (copies,), (products,) = (named(block.forward, f"index_{name}") for name in ("key_copies", "scores"))
    assert (copies.kind, copies.shape) == ("permute", (SEQUENCES * SEQ * WIDTH * SEQ,))
    assert (products.shape, products.dtype) == ((SEQUENCES * SEQ, HEADS, SEQ, WIDTH), "fp32")
    assert separate_bytes((HEADS, WIDTH), (SEQUENCES, SEQ, SEQ)) == 4 * SEQUENCES * SEQ * SEQ * (HEADS + WIDTH)


def test_one_sequence_has_its_keys_once(tmp_path: Path) -> None:
    """Its queries are the only batches, so that the keys are broadcast; the scores are scaled into a second tensor."""
    block = layer(tmp_path, "transformers", 1)
    assert not named(block.forward, "index_key_copies")
    assert named(block.forward, "index_scores")[0].shape == (SEQ, HEADS, SEQ, WIDTH)
    assert separate_bytes((HEADS, WIDTH), (1, SEQ, SEQ)) == 4 * SEQ * SEQ * 2 * HEADS


def test_its_attention_reads_a_mask_of_numbers(tmp_path: Path) -> None:
    """It computes all pairs: nothing tells the kernel which of them the mask hides."""
    block = layer(tmp_path, "transformers")
    found = [x for x in (*block.forward, *block.backward) if isinstance(x, Compute) and x.kind.startswith("attention_")]
    assert [(x.masked, x.shape[-1]) for x in found] == [(True, 0)] * 2


def test_other_frameworks_score_in_one_kernel(tmp_path: Path) -> None:
    block = layer(tmp_path, "megatron")
    assert not named(block.forward, "index_key_copies")
    assert len(named(block.forward, "index_scores")) == 1
