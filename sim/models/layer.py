"""A transformer layer as one rank runs it: norm, attention, residual, norm, MLP or experts, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Block, BlockKind, ModelPart, TensorRole
from sim.models.activation_memory.offload_modules import by_module
from sim.models.activation_memory.recompute import as_block, keep, mode_of_layer, modules_of, rerun_end
from sim.models.activation_memory.recompute_modules import inside
from sim.models.dims import Dims, Shard, layer_dims
from sim.models.elementwise import branch_sum, residual
from sim.models.graphed_parts import captured_layer
from sim.models.layers import Attention, Branch, LayerSpec, Mlp, layer_specs
from sim.models.layers.dense_mlp import DenseMlp
from sim.models.layers.experts import Experts
from sim.models.layers.latent import LatentAttention
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.lora import frozen, only_behind_adapters
from sim.models.moe.token_steps import checkpointed_in_parts
from sim.models.norm import stream_norm
from sim.models.operators import F, I, Operator, collective, of_part, workspace
from sim.models.precision.casts import norms_give_wide
from sim.models.precision.quantizing import passing_weight_bytes, quantized_weight_bytes
from sim.models.streams.hyper_connections import collapsed, spread
from sim.models.warm_up import only_indexers, warms_up
from sim.variants.frameworks.megatron import facts_off

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import OffloadModule


# What Megatron-Core calls the norm before a branch (`--offload-modules`).
NORM_MODULES: dict[str, OffloadModule] = {"attention": "attn_norm", "mlp": "mlp_norm"}


def layer_block(scenario: Scenario, layer: int, shard: Shard | None = None) -> Block:
    """Layer number `layer` (from 0, over the whole model) of `scenario` on the rank at `shard`.

    Saved activations of an unfused 16-bit GPT layer with dropout: 34·s·b·h + 5·a·s²·b bytes, and its tensor-
    and sequence-parallel forms (Korthikanti 2022, equations 1 to 4).
    """
    shard = shard or Shard()
    d = layer_dims(scenario, layer)
    parts = by_module(scenario, layer_parts(scenario, d, layer, shard))
    if d.lora is not None:
        parts = tuple(p if p.frozen or not p.params + p.expert_params else frozen(p) for p in parts)
        parts = only_behind_adapters(parts) if _ends_backward(scenario, d, layer) else parts
    if warms_up(scenario):
        parts = only_indexers(parts)
    in_parts = isinstance(layer_specs(scenario.model)[layer].mlp, Experts) and checkpointed_in_parts(d)
    kept = keep(d, parts, mode_of_layer(scenario, layer), rerun_end(scenario, in_parts), modules_of(scenario))
    block = as_block(f"layer {layer}", BlockKind.LAYER, layer_key(scenario, d, layer, shard), parts, kept)
    passing = workspace(d, parts) + passing_weight_bytes(d, parts)
    quantized = quantized_weight_bytes(d, parts)
    return replace(block, workspace_bytes=passing, quantized_bytes=quantized, in_sixteen_bits=d.in_sixteen_bits)


def _ends_backward(scenario: Scenario, d: Dims, layer: int) -> bool:
    """Tell whether the backward ends at the layer's first adapter, as nothing before it needs a gradient."""
    asked = d.framework.checkpoint_asks_gradients and scenario.for_training.recompute.mode == "full"
    return layer == 0 and not asked


def layer_parts(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Operator, ...]:
    """The layer's operators in forward order."""
    m, spec = scenario.model, layer_specs(scenario.model)[layer]
    d = replace(d, partial_rows=_sums_together(d, spec))
    if spec.parallel is True:
        return _parallel(scenario, d, layer, shard)
    first: tuple[Operator, ...] = ()
    second: tuple[Operator, ...] = ()
    ngrams = () if spec.ngrams is None else spec.ngrams.train(d)
    parts: tuple[Operator, ...] = of_part(ModelPart.EMBEDDING, ngrams)
    if spec.attention is not None:
        inner = spec.attention.train(scenario, d, shard)
        branch = _branch(m, d, spec, "attention", inner, m.biased_attention_out and _passes_on(d))
        first = of_part(spec.attention.part, branch)
    if spec.mlp is not None:
        inner = inside(spec.mlp.module, spec.mlp.train(scenario, d, layer, shard))
        branch = _branch(m, d, spec, "mlp", inner, spec.mlp.bias_after and _passes_on(d), spec.attention is not None)
        second = of_part(spec.mlp.part, branch)
    parts += captured_layer(scenario, d, first, second, scans=_scans(spec), experts=isinstance(spec.mlp, Experts))
    if spec.inputs is not None:
        parts += of_part(ModelPart.MLP, spec.inputs.branch(m, d))
    return parts


