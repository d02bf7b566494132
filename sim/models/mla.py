"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values from low-rank
latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.models.attention import Core
from sim.models.dims import Dims
from sim.models.elementwise import norm, rope
from sim.models.linear import linear
from sim.models.operators import F, I, Linear, Part, collective, memory_op
from sim.program import Program

if TYPE_CHECKING:
    from sim.inputs.model_config import MlaConfig
    from sim.inputs.scenario import Scenario


def mla_core(scenario: Scenario, d: Dims) -> Core:
    """In training every head has keys and values of its own, of different widths."""
    c = _mla(scenario)
    return Core(d.seq, d.seq, d.heads, d.heads, c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim)


def mla_parts(scenario: Scenario, d: Dims, core: Part) -> tuple[Part, ...]:
    """Down-projections (whole on every rank), latent norms, up-projections (split by heads), rope, core.

    With sequence parallelism the latents are gathered instead of the hidden state: fewer bytes.
    """
    c, h = _mla(scenario), d.hidden
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    keep = d.style != "compiled"
    kv_down = Linear(
        "kv_down",
        "attention",
        d.rows,
        h,
        (c.kv_lora_rank + c.qk_rope_head_dim,),
        save_input=keep and c.q_lora_rank is None,
    )
    kv_up = Linear(
        "kv_up",
        "attention",
        d.tokens,
        c.kv_lora_rank,
        (d.heads * (c.qk_nope_head_dim + c.v_head_dim),),
        "column",
        save_input=keep,
    )
    out = Linear("attention_out", "attention", d.tokens, d.heads * c.v_head_dim, (h,), "row")
    turned = d.tokens * (d.heads + 1) * c.qk_rope_head_dim
    return (
        *_query(d, c, d.heads * qk, keep),
        linear(d, kv_down),
        norm(d, "kv_latent_norm", "rmsnorm", d.rows, c.kv_lora_rank, False),
        linear(d, kv_up),
        rope(d, turned),
        _assemble(d, qk, c.qk_rope_head_dim),
        core,
        linear(d, out),
    )


def _query(d: Dims, c: MlaConfig, width: int, keep: bool) -> tuple[Part, ...]:
    if c.q_lora_rank is None:
        return (linear(d, Linear("query", "attention", d.tokens, d.hidden, (width,), "column", save_input=keep)),)
    down = Linear("query_down", "attention", d.rows, d.hidden, (c.q_lora_rank,), save_input=keep)
    up = Linear("query_up", "attention", d.tokens, c.q_lora_rank, (width,), "column", save_input=keep)
    return (
        linear(d, down),
        norm(d, "query_latent_norm", "rmsnorm", d.rows, c.q_lora_rank, False),
        linear(d, up),
    )


def _assemble(d: Dims, qk: int, shared: int) -> Part:
    """Queries and keys from their two parts, the shared rope key (gathered first) copied to every head."""
    n = 2 * d.tokens * d.heads * qk
    moved = 2 * n * d.act_bytes
    forward: Program = (memory_op("assemble_qk", F, "copy", n, moved, d.act, 2),)
    backward: Program = (memory_op("assemble_qk_backward", I, "copy", n, moved, d.act, 2),)
    if d.sp:
        size = d.tokens * shared * d.act_bytes
        forward = (collective("rope_key_gather", "all_gather", size, F), *forward)
        backward = (*backward, collective("rope_key_grad_scatter", "reduce_scatter", size, I))
    return Part("assemble_qk", forward, backward, backward_bytes=moved)


def _mla(scenario: Scenario) -> MlaConfig:
    assert scenario.model.mla is not None
    return scenario.model.mla
