"""Model FLOPs: what a token needs whatever the layout, the numerator of MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.inputs.scenario import ModelConfig


def model_flops_per_token(model: ModelConfig, seq_len: int, causal_half: bool = True, frozen: bool = False) -> float:
    """6·(parameters of matmuls) + 12·layers·heads·head_dim·seq_len, the second halved when causal.

    4 in place of 6 where the weights are `frozen`: no weight gradient (those of adapters are not counted).

    Matmul parameters: the output layer's count, the embedding look-up's not; of experts those active. The
    attention term is the PaLM paper's (Chowdhery 2022, appendix B); MLA's query-key and value widths take the
    place of 2·head_dim.
    """
    attention = 6.0 * _attention_layers(model) * model.heads * sum(attention_widths(model)) * seq_len
    return (4.0 if frozen else 6.0) * matmul_params_per_token(model) + attention * (0.5 if causal_half else 1.0)


def attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Per head: width of queries and keys, width of values."""
    if model.mla is None:
        return model.head_dim, model.head_dim
    return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim


def matmul_params_per_token(model: ModelConfig) -> float:
    """Weights that a token is multiplied by: attention, MLP or its active experts and router, output (and
    MTP).
    """
    dense, sparse = layer_counts(model)
    total = (dense + sparse) * attention_matmul_params(model) + dense * mlp_matmul_params(model, model.ffn)
    total += sparse * moe_active_params(model) + model.hidden * model.vocab
    for _ in range(model.mtp_layers):
        mlp = moe_active_params(model) if model.moe else mlp_matmul_params(model, model.ffn)
        total += 2 * model.hidden**2 + attention_matmul_params(model) + mlp + model.hidden * model.vocab
    return float(total)


def layer_counts(model: ModelConfig) -> tuple[int, int]:
    """Dense layers and expert layers, MTP modules apart."""
    if model.moe is None:
        return model.layers, 0
    dense = min(model.layers, model.moe.dense_layers)
    return dense, model.layers - dense


def _attention_layers(model: ModelConfig) -> int:
    return int(model.layers + model.mtp_layers)


def attention_matmul_params(model: ModelConfig) -> int:
    """Query, key, value and output projections; MLA's down and up projections."""
    h, a = model.hidden, model.heads
    if model.mla is None:
        return int(2 * h * a * model.head_dim + 2 * h * model.kv_heads * model.head_dim)
    c = model.mla
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    query = h * c.q_lora_rank + c.q_lora_rank * a * qk if c.q_lora_rank else h * a * qk
    kv = h * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank * a * (c.qk_nope_head_dim + c.v_head_dim)
    return int(query + kv + a * c.v_head_dim * h)


def mlp_matmul_params(model: ModelConfig, ffn: int) -> int:
    """Two matrices, three with a gate."""
    return int((3 if model.mlp == "swiglu" else 2) * model.hidden * ffn)


def moe_active_params(model: ModelConfig) -> int:
    """Router, top-k experts and shared experts."""
    moe = model.moe
    if moe is None:
        return 0
    experts = (moe.top_k + moe.shared_experts) * mlp_matmul_params(model, moe.ffn)
    return int(model.hidden * moe.experts + experts)
