"""What a serving rank's memory holds: weights, an iteration's tensors, and the cache in what is left."""

from __future__ import annotations

from typing import NamedTuple

from sim.inputs.scenario import Scenario
from sim.models.inference import ServingDims, kv_bytes_per_token, layer_elements
from sim.serve.requests import Request
from sim.serve.serving_costs import IterationCosts, StageLayers


class Capacity(NamedTuple):
    """Cache of one replica. `blocks` are simulated, `blocks_fit` what there is room for on the fullest stage.

    `token_bytes`: of one token on the stage with most layers (`stage_token_bytes`: the same, what a host copy moves
    per GPU). `reserve_tokens`: what a sequence holds from the start in the contiguous layout, else 0.
    """

    blocks: int
    blocks_fit: int
    reserve_tokens: int
    token_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    buffer_bytes: tuple[float, ...]
    host_tokens: int

    @property
    def stage_token_bytes(self) -> float:
        return max(self.token_bytes)


def weight_bytes(d: ServingDims, stage: StageLayers) -> float:
    """Weights of one rank of a stage, in the formats the scenario keeps them in."""
    total = 0.0
    for sparse, layers in ((False, stage.dense), (True, stage.sparse)):
        if layers:
            quantized, rest = layer_elements(d, sparse)
            total += layers * (quantized * d.weight_bytes + rest * d.act_bytes)
    m = d.model
    table = d.vocab * m.hidden * d.act_bytes
    tied_here = m.tied_embeddings and stage.embedding and stage.head
    total += table * (stage.embedding + (stage.head and not tied_here))
    if stage.embedding and m.positions == "learned":
        total += m.max_positions * m.hidden * d.act_bytes
    if stage.head:
        total += m.hidden * (2 if m.norm == "layernorm" and m.bias else 1) * d.act_bytes
    return total


def buffer_bytes(d: ServingDims, stage: StageLayers, tokens: int, samples: int) -> float:
    """The most that an iteration of `tokens` holds beside weights and cache: the residual stream and its sum, and the
    widest of what attention or the MLP make of it; at the head the logits and their fp32 copy."""
    m = d.model
    inner = m.ffn / d.tp
    if m.moe is not None:
        inner = max(inner if m.moe.dense_layers else 0.0, m.moe.ffn * m.moe.top_k / d.tp, float(m.hidden))
    wide = max((d.heads + 2 * d.kv_heads) * m.head_dim, inner * (3 if m.mlp == "swiglu" else 2))
    layer = tokens * (2 * m.hidden + wide) * d.act_bytes
    logits = samples * d.vocab * d.tp * (d.act_bytes + 4.0) if stage.head else 0.0
    return max(layer, tokens * m.hidden * d.act_bytes + logits)


def cache_capacity(
    scenario: Scenario, costs: IterationCosts, requests: tuple[Request, ...], held_bytes: float = 0.0
) -> Capacity:
    """Blocks that fit beside weights, buffers and others' `held_bytes` into `memory_fraction` of a GPU (vLLM's
    gpu_memory_utilization); into all of it with static batching, which allocates what it needs.

    Every stage must hold its layers' part of every block, so the stage with least room decides. Where not even the
    longest request fits (for static batching: the whole batch), just enough blocks for it are simulated.
    """
    i, d = scenario.inference, costs.dims
    assert i is not None
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    contiguous = i.kv_cache.layout == "contiguous"
    reserve = max(longest, d.model.max_positions if d.model.max_positions > 1 else 0) if contiguous else 0
    block = i.kv_cache.block_tokens
    static = i.batching == "static"
    sequences = -(-len(requests) // scenario.parallelism.dp) if static else i.max_running_requests
    prompts = sum(r.prompt_tokens for r in requests)
    tokens = -(-prompts // scenario.parallelism.dp) if static else min(i.max_batch_tokens, prompts + len(requests))
    buffers = tuple(buffer_bytes(d, s, tokens, min(sequences, len(requests))) for s in costs.stages)
    weights = tuple(weight_bytes(d, s) for s in costs.stages)
    per_token = tuple((s.dense + s.sparse) * kv_bytes_per_token(d) for s in costs.stages)
    budget = scenario.cluster.gpu.memory_bytes * (1.0 if static else i.kv_cache.memory_fraction) - held_bytes
    stages = zip(weights, buffers, per_token, strict=True)
    fit = min(int(max(0.0, budget - w - b) // (t * block)) for w, b, t in stages if t)
    each = -(-max(longest - 1, reserve) // block)
    needed = each * (sequences if static else 1)
    host_bytes = scenario.cluster.gpu.memory_bytes
    return Capacity(max(fit, needed), fit, reserve, per_token, weights, buffers, int(host_bytes // max(per_token)))
