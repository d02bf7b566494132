"""Sizes of one rank of a serving scenario, as its engine keeps and multiplies numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.core.quantization import QUANTIZATIONS
from sim.inputs.engine_file import all2all_of, engine_of
from sim.inputs.serving_formats import cache_dtype, linear_format
from sim.models.moe.eplb import BalancedExperts
from sim.models.moe.routing import expert_nodes
from sim.models.serving.operators import ServedLatents, ServingDims
from sim.serve.prices.fused import experts_sum_norms, norm_in_sum_bytes, quantizing, rope_of, shared_experts
from sim.serve.prices.host import prompt_sizes

if TYPE_CHECKING:
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.scenario import Scenario
    from sim.inputs.serving_keys import Eplb
    from sim.inputs.workloads import Inference
    from sim.variants.engines.record import Engine


def serving_dims(scenario: Scenario) -> ServingDims:
    """Sizes of one rank of a serving scenario.

    A format that the GPU cannot multiply (fp8 or int8 without a peak for it) still saves memory: weights are
    converted on the fly and multiplied in 16 bits, as Marlin kernels do.
    """
    m, p, i = scenario.model, scenario.parallelism, scenario.for_serving
    act, peaks = sixteen_bit(i.precision), scenario.cluster.gpu.peak_flops_per_s
    linear, weight = linear_format(i, peaks)
    form = QUANTIZATIONS[i.quantization]
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
        expert_weight_bytes=form.expert_bytes or weight,
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


def _with_experts(d: ServingDims, scenario: Scenario, engine: Engine) -> ServingDims:
    """With where experts are and what they multiply in, how tokens get to them and back, what runs beside them."""
    p, i = scenario.parallelism, scenario.for_serving
    backend, nodes = all2all_of(i), expert_nodes(p, scenario.cluster.domain_gpus)
    beside, fuses = shared_experts(scenario)
    return replace(
        d,
        expert_linear=_experts_dtype(i, engine, scenario.cluster.gpu.peak_flops_per_s, d.act),
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


def _experts_dtype(i: Inference, engine: Engine, peaks: Mapping[str, float], act: str) -> str:
    """The dtype that routed experts multiply in; empty where it is that of other linear layers."""
    own = QUANTIZATIONS[i.quantization].expert_matmul
    if i.quantization == "mxfp4_experts" and engine.mxfp8_inputs:
        own = "mxfp8"
    return "" if own is None else own if own in peaks else act


def _latents(scenario: Scenario, engine: Engine, linear: str) -> ServedLatents:
    """Which kernels of latent attention an engine has on a scenario's GPUs, whose layers multiply in `linear`; over
    selected keys none that attends to all in the latent's width."""
    own, architecture = engine.latents, scenario.cluster.gpu.kernel_architecture
    graphs, context = prompt_sizes(scenario, engine), own.absorbed_context.get(architecture, 0.0)
    dense, blocks = scenario.model.indexer is None, QUANTIZATIONS[scenario.model.checkpoint_quantization].in_fp8
    return ServedLatents(
        own.merged_down,
        architecture in own.joins_queries,
        own.merges_context,
        graphs[-1] if dense and own.absorbed_graphs and graphs else 0,
        context if dense else 0.0,
        own.joins_latents,
        linear == "fp8" and blocks and architecture in own.narrow_absorbed,
        own.merged_index,
        own.cache_apart,
    )


def _balanced(eplb: Eplb, p: Parallelism, gpus_per_node: int) -> BalancedExperts:
    """How experts are placed; over nodes with unequally many of the ranks as if there were one (vLLM,
    distributed/eplb/eplb_state.py: rearrange)."""
    nodes = expert_nodes(p, gpus_per_node)
    return BalancedExperts(eplb.redundant_experts, nodes if p.ep % nodes == 0 else 1)
