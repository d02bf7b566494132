"""Llama 4 in Transformers: every expert computes every token, as its own module in torch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_programs import flops

from sim.core.program import Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block

SEQ, HIDDEN, FFN, EXPERTS = 128, 256, 192, 8
CONFIG = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "intermediate_size_mlp": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "moe_layers": [0, 1, 2, 3],
    "max_position_embeddings": SEQ,
}


def block_of(folder: Path, framework: str, layer: int = 0, ep: int = 1, **training: Any) -> Any:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    training = {"seq_len": SEQ, "global_batch_size": 2, "framework": framework, "param_dtype": "bf16"} | training
    asked = {"model": str(file), "training": training, "parallelism": {"dp": 2, "ep": ep}, "cluster": "dgx-h100"}
    return layer_block(parse_scenario(asked), layer)


def of_experts(items: Any) -> list[Compute]:
    """All but the sums of gradients over micro-batches, which one backward has not."""
    found = [i for i in items if isinstance(i, Compute) and i.name.startswith(("experts_", "expert_", "swiglu"))]
    return [i for i in found if not i.name.endswith("_accumulate")]


def test_kernels_and_bytes_are_those_of_the_module(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from counted_accesses import counted

    module = llama4.Llama4TextExperts(llama4.Llama4TextConfig(**CONFIG)).to(torch.bfloat16)
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.randn(SEQ, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(SEQ, EXPERTS, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Any:  # as Llama4TextMoe.forward
        routed_in = tokens.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        return module(routed_in).reshape(EXPERTS, -1, HIDDEN).sum(dim=0)

    result, ahead = counted(forward)
    gradient = torch.ones_like(result)
    _, back = counted(lambda: result.backward(gradient))
    block = block_of(tmp_path, "transformers")
    allocations = 1  # new_empty_strided, before the scores' gradient is copied
    for found, program, free in ((ahead, block.forward, 0), (back, block.backward, allocations)):
        described = of_experts(program)
        assert sum(i.kernels for i in described) == found.operators - free
        # `counted` reads the sum's gradient once for each expert, where it lies but once
        assert sum(i.bytes for i in described) == pytest.approx(found.bytes, rel=0.03)


def test_only_where_no_ranks_share_the_experts(tmp_path: Path) -> None:
    """Frameworks with layers of their own send a token to the chosen experts, and so does expert parallelism."""
    kind = ("grouped_gemm",)
    every, chosen = (flops(block_of(tmp_path, name).forward, kind) for name in ("transformers", "megatron"))
    assert every == EXPERTS * chosen == 2 * SEQ * EXPERTS * 3 * HIDDEN * FFN
    assert flops(block_of(tmp_path, "transformers", ep=2).forward, kind) == chosen


def test_the_norm_of_queries_and_keys_goes_with_rope(tmp_path: Path) -> None:
    """Llama 4's layers without rope have none (Llama4TextAttention)."""
    norms = {
        layer: [i.name for i in block_of(tmp_path, "transformers", layer).forward if "_norm" in i.name]
        for layer in (2, 3)
    }
    assert norms[2] == ["attention_norm", "query_norm", "key_norm", "mlp_norm"]
    assert norms[3] == ["attention_norm", "mlp_norm"]
    assert block_of(tmp_path, "transformers", 2).params == block_of(tmp_path, "transformers", 3).params


def test_rope_multiplies_complex_numbers(tmp_path: Path) -> None:
    """Llama4TextAttention: a cast, a product of fp32 pairs, a cast back; backward the angles' conjugate besides."""
    torch = pytest.importorskip("torch")
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from counted_accesses import counted

    x = torch.randn(1, SEQ, 4, 64, dtype=torch.bfloat16)
    queries, keys = (x.clone().requires_grad_() for _ in range(2))
    angles = torch.polar(torch.ones(1, SEQ, 32), torch.rand(1, SEQ, 32))
    results, ahead = counted(lambda: llama4.apply_rotary_emb(queries, keys, angles))
    block = block_of(tmp_path, "transformers")
    (rope,) = (i for i in block.forward if isinstance(i, Compute) and i.name == "rope")
    (back,) = (i for i in block.backward if isinstance(i, Compute) and i.name == "rope_backward")
    assert rope.kernels == ahead.operators == 6
    assert rope.bytes == ahead.bytes - 2 * 8 * angles.numel() == results[0].numel() * 2 * 20
    assert (back.kernels, back.bytes) == (8, rope.bytes)


def test_products_with_a_score_that_a_token_s_numbers_share_are_not_vectorized(tmp_path: Path) -> None:
    block = block_of(tmp_path, "transformers")
    singly = {i.name: i.single_elements for i in (*block.forward, *block.backward) if isinstance(i, Compute)}
    for name in ("expert_inputs_weighted", "expert_inputs_weighted_backward", "expert_sum_backward"):
        assert singly[name] == SEQ * EXPERTS * HIDDEN


def test_under_autocast_they_multiply_in_sixteen_bits(tmp_path: Path) -> None:
    """torch.bmm is on autocast's list, unlike the grouped matmul of other families; weighted copies keep fp32."""
    torch = pytest.importorskip("torch")
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    module = llama4.Llama4TextExperts(llama4.Llama4TextConfig(**CONFIG))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.zeros(EXPERTS * SEQ, HIDDEN)).dtype == torch.bfloat16
    block = block_of(tmp_path, "transformers", param_dtype="fp32", autocast=True)
    matmuls = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.kind == "grouped_gemm"]
    assert {i.dtype for i in matmuls} == {"bf16"}
    kept = {s.name: s.bytes for s in block.saved}
    assert kept["copies for all experts"] == 4 * EXPERTS * SEQ * HIDDEN == 2 * kept["experts_up input"]
    casts = {i.name: i.bytes for i in block.forward if isinstance(i, Compute) and i.name == "experts_weight_cast"}
    assert casts == {"experts_weight_cast": 6.0 * EXPERTS * 3 * HIDDEN * FFN}
