"""Prices of an iteration's parts that were measured in a real engine.

What was measured of kernels alone (`dense`, `experts`, `mixed`: see `sim.prices.serving_parts`) is the time for which
they occupy the GPU. An iteration's is their sum: embedding and layers by its tokens, with those that pad them to a CUDA
graph's size; the head by its samples; attention, once a layer, of prompts and single tokens together; experts by tokens
and by how many experts these choose; messages between ranks as everywhere. What the host adds, launching kernels one by
one or a graph of them, follows from the scenario's engine (`sim.serve.prices.host`), as for estimated kernels. This is
how LLMServingSim 2 adds up its tables (casys-kaist/LLMServingSim, serving/core/trace_generator.py: `_emit_sequence`,
`_lookup_attention_with_skew`; docs, "Trace generation": profiled latencies are used directly), whose kernels are timed
on the GPU without their launches (profiler/core/hooks/timings.py: `cuda_time_us` of vLLM's `layerwise_profile`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.core.dtypes import sixteen_bit
from sim.core.program import Compute, Program
from sim.inputs.serving_formats import cache_dtype
from sim.models.layers import LayerSpec
from sim.models.layers.experts import Experts
from sim.models.moe.fullest import fullest_rank
from sim.models.serving.operators import ServingDims
from sim.prices.cost import REPEAT_UNCERTAINTY
from sim.prices.profile import Profile
from sim.prices.reference_gpu import reference_gpu
from sim.prices.serving_parts import SPLIT, MeasuredParts, measured_models, measured_parts, model_key
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.load import Load
from sim.serve.prices.operator_prices import OperatorPrices, PricedProgram

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from topology.spec import GpuSpec


def variant_of(scenario: Scenario) -> str:
    """The scenario's number formats, as keys of measured kernels name them; empty for formats that none has."""
    i, m = scenario.for_serving, scenario.model
    if i.quantization != "none":
        return ""
    act, kept = sixteen_bit(i.precision), i.kv_cache.dtype or cache_dtype(i, scenario.cluster.gpu, m)
    return act if kept == act else f"{act}-kv{kept}"


def measured_for(scenario: Scenario, profile: Profile) -> MeasuredParts | None:
    """The profile's measured parts of the scenario's iterations; None where it has none of this model in this layout,
    number format and GPU."""
    p, inference = scenario.parallelism, scenario.for_serving
    if p.ranks != p.tp or inference.attention != "fused":  # the measured engines' is fused
        return None
    if found := measured_parts(profile, scenario.model, p.tp):
        return found
    variant = variant_of(scenario)
    if not variant or not _same_gpu(profile, scenario.cluster.gpu):
        return None
    return measured_parts(profile, scenario.model, p.tp, variant)


def _same_gpu(profile: Profile, gpu: GpuSpec) -> bool:
    """Whether a GPU is the one that was measured, or as many of its multiprocessors on a board with its memory."""
    own = reference_gpu(profile, gpu)
    alike = own.same_multiprocessors(gpu) and own.sm_count == gpu.sm_count
    return own == gpu or (alike and own.memory_bandwidth_bytes_per_s == gpu.memory_bandwidth_bytes_per_s)


def not_measured(scenario: Scenario, profile: Profile) -> list[str]:
    """Say that a profile has measured iterations, but none of the scenario's; nothing if it has none at all."""
    measured = sorted(measured_models(profile))
    tp, variant = scenario.parallelism.tp, variant_of(scenario)
    found = f"{model_key(scenario.model, tp, variant)} on {scenario.parallelism.ranks} of {scenario.cluster.gpu.name}"
    on = f" on {profile.reference}" if profile.reference else ""
    said = (
        f"calibration: {profile.name} has iterations that were measured{on} of: {'; '.join(measured)}. This scenario's "
        f"is none of them ({found}), so its kernels are estimated"
    )
    return [said] if measured else []


def attention_s(measured: MeasuredParts, load: Load) -> float:
    """Seconds of one layer's attention of all prompts and single tokens together."""
    n = load.decodes
    if not n:
        return measured.joint(load.prefills, 0, 0.0)
    mean = load.decode_kv / n
    seconds = measured.joint(load.prefills, n, mean)
    shortest, longest = load.lengths
    if longest <= shortest:
        return seconds
    chunk = sum([q * alike for q, _, alike in load.prefills])
    beyond = measured.unequal(chunk, n, (mean - shortest) / (longest - shortest))
    if not beyond:
        return seconds
    return seconds + beyond * max(0.0, measured.joint(load.prefills, n, longest) - seconds)


def priced_as_measured(
    measured: MeasuredParts,
    key: Key,
    spec: LayerSpec,
    d: ServingDims,
    prices: OperatorPrices,
    program: Callable[[Key], Program],
) -> PricedProgram:
    """Price a part by a real engine's measured parts, which hold the embedding in those of the model's layers, and what
    of its `program` was not measured as everywhere. `spec`: the layer, for a layer's parts."""
    seconds, part = 0.0, _experts(measured, spec, d) if key.work in (Work.LAYER, Work.ROUTED) else ""
    if key.work is Work.PREFILL:
        seconds = measured.seconds("prefill", key.a, key.b) * key.c
    elif key.work is Work.DECODE and key.c > 1:
        seconds = measured.check(key.a, key.b, key.c)
    elif key.work is Work.DECODE:
        seconds = measured.seconds("decode", key.a, key.b)
    elif key.work is Work.HEAD:
        seconds = measured.head(key.a)
    elif key.work is Work.LAYER:
        seconds = measured.rest(key.a) / d.model.layers
    if part and isinstance(spec.mlp, Experts):
        rows, chosen = fullest_rank(spec.mlp.moe, key.a, d.ep, d.eplb)
        seconds += measured.seconds(part, rows / spec.mlp.moe.top_k, chosen)
    seconds *= prices.slowdown
    shares = {(key.work.value, "measured", REPEAT_UNCERTAINTY): seconds}
    if not measured.kernels_alone or key.work in (Work.PREFILL, Work.DECODE):
        return PricedProgram(seconds, 0.0, shares)
    beside = prices.priced(_not_measured(key, spec, d, program(key), part))
    return PricedProgram(seconds + beside.seconds, beside.comm_s, {**shares, **beside.shares})


def _not_measured(key: Key, spec: LayerSpec, d: ServingDims, program: Program, part: str) -> Program:
    """What of a part's program no measured kernel is: messages between ranks, and experts if no `part` has them."""
    messages = tuple([item for item in program if not isinstance(item, Compute)])
    if part or not isinstance(spec.mlp, Experts):
        return messages
    if key.work is Work.LAYER:
        own = [item for item in spec.mlp.serve(spec.mlp_dims(d), key.a) if isinstance(item, Compute)]
        return (*messages, *own)
    return program if key.work is Work.ROUTED else messages


def _experts(measured: MeasuredParts, spec: LayerSpec, d: ServingDims) -> str:
    """The measured part that a layer's experts are, whole or split as on this rank; empty if there is none."""
    part = "experts" if d.expert_tp == 1 else SPLIT if d.expert_tp == d.tp else ""
    return part if part in measured.points and isinstance(spec.mlp, Experts) else ""