def _passes_on(d: Dims) -> bool:
    """Tell whether a branch's last matmul leaves its bias to the sum with the residual stream."""
    return d.tp > 1 or d.framework.passes_biases_on


def _parallel(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Operator, ...]:
    """Attention and MLP or experts on one norm; both results are added to the stream."""
    m, spec = scenario.model, layer_specs(scenario.model)[layer]
    assert spec.attention is not None
    assert spec.mlp is not None
    opening, *rest = spec.mlp.train(scenario, d, layer, shard)
    # Attention keeps their input, unless each casts it for itself.
    own = tuple(s for s in opening.saved if s.role is not TensorRole.INPUT or norms_give_wide(d))
    norm = replace(stream_norm(m, d.of_stream, "attention_norm"), module=NORM_MODULES["attention"])
    norms = of_part(ModelPart.NORM, (norm,))
    attention = (
        branch_sum(d),
        *inside("layernorm", norms),
        branch_sum(d),
        *spec.attention.train(scenario, d, shard),
        residual(_before_sum(d), "attention_residual", m.biased_attention_out and _passes_on(d)),
    )
    mlp = (
        *inside(spec.mlp.module, (replace(opening, saved=own), *rest)),
        *_sum_of_branches(d),
        residual(_of_result(d, spec.mlp), "mlp_residual", spec.mlp.bias_after and _passes_on(d)),
    )
    first, second = of_part(spec.attention.part, attention), of_part(spec.mlp.part, mlp)
    return captured_layer(scenario, d, first, second, scans=_scans(spec), experts=isinstance(spec.mlp, Experts))


def _scans(spec: LayerSpec) -> bool:
    """Tell whether a layer has a state in attention's place."""
    return spec.attention is not None and spec.attention.part is ModelPart.STATE_SPACE


def _branch(
    m: ModelConfig,
    d: Dims,
    spec: LayerSpec,
    name: Branch,
    inner: tuple[Operator, ...],
    bias_after: bool,
    second: bool = False,
) -> tuple[Operator, ...]:
    """One branch of a layer: norm, `inner` (attention or MLP), the norm after it, the sum with the residual stream.

    `second`: the branch behind attention. Where both branches norm the same input (`two_norms`), the first one keeps
    it for the backward. With several streams: a sum of them, its norm, `inner`, the result spread over the streams.
    """
    same = second and spec.parallel == "two_norms"

    def norms(sizes: Dims, here: bool, after_sum: bool = False, keeps: bool = True) -> tuple[Operator, ...]:
        made = (stream_norm(m, sizes, f"{name}_norm", after_sum, keeps),) if here else ()
        return of_part(ModelPart.NORM, [replace(norm, module=NORM_MODULES[name]) for norm in made])

    if d.streams.number > 1:
        before, normed = collapsed(d, name), norms(d, not d.streams.gated)
        return (*before, *inside("layernorm", normed), *inner, spread(d, name))
    part = spec.mlp if name == "mlp" else spec.attention
    gate, result = spec.gate_of(part), _of_result(d, part)
    first = norms(d.of_stream, spec.norm_position != "post", second and not same, not same)
    after = (stream_norm(m, result, f"{name}_post_norm"),) if spec.norm_behind(name) else ()
    return (
        branch_sum(d),
        *(inside("layernorm", first) if _norms_apart(d, spec, name) else first),
        *of_part(ModelPart.NORM, () if gate is None else gate.train(d, f"{name}_norm")),
        *inner,
        *of_part(ModelPart.NORM, after),
        *(_sum_of_branches(d) if second else ()),
        residual(result if second else _before_sum(result), f"{name}_residual", bias_after),
    )


def _of_result(d: Dims, part: Attention | Mlp | None) -> Dims:
    """The sizes of what a branch gives to its norm and to the stream: routed experts in fp32 give fp32, with shared
    experts, too (`sim.models.moe.shared`)."""
    return d.of_stream if isinstance(part, Experts) and d.experts_in_fp32 else d


def _norms_apart(d: Dims, spec: LayerSpec, name: str) -> bool:
    """Tell whether the norm before a branch is a module of its own, which can be recomputed or offloaded by itself."""
    if not d.framework.joins_norms:
        return True
    own = Experts if name == "mlp" else (LatentAttention, SparseLatentAttention)
    return isinstance(spec.mlp if name == "mlp" else spec.attention, own)


def _sums_together(d: Dims, spec: LayerSpec) -> bool:
    """Tell whether attention and MLP beside each other share their sum over tp."""
    return d.framework.sums_branches_together and d.tp > 1 and bool(spec.parallel) and isinstance(spec.mlp, DenseMlp)


