"""Warnings about legal scenarios that serve requests: keys without effect, lengths that nobody said."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.rules.without_effect import SERVED
from sim.inputs.sections import Sections

if TYPE_CHECKING:
    from sim.inputs.workloads import Inference, PoolSize
    from sim.variants.engines.defaults import ServerPool

WAITS = ("batch_wait", "balanced_prompts")
LIMITS = {"tokens": "max_batch_tokens", "running": "max_running_requests"}  # keys by fields of a `Server`


def serving_notes(sections: Sections, written: Parallelism, given: Set[str]) -> Iterator[str]:
    """Return what is legal but worth saying of a section `inference`, and of what serving does not read.

    `written`, `given`: as in `sim.inputs.notes.notes`.
    """
    model, i = sections.model, sections.inference
    if sections.training is None:
        yield from _unserved_notes(written)
        yield from _dispatch_note(sections, written)
    if i is not None:
        yield from _key_notes(i, sections.parallelism, given, model)
        yield from _format_notes(i, model)
        if i.batching == "static":
            yield from _static_notes(sections, i)
        else:
            yield from _share_notes(sections, i, given)
        yield from _engine_note(sections, i)


def _unserved_notes(p: Parallelism) -> Iterator[str]:
    """Keys that serving does not read, where they are written and are not their defaults."""
    usual = Parallelism(dp=p.dp, cp=p.cp, accumulate_in_a_row=False)
    unread = (key for key in Parallelism.model_fields if key in p.model_fields_set - SERVED)
    yield from (
        f"parallelism.{key}: of no effect on serving" for key in unread if getattr(p, key) != getattr(usual, key)
    )


def _dispatch_note(sections: Sections, written: Parallelism) -> Iterator[str]:
    """Return that nothing is sent to experts in the dtype that is written, unless the engine sets it by itself."""
    from sim.inputs.engine_file import all2all_of  # most scenarios are training steps
    from sim.inputs.serving_formats import dispatch_dtype

    i, p, given = sections.inference, sections.parallelism, written.ep_dispatch_dtype
    if i is None or i.disaggregated is not None or p.ep > 1 or given is None:
        return
    if all2all_of(i).gathers and p.sharing_replicas > 1:
        return
    if given != dispatch_dtype(i, sections.cluster.gpu.peak_flops_per_s):
        yield "parallelism.ep_dispatch_dtype: of no effect with ep 1"


def _key_notes(i: Inference, p: Parallelism, given: Set[str], model: ModelConfig) -> Iterator[str]:
    """Keys of `inference` that one replica or this engine does not read, and what an unknown length leaves open."""
    from sim.inputs.engine_file import engine_of  # most scenarios are training steps

    if i.disaggregated is None and p.dp == 1 and i.router not in (None, "round_robin"):
        yield "inference.router: of no effect with dp 1, which is one replica"
    if all(one.sharing_replicas == 1 for one in i.layouts(p)):
        if i.all2all_backend is not None and i.afd is None:
            yield "inference.all2all_backend: of no effect, as no tokens are sent to experts on other replicas"
        for key in ("dense_over_replicas", "head_over_replicas"):
            if getattr(i, key) is not None:
                yield f"inference.{key}: of no effect, as no replicas share experts"
    yield from unknown_length_note(i, given, model)
    engine = engine_of(i.engine)
    if i.chunked_prefill and not engine.mixes(True, i.speculative is not None, p.pp):
        beside = "drafted tokens" if i.speculative is not None else "pipeline stages"
        yield f"inference.chunked_prefill: of no effect; engine {i.engine} mixes no prompts and tokens with {beside}"
    if not i.cuda_graphs and not engine.defaults.graphs_to:
        yield f"inference.cuda_graphs: of no effect with engine {i.engine}, which keeps none"
    for key in WAITS:
        if getattr(i, key) is not None and i.disaggregated is not None:
            yield f"inference.{key}: of no effect with inference.disaggregated, where no prompts run beside tokens"
    if i.batch_wait is not None and not (i.batch_wait.iterations and i.batch_wait.tokens_ratio):
        yield "inference.batch_wait: of no effect unless iterations and tokens_ratio are both above 0"
    for key in ("memory_fraction", "free_fraction"):
        if i.kv_cache.memory_bytes is not None and key in i.kv_cache.model_fields_set:
            yield f"inference.kv_cache.{key}: of no effect beside kv_cache.memory_bytes"
    for key in ("cuda_graph_max_size", "cuda_graph_sizes"):
        if getattr(i, key) is not None and not i.cuda_graphs:
            yield f"inference.{key}: of no effect with cuda_graphs false"
    if i.async_scheduling is False and not engine.overlaps:
        yield f"inference.async_scheduling: of no effect with engine {i.engine}, which does not do so by itself"
    if i.stream_interval > 1 and not engine.host_on("hopper").piece_s:
        yield f"inference.stream_interval: of no effect with engine {i.engine}, whose server's times are not known"
    if i.preemption == "swap" and i.batching != "static" and engine.never_preempts(i.capacity_policy):
        yield f"inference.preemption: of no effect with engine {i.engine}, which never preempts a request"


def _format_notes(i: Inference, model: ModelConfig) -> Iterator[str]:
    """Keys of `inference` about layers that the model lacks."""
    chosen = i.quantization != model.checkpoint_quantization  # else the engine takes it from the checkpoint
    if i.quantization == "mxfp4_experts" and chosen and not model.may_have_experts:
        yield "inference.quantization: mxfp4_experts is of no effect, as the model has no experts"
    if i.eplb is not None and model.moe is not None and model.moe.imbalance == "balanced":
        copies = "; its copies take memory" if i.eplb.redundant_experts else ""
        yield f"inference.eplb: of no effect where all experts are equally popular (model.moe.imbalance){copies}"
    if i.decode_attention is not None and model.mla is not None:
        yield "inference.decode_attention: of no effect with latent attention, whose heads read one latent"


def _static_notes(sections: Sections, i: Inference) -> Iterator[str]:
    """Keys of the scheduler that a static batch does not use, if their values differ from the engine's defaults.

    In a static batch all requests start and end together.
    """
    from sim.inputs.engine_file import engine_of  # most scenarios are training steps
    from sim.inputs.engine_server import server_of

    p, gpu = sections.parallelism, sections.cluster.gpu
    server = server_of(gpu, sections.model, i, p, p.pp)
    whole, longest, engine = not i.chunked_prefill, i.longest(sections.model), engine_of(i.engine)
    own = engine.defaults_on(gpu.kernel_architecture, server, longest, whole)
    unsaid = engine.defaults_on(gpu.kernel_architecture, server._replace(running=None), longest, whole)
    usual = {key: {getattr(own, key)} for key in ("max_running_requests", "max_batch_tokens", "chunked_prefill")}
    usual |= {"prefix_cache": {"none", own.prefix_cache}, "preemption": {"recompute"}}
    usual |= {"capacity_policy": {None}, "schedule_conservativeness": {None}}
    written = [key for key, values in usual.items() if getattr(i, key) not in values]
    for key in (*written, *(key for key in WAITS if getattr(i, key) is not None)):
        what = "limits nothing" if key == "max_running_requests" else "of no effect"  # graphs are captured up to it
        yield f"inference.{key}: {what} with batching static"
    by_server = {own.memory_fraction, unsaid.memory_fraction}
    shares = {"memory_fraction": by_server, "free_fraction": {own.free_fraction, 1.0}}
    for key, alike in shares.items():
        if getattr(i.kv_cache, key) not in alike:
            yield f"inference.kv_cache.{key}: of no effect with batching static, which takes the memory that it needs"
    for key in ("max_tokens", "memory_bytes"):
        if getattr(i.kv_cache, key) is not None:
            yield f"inference.kv_cache.{key}: of no effect with batching static, which takes the memory that it needs"


def _share_notes(sections: Sections, i: Inference, given: Set[str]) -> Iterator[str]:
    """Return that an engine would not start with its own share of the memory beside the limits in `given`."""
    from sim.inputs.engine_file import engine_of  # most scenarios are training steps
    from sim.inputs.engine_server import server_of

    unsaid: dict[str, Any] = {field: None for field, key in LIMITS.items() if key not in given}
    if len(unsaid) == len(LIMITS) or i.kv_cache.memory_bytes is not None:
        return
    said = " and ".join([key for field, key in LIMITS.items() if field not in unsaid])
    gpu, pp, whole = sections.cluster.gpu, sections.parallelism.pp, not i.chunked_prefill
    for key, share, size, pool in _sized(sections.parallelism, i):
        server = server_of(gpu, sections.model, i, size, pp, pool)._replace(**unsaid)
        own = engine_of(i.engine).defaults_on(gpu.kernel_architecture, server, i.longest(sections.model), whole)
        if own.takes_all and share == own.memory_fraction:
            why = f"with this {said} engine {i.engine} leaves no memory for weights and cache, unless this key is given"
            yield f"inference.{key}memory_fraction: {why}; simulated with {share:g}"


def _sized(p: Parallelism, i: Inference) -> Iterator[tuple[str, float, Parallelism | PoolSize, ServerPool]]:
    """The beginning of a key, memory_fraction, size and pool of each kind of server."""
    share, pools = i.kv_cache.memory_fraction, i.disaggregated
    if pools is None:
        yield "kv_cache.", share, p, "all"
        return
    own = pools.prefill.memory_fraction
    yield "disaggregated.prefill.", share if own is None else own, pools.prefill, "prefill"
    yield "kv_cache.", share, pools.decode, "decode"


def unknown_length_note(used: Inference, given: Set[str], model: ModelConfig) -> list[str]:
    """Say that an engine goes by the model's length, where nobody said it and not all keys that follow from it are
    `given`; `used`: the section with what the engine sets by itself."""
    from sim.inputs.engine_file import engine_of  # most scenarios are training steps

    without_budget = {"max_batch_tokens"} if used.batching == "static" else set()
    left = engine_of(used.engine).by_positions(used.chunked_prefill) - given - without_budget
    if used.longest(model) or not left:
        return []
    values = ", ".join([f"{key} {str(getattr(used, key)).lower()}" for key in sorted(left)])
    what = f"engine {used.engine} goes by the length that a model was made for (or inference.max_request_tokens)"
    return [f"model.trained_positions: unknown; {what}; simulated with {values}"]


def _engine_note(sections: Sections, i: Inference) -> Iterator[str]:
    """Return what a measured engine served that this scenario does not."""
    from sim.inputs.engine_file import measured_otherwise, served_now  # most scenarios are training steps

    now = served_now(sections.model, sections.cluster.gpu.name, sections.parallelism.tp, i.quantization)
    if said := measured_otherwise(i.engine, now):
        yield f"inference.engine: {i.engine} was {said}"
