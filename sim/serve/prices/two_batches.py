"""Two-batch overlap: an iteration in two halves, of which one computes while the experts' messages of the other travel.

A layer of one half computes attention (prep: everything outside its kernels, with router and shared experts; core: its
kernels) and routed experts, between which tokens are dispatched and combined. One stream computes, one sends, and a
half goes on when its message has arrived. Two ways to take turns, for two halves together:

    in turns: max(prep + core, dispatch) + max(experts, dispatch) + max(experts, combine) + max(prep + core, combine)
    attention apart: 2 · (experts + max(prep, dispatch) + max(core, combine))

In turns: SGLang's prefill (srt/operations_strategy.py, `_compute_moe_deepseek_blog_prefill`), vLLM's dual batch overlap
(v1/worker/ubatching.py: a half yields when it sends). Attention apart: SGLang's decode (`…_blog_decode`, two stages
apart). In iterations with prompts DeepEP's kernels occupy 20 multiprocessors, so that the others compute (SGLang:
`deep_gemm_num_sms`; vLLM: VLLM_DBO_COMM_SMS); its kernels for few tokens occupy none while messages travel. Layers
without such messages, embedding and output layer compute the whole batch.

Drafts are computed in one batch, as in SGLang (`TboForwardBatchPreparer.prepare`: is_draft_worker).

Left out: that halves are cut between sequences, so one may be larger; the first and the last message of an iteration.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from sim.models.dims import ceil_div
from sim.models.layers import Attention, LayerSpec
from sim.models.serving.operators import ServingDims
from sim.ranks.plan import Plan
from sim.serve.prices.host import Host
from sim.serve.prices.iteration_parts import StageLayers, Work
from sim.serve.prices.load import Load
from sim.variants.engines.kernel_facts import TwoBatches


class Prices(Protocol):
    """What is needed of `sim.serve.prices.costs.IterationCosts`, whose module needs this one."""

    plan: Plan
    dims: ServingDims
    specs: tuple[LayerSpec, ...]
    attentions: tuple[Attention, ...]
    stages: tuple[StageLayers, ...]
    host: Host
    two_batches: TwoBatches | None

    def tokens_s(self, work: Work, tokens: int, spec: int = 0, adapters: int = 0) -> float:
        """Seconds of a part that depends on the number of tokens alone."""

    def summed(self, prompts: bool) -> int:
        """1 where an iteration with prompts sends by all-reduces, else 0."""

    def attention_s(self, load: Load, spec: int) -> float:
        """Seconds of a layer's attention."""

    def with_ends(self, seconds: float, stage: StageLayers, tokens: int, samples: int) -> float:
        """Seconds of a stage's layers with embedding and output layer."""

    def one_batch(self, load: Load) -> tuple[float, ...]:
        """Seconds on each stage without overlap."""

    def device_seconds(self, load: Load) -> tuple[float, ...]:
        """Seconds on each stage with it."""


MESSAGE_SMS = 20  # deep_ep/buffer.py: Buffer.num_sms


def is_split(rule: TwoBatches, load: Load) -> bool:
    """Tell whether an engine computes a load in two halves: all replicas that share experts do, or none."""
    least = rule.prompt_tokens if load.prefills else rule.decode_tokens
    return (load.pooled or load.tokens) >= least and load.tokens > 1


def half_of(load: Load) -> Load:
    """The larger half of a load's tokens, without prompts' attention, of which each half has half of the seconds."""
    decodes, pooled = ceil_div(load.decodes, 2), ceil_div(load.pooled, 2)
    return replace(
        load, tokens=ceil_div(load.tokens, 2), decodes=decodes, decode_kv=ceil_div(load.decode_kv, 2), pooled=pooled
    )


def layer_seconds(rule: TwoBatches, sms: int, load: Load, parts: tuple[float, float, float, float, float]) -> float:
    """Seconds of a layer for both halves of a load. `parts`: of one half prep, core, experts, dispatch and combine;
    `sms`: the GPU's multiprocessors."""
    prep, core, experts, dispatch, combine = parts
    if load.prefills:
        slower = sms / max(1, sms - MESSAGE_SMS)
        prep, core, experts = prep * slower, core * slower, experts * slower
    elif rule.attention_apart:
        return 2.0 * (experts + max(prep, dispatch) + max(core, combine))
    attention = prep + core
    return max(attention, dispatch) + max(experts, dispatch) + max(experts, combine) + max(attention, combine)


def in_two_batches(costs: Prices, rule: TwoBatches, load: Load) -> tuple[float, ...]:
    """Seconds of an iteration on every stage's GPU, in two halves that overlap."""
    out = []
    for stage in costs.stages:
        layers = sum([n * _layer(costs, rule, load, i) for i, n in enumerate(stage.layers) if n])
        out.append(costs.with_ends(layers, stage, load.tokens, load.samples))
    return tuple(out)


def _layer(costs: Prices, rule: TwoBatches, load: Load, spec: int) -> float:
    attention = costs.specs[spec].attention
    kind = None if attention is None else costs.attentions.index(attention)
    if not any(costs.specs[spec].serve_exchange(costs.dims, 1)):
        return _all_tokens(costs, load, spec)[0] + (0.0 if kind is None else costs.attention_s(load, kind))
    half, core = half_of(load), 0.0
    if kind is not None:
        prompts = 0.5 * costs.attention_s(replace(load, decodes=0), kind) if load.prefills else 0.0
        core = prompts + costs.attention_s(replace(half, prefills=()), kind)
    whole, routed, tokens = _all_tokens(costs, half, spec)
    dispatch, combine = (costs.tokens_s(work, tokens, spec) for work in (Work.DISPATCH, Work.COMBINE))
    parts = whole - routed, core, routed - dispatch - combine, dispatch, combine
    return layer_seconds(rule, costs.plan.scenario.cluster.gpu.sm_count, load, parts)


def _all_tokens(costs: Prices, load: Load, spec: int) -> tuple[float, float, int]:
    """Return, for a layer without its attention kernels: all its seconds, those of routed experts with their messages,
    and the tokens that choose experts."""
    prompts = load.prompts
    computed = costs.host.padded(load.tokens, prompts)
    tokens = costs.host.routed(load.pooled or load.tokens, prompts, costs.dims.ep > 1)
    summed = costs.summed(prompts)
    routed, padded = (costs.tokens_s(Work.ROUTED, n, spec, summed) for n in (tokens, computed))
    return costs.tokens_s(Work.LAYER, computed, spec, summed) + routed - padded, routed, tokens


def hidden_seconds(costs: Prices, load: Load) -> float:
    """By how much overlap makes an iteration shorter on all stages together; negative where it is longer."""
    if costs.two_batches is None or not is_split(costs.two_batches, load):
        return 0.0
    return sum(costs.one_batch(load)) - sum(costs.device_seconds(load))
