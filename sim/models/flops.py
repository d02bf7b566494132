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
    layers = model.layers + model.mtp_layers
    attention = 6.0 * layers * model.heads * sum(attention_widths(model)) * seq_len
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
    attention, dense, sparse = (
        attention_matmul_params(model),
        mlp_matmul_params(model, model.ffn),
        moe_active_params(model),
    )
    output = model.hidden * model.vocab
    mlps = (model.layers - model.moe_layers) * dense + model.moe_layers * sparse
    further = 2 * model.hidden**2 + attention + (sparse if model.moe else dense) + output
    return float(model.layers * attention + mlps + output + model.mtp_layers * further)


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