def _before_sum(d: Dims) -> Dims:
    """The sizes of what reads both branches' parts of a sum: all tokens, as sequence parallelism splits the sum."""
    return replace(d, rows=d.tokens) if d.partial_rows else d


def _sum_of_branches(d: Dims) -> tuple[Operator, ...]:
    """The all-reduce of both branches' outputs, [tokens, hidden], whose backward sends nothing; with sequence
    parallelism a reduce-scatter, and a gather of the gradient (gpt-neox: `ParallelTransformerLayer.forward`,
    `self.reduce`). Each column-parallel layer still all-reduces its own input's gradient (`ColumnParallelLinear`)."""
    if not d.partial_rows:
        return ()
    kind, size = "reduce_scatter" if d.sp else "all_reduce", d.tokens * d.hidden * d.act_bytes
    back = (collective("branches_grad_gather", "all_gather", size, I),) if d.sp else ()
    return (Operator(f"branches_{kind}", (collective(f"branches_{kind}", kind, size, F),), back),)


def layer_key(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> str:
    """Return what fixes the layer's computation, as text; recomputation is left out (it runs the same forward)."""
    m, p = scenario.model, scenario.parallelism
    text = (
        f"layer {shape_key(m, d)} heads={m.heads} kv_heads={m.kv_heads} head_dim={m.head_dim} "
        f"ffn={m.ffn} mlp={m.mlp} positions={m.positions} dropout={m.dropout:g} "
        f"attention={(d.attention_kernel or 'fused') if d.fused_attention else 'unfused'} tp_overlap={d.tp_overlap}"
    )
    text += "" if scenario.for_training.moe_router_fusion is None else f" router={d.framework.router.forward_kernels}"
    apart = ",".join(sorted(facts_off(scenario.for_training)))
    text += f" apart={apart}" if apart else ""
    text += " rope in projection" if d.framework.ropes_in_projection else ""
    text += f" waits={','.join(d.waiting_layers)}" if d.waiting_layers else ""
    text += _adapters_key(d, _ends_backward(scenario, d, layer))
    if m.mla is not None:
        text += " mla=" + ",".join(str(v) for v in m.mla.model_dump().values())
    spec = layer_specs(m)[layer]
    if spec.attention is not None:
        text += spec.attention.key(d.full_seq)
    if spec.ngrams is not None:
        text += f" ngrams={spec.ngrams.rows}"
    if m.indexer is not None and scenario.for_training.indexer != "trained":
        text += f" indexer {scenario.for_training.indexer}"
    said = ("window", "indexer", "block_indexer", "attention_pattern")  # by the attention itself
    text += "".join(f" {key}={value}" for key, value in m.variations.items() if key not in said)
    if scenario.for_training.packing is not None:
        packing = scenario.for_training.packing.model_dump_json(exclude_defaults=True)
        text += f" packing={packing} of {scenario.for_training.global_batch_size} over {p.dp}"
    if d.cp > 1:
        text += f" cp={d.cp} cp_rank={shard.cp_rank} {d.cp_method} {p.cp_split}"
        text += f" over {p.cp_exchanged}" if d.cp_method == "all_to_all_ring" else ""
    if m.is_moe_layer(layer) and m.moe is not None:
        text += f" moe={m.moe.experts},{m.moe.top_k},{m.moe.ffn},{m.moe.shared_experts} ep={p.ep}/{p.expert_tp}"
        text += " router=fp32" if m.moe.router_fp32 else ""
        if scenario.uneven_experts:  # every layer and rank has a load of its own
            text += f" layer={layer} ep_rank={shard.ep_rank}"
    return text


def _adapters_key(d: Dims, first: bool) -> str:
    """LoRA's part of a layer's key; `first`: the backward ends in the layer."""
    if d.lora is None:
        return ""
    text = f" lora={d.lora.rank},{','.join(d.lora.targets)}{',first' if first else ''}"
    text += f",dropout={d.lora.dropout:g}" if d.lora.dropout else ""
    return text + (f",{d.lora.weights},{d.lora.quantized_experts}" if d.few_bits else "")


def shape_key(m: ModelConfig, d: Dims) -> str:
    """The part of a key that all blocks share."""
    return (
        f"b={d.batch} s={d.full_seq} h={d.hidden} norm={m.norm} bias={int(m.bias)} precision={d.linear}{d.recipe_key} "
        f"{'autocast ' if d.autocast else 'fp32 stream ' if d.wide_stream else ''}"
        f"elementwise={d.framework.name} tp={d.tp} sp={int(d.sp)} cp={d.cp}"
    )
