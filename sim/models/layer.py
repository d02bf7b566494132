"""A transformer layer as one rank runs it: norm, attention, residual, norm, MLP or experts, residual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.models.attention import Core, attention_parts
from sim.models.context_parallel import attention_core
from sim.models.dims import Dims, Shard, dims
from sim.models.elementwise import branch_sum, norm, residual
from sim.models.lora import frozen, only_behind_adapters
from sim.models.mla import mla_core, mla_parts
from sim.models.mlp import mlp_parts
from sim.models.moe import moe_parts
from sim.models.operators import Part, quantized_weight_bytes, workspace
from sim.models.recompute import as_block, keep, mode_of_layer, stops_early
from sim.program import Block

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def layer_block(scenario: Scenario, layer: int, shard: Shard | None = None) -> Block:
    """Layer number `layer` (from 0, over the whole model) of `scenario` on the rank at `shard`.

    Saved activations of an unfused 16-bit GPT layer with dropout: 34·s·b·h + 5·a·s²·b bytes, and its tensor-
    and sequence-parallel forms (Korthikanti 2022, equations 1 to 4).
    """
    shard = shard or Shard()
    d = dims(scenario)
    parts = layer_parts(scenario, d, layer, shard)
    if d.lora is not None:
        parts = tuple(p if p.params + p.frozen == 0 or p.frozen else frozen(p) for p in parts)
        parts = only_behind_adapters(parts) if layer == 0 else parts
    kept = keep(d, parts, mode_of_layer(scenario, layer), stops_early(scenario))
    block = as_block(f"layer {layer}", layer_key(scenario, d, layer, shard), parts, kept)
    return replace(block, workspace_bytes=workspace(d, parts), quantized_bytes=quantized_weight_bytes(d, parts))


def layer_parts(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Part, ...]:
    """The layer's operators in forward order."""
    m = scenario.model
    moe = m.is_moe_layer(layer)
    mlp = moe_parts(scenario, d, layer, shard) if moe else mlp_parts(d, m)
    bias_after = m.bias and d.tp > 1
    return (
        branch_sum(d),
        norm(d, "attention_norm", m.norm, d.rows, d.hidden, m.bias),
        *_attention(scenario, d, shard),
        residual(d, "attention_residual", "attention", bias_after),
        branch_sum(d),
        norm(d, "mlp_norm", m.norm, d.rows, d.hidden, m.bias, after_sum=True),
        *mlp,
        residual(d, "mlp_residual", "mlp", bias_after and not moe),
    )


def _attention(scenario: Scenario, d: Dims, shard: Shard) -> tuple[Part, ...]:
    if scenario.model.mla is not None:
        core = attention_core(scenario, d, shard, mla_core(scenario, d))
        return mla_parts(scenario, d, core)
    own = Core(d.seq, d.seq, d.heads, d.kv_heads, d.head_dim, d.head_dim)
    return attention_parts(scenario, d, attention_core(scenario, d, shard, own))


def layer_key(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> str:
    """What fixes the layer's computation, as text; recomputation is left out (it runs the same forward)."""
    m, p = scenario.model, scenario.parallelism
    text = (
        f"layer {shape_key(scenario, d)} heads={m.heads} kv_heads={m.kv_heads} head_dim={m.head_dim} "
        f"ffn={m.ffn} mlp={m.mlp} positions={m.positions} dropout={m.dropout:g} "
        f"attention={(d.attention_kernel or 'fused') if d.fused_attention else 'unfused'} tp_overlap={d.tp_overlap}"
    )
    if d.lora is not None:
        text += f" lora={d.lora.rank},{','.join(d.lora.targets)}{',first' if layer == 0 else ''}"
    if m.mla is not None:
        text += " mla=" + ",".join(str(v) for v in m.mla.model_dump().values())
    if d.cp > 1:
        text += f" cp={d.cp} cp_rank={shard.cp_rank} {p.cp_method} {p.cp_split}"
    if m.is_moe_layer(layer) and m.moe is not None:
        text += f" moe={m.moe.experts},{m.moe.top_k},{m.moe.ffn},{m.moe.shared_experts} ep={p.ep}/{p.expert_tp}"
        if m.moe.imbalance != "balanced":  # every layer and rank has a load of its own
            text += f" layer={layer} ep_rank={shard.ep_rank}"
    return text


def shape_key(scenario: Scenario, d: Dims) -> str:
    """The part of a key that all blocks share."""
    m = scenario.model
    return (
        f"b={d.batch} s={d.full_seq} h={d.hidden} norm={m.norm} bias={int(m.bias)} precision={d.linear} "
        f"elementwise={d.style} tp={d.tp} sp={int(d.sp)} cp={d.cp}"
    )
