"""Sizes of one rank of a serving scenario, as its engine keeps and multiplies numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.core.quantization import PARTS, QUANTIZATIONS, Quantization
from sim.inputs.engine_file import all2all_of, engine_of
from sim.inputs.serving_formats import cache_dtype, is_published, linear_format
from sim.models.layers import LayerSpec, layer_specs
from sim.models.layers.experts import Experts
from sim.models.moe.eplb import BalancedExperts
from sim.models.moe.routing import expert_nodes
from sim.models.serving.operators import Absorbed, LayerFormats, LinearFormat, ServedLatents, ServingDims
from sim.serve.prices.fused import experts_sum_norms, norm_in_sum_bytes, quantizing, rope_of, shared_experts
from sim.serve.prices.host import prompt_sizes

if TYPE_CHECKING:
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.scenario import Scenario
    from sim.inputs.serving_keys import Eplb
    from sim.variants.engines.record import Engine


def serving_dims(scenario: Scenario) -> ServingDims:
    """Sizes of one rank of a serving scenario.

    A format that the GPU cannot multiply (fp8 or int8 without a peak for it) still saves memory: weights are
    converted on the fly and multiplied in 16 bits, as Marlin kernels do.
    """
    m, p, i = scenario.model, scenario.parallelism, scenario.for_serving
    act, peaks = sixteen_bit(i.precision), scenario.cluster.gpu.peak_flops_per_s
    group = m.checkpoint_group_size if is_published(i, m) else None
    linear, weight = linear_format(i, peaks, group=group)
    engine = engine_of(i.engine)
    kept = i.kv_cache.dtype or cache_dtype(i, scenario.cluster.gpu, m)
    alone = ServingDims(
        model=m,
        tp=p.tp,
        sp=p.sp and p.tp > 1,
        ep=p.ep,
        expert_tp=p.expert_tp,
        vocab=m.padded_vocab(p.tp, engine.padding_of_vocab(p.tp)) // p.tp,
        act=act,
        linear=linear,
        quantization=i.quantization,
        act_bytes=dtype_bytes(act),
        weight_bytes=weight,
        expert_weight_bytes=linear_format(i, peaks, part="experts", group=group)[1],
        kv_bytes=dtype_bytes(kept),
        dispatch_bytes=dtype_bytes(p.ep_dispatch_dtype or act),
        fused_attention=i.attention == "fused",
        grouped_decode=(i.decode_attention or engine.decode_attention) == "grouped",
        group_reads=engine.group_reads,
        any_group=engine.any_group,
        sampler=engine.sampler,
        sampling=i.sampling,
        fp32_states=engine.fp32_states,
        index_dtype="fp8" if "fp8" in peaks else act,
        cp=p.cp,
        cp_method=p.cp_method,
        quantizing=quantizing(scenario, linear),
        norm_in_sum_bytes=norm_in_sum_bytes(scenario, engine.summed_norms, linear),
        experts_sum_norms=experts_sum_norms(scenario),
        latents=_latents(scenario, engine, linear),
        roped=rope_of(scenario),
    )
    return _over_replicas(_with_experts(alone, scenario, engine), scenario, engine)


def _tables(
    scenario: Scenario, linear: Quantization, dtype: str, experts: Quantization, expert: str
) -> tuple[str, str]:
    """The formats of linear layers and of routed experts in tables of measurements, of layers in these dtypes."""
    blocks = is_published(scenario.for_serving, scenario.model)
    table = QUANTIZATIONS[linear].table_of("attention", dtype, blocks)
    return table, QUANTIZATIONS[experts].table_of("experts", expert, blocks)


def _with_experts(d: ServingDims, scenario: Scenario, engine: Engine) -> ServingDims:
    """With where experts are and what they multiply in, how tokens get to them and back, what runs beside them."""
    p, i = scenario.parallelism, scenario.for_serving
    backend, nodes = all2all_of(i), expert_nodes(p, scenario.cluster.domain_gpus)
    beside, fuses = shared_experts(scenario)
    experts = _experts_dtype(i.quantization, engine, scenario.cluster.gpu.peak_flops_per_s, d.act)
    table, expert_table = _tables(scenario, i.quantization, d.linear, i.quantization, experts or d.experts_dtype)
    return replace(
        d,
        expert_linear=experts,
        table=table,
        expert_table=expert_table,
        gathers=backend.gathers,
        sums=backend.sums,
        once_to=(nodes if nodes > 1 else p.ep) if backend.once else 0,
        expert_nodes=nodes,
        eplb=_balanced(i.eplb, p, scenario.cluster.gpus_per_node) if i.eplb is not None and p.ep > 1 else None,
        shared_beside=beside,
        fuses_shared=fuses,
    )


def _over_replicas(d: ServingDims, scenario: Scenario, engine: Engine) -> ServingDims:
    """With what replicas that share experts split among them besides: shared experts, dense MLPs, the output matrix."""
    m, p, i = scenario.model, scenario.parallelism, scenario.for_serving
    sharing = p.ep * p.expert_tp
    ranks = sharing if sharing > p.tp else 0  # 0: each replica has experts of its own
    sums = engine.sums_prompts[0] and ranks > 0
    whole = engine.dp_attention and (d.gathers or p.ep == 1)
    head_tp = ranks if engine.dp_attention and i.head_over_replicas is not False and not m.tied_embeddings else 0
    return replace(
        d,
        prompt_sums=(sums, sums and (engine.sums_prompts[1] or p.tp > 1 or p.expert_tp > 1)),
        shared_tp=ranks if whole else 0,
        dense_tp=ranks if engine.dp_attention and i.dense_over_replicas is not False else 0,
        head_tp=head_tp,
        head_vocab=m.padded_vocab(head_tp, engine.padding_of_vocab(head_tp)) // head_tp if head_tp else 0,
    )


def _experts_dtype(quantization: Quantization, engine: Engine, peaks: Mapping[str, float], act: str) -> str:
    """The dtype that routed experts multiply in; empty where it is that of other linear layers."""
    own = QUANTIZATIONS[quantization].expert_matmul
    if quantization == "mxfp4_experts" and engine.mxfp8_inputs:
        own = "mxfp8"
    return "" if own is None else own if own in peaks else act


def served_layers(
    scenario: Scenario, dims: ServingDims, measured: Callable[[ServingDims], bool]
) -> tuple[LayerSpec, ...]:
    """The model's layers, with the formats of those parts that the checkpoint keeps otherwise than `dims` say;
    `measured`: whether whole layers of experts in such a format are."""
    specs, m, i = layer_specs(scenario.model), scenario.model, scenario.for_serving
    own = m.checkpoint_modules if is_published(i, m) else None
    if own is None:
        return specs
    made: dict[tuple[LayerSpec, tuple[Quantization, ...]], LayerSpec] = {}
    found = []
    for n, spec in enumerate(specs):
        names = tuple([own.format_of(part, n) or i.quantization for part in PARTS])
        if (spec, names) not in made:
            attention, mlp, shared, experts = names
            of_mlp = shared if isinstance(spec.mlp, Experts) else mlp
            formats = LayerFormats(*(_branch(scenario, dims, one, experts, measured) for one in (attention, of_mlp)))
            made[spec, names] = replace(spec, formats=formats)
        found.append(made[spec, names])
    return tuple(found)


def _branch(
    scenario: Scenario,
    d: ServingDims,
    linear: Quantization,
    experts: Quantization,
    measured: Callable[[ServingDims], bool],
) -> LinearFormat:
    """The format of a branch of a layer, whose routed experts have another one."""
    i, peaks, engine = (
        scenario.for_serving,
        scenario.cluster.gpu.peak_flops_per_s,
        engine_of(scenario.for_serving.engine),
    )
    group = scenario.model.checkpoint_group_size
    dtype, size = linear_format(i, peaks, linear, group=group)
    expert_dtype, expert_size = linear_format(i, peaks, experts, "experts", group)
    expert_linear = _experts_dtype(experts, engine, peaks, d.act) or (d.act if expert_dtype == "int8" else expert_dtype)
    absorbed = _latents(scenario, engine, dtype).absorbed
    tables = _tables(scenario, linear, dtype, experts, expert_linear)
    found = LinearFormat(dtype, size, expert_linear, expert_size, quantizing(scenario, dtype), absorbed, *tables)
    alone = found._replace(weight_bytes=linear_format(i, peaks, experts, group=group)[1])
    return found._replace(one_kernel=measured(d.kept_as(alone)))


def _latents(scenario: Scenario, engine: Engine, linear: str) -> ServedLatents:
    """Which kernels of latent attention an engine has on a scenario's GPUs, whose layers multiply in `linear`; over
    selected keys none that attends to all in the latent's width."""
    own, architecture = engine.latents, scenario.cluster.gpu.kernel_architecture
    graphs, context = prompt_sizes(scenario, engine), own.absorbed_context.get(architecture, 0.0)
    dense, blocks = scenario.model.indexer is None, QUANTIZATIONS[scenario.model.checkpoint_quantization].in_fp8
    absorbed: Absorbed = "wide"
    if linear == "fp8" and blocks:
        widened = architecture in own.widened_absorbed
        absorbed = "narrow" if architecture in own.narrow_absorbed else "widened" if widened else "wide"
    return ServedLatents(
        own.merged_down,
        architecture in own.joins_queries,
        own.merges_context,
        graphs[-1] if dense and own.absorbed_graphs and graphs else 0,
        context if dense else 0.0,
        own.joins_latents,
        absorbed,
        own.merged_index,
        own.cache_apart,
    )


def _balanced(eplb: Eplb, p: Parallelism, gpus_per_node: int) -> BalancedExperts:
    """How experts are placed; over nodes with unequally many of the ranks as if there were one (vLLM,
    distributed/eplb/eplb_state.py: rearrange)."""
    nodes = expert_nodes(p, gpus_per_node)
    return BalancedExperts(eplb.redundant_experts, nodes if p.ep % nodes == 0 else 1)
