"""What the forward of a model with experts saves, by torch's own hooks (torch.autograd.graph.saved_tensors_hooks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQ, BATCH, HEAD_DIM = 256, 2, 128
ROPE_BYTES = 2 * SEQ * HEAD_DIM * 2  # cosines and sines, which the simulator leaves out
ALL_IN_BF16 = {"param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16", "optimizer_dtype": "bf16"}


def _config(top_k: int) -> Any:
    config = transformers.Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=HEAD_DIM,
        moe_intermediate_size=256, num_experts=8, num_experts_per_tok=top_k, norm_topk_prob=True, vocab_size=4096,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    return config


def _saved_bytes(config: Any) -> int:
    """Bytes of all storages that a forward saves, each counted once, without parameters."""
    saved = dict[int, Any]()

    def pack(tensor: Any) -> Any:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    without_mask = mock.patch("transformers.models.qwen3_moe.modeling_qwen3_moe.create_causal_mask", return_value=None)
    with without_mask:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        ids = torch.randint(0, config.vocab_size, (BATCH, SEQ))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)


@pytest.mark.parametrize("top_k", [2, 4])
def test_a_forward_with_experts_saves_what_torch_saves(top_k: int, tmp_path: Path) -> None:
    config = _config(top_k)
    config.to_json_file(tmp_path / "config.json")
    training = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH, "framework": "transformers"}
    scenario = {"model": str(tmp_path / "config.json"), "training": training | ALL_IN_BF16, "cluster": "dgx-h100"}
    (memory,) = simulate(parse_scenario(scenario)).result["memory"]
    assert memory["activations"] == pytest.approx(_saved_bytes(config) - ROPE_BYTES, rel=1e-3)
