"""Attention and experts on GPUs of their own (attention-FFN disaggregation): seconds of an iteration.

Replicas compute attention; `expert_gpus` GPUs have the routed experts and nothing else. In every layer a token's hidden
state goes out to the GPUs of its experts, and their results come back (M2N messages). An iteration's batch is cut into
m micro-batches, so that experts compute one while attention computes another and the messages of a third travel
(ping-pong pipeline). A layer of one micro-batch takes

    T_a: attention, with norms, router and shared experts, on the replicas' GPUs
    T_d, T_c: messages to the experts, and back
    T_e: the routed experts on the fullest of their GPUs

one after another. Each of the four works for one micro-batch at a time. With T_f, the longest of them, L equal layers
take

    S + (L - 1) * max(S, m * T_f) + (m - 1) * T_f,    S = T_a + T_d + T_e + T_c

For m * T_f >= S a layer of a micro-batch takes T_f, and all take S + T_f * (m * L - 1): the total time of
MegaScale-Infer's ping-pong pipeline (Zhu et al. 2025, arXiv 2504.02263, section 4.1, with messages of T_d = T_c), for
which T_a = T_e = T_f needs m >= 2 * (1 + T_c / T_f): three micro-batches for short messages, four for longer ones.
Step-3's system has the same three stages, attention, network and FFN, and three micro-batches (StepFun 2025, arXiv
2507.19427). With m = 1 it is L * S. Layers of several kinds take max(S, m * T_f) of their own each; layers without
routed experts are computed by the replicas alone.

A message's bytes are those of the busier side, a sending or a receiving GPU: attention's tokens / tp, or the experts'
share of all replicas' tokens, each token as often as the engine sends it (`Experts.exchange`). It takes as long as one
between the first of the attention's GPUs and the last of the experts'. Micro-batches hold equally many tokens.

Left out: receivers of more tokens than the mean, ranks that wait for each other within a layer, launches of each
micro-batch's kernels on an engine without CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from sim.core.program import Comm
from sim.models.dims import ceil_div
from sim.models.layers import Attention, LayerSpec
from sim.models.serving.operators import ServingDims
from sim.ranks.plan import Plan
from sim.serve.prices.host import Host
from sim.serve.prices.iteration_parts import Key, StageLayers, Work
from sim.serve.prices.load import Load
from sim.serve.prices.operator_prices import OperatorPrices, PricedProgram


class Prices(Protocol):
    """What is needed of `sim.serve.prices.costs.IterationCosts`, whose module needs this one."""

    plan: Plan
    prices: OperatorPrices
    dims: ServingDims
    specs: tuple[LayerSpec, ...]
    attentions: tuple[Attention, ...]
    stages: tuple[StageLayers, ...]
    host: Host

    def tokens_s(self, work: Work, tokens: int, spec: int = 0, adapters: int = 0) -> float:
        """Seconds of a part that depends on the number of tokens alone."""

    def attention_s(self, load: Load, spec: int) -> float:
        """Seconds of a layer's attention."""

    def with_ends(self, seconds: float, stage: StageLayers, tokens: int, samples: int) -> float:
        """Seconds of a stage's layers with embedding and output layer."""

    def priced(self, key: Key) -> PricedProgram:
        """A part's price."""


class DisaggregatedExperts(Struct, frozen=True):
    """Experts on GPUs of their own. `experts`: prices of these; `replicas`: that compute attention."""

    experts: Prices
    gpus: int
    replicas: int
    micro_batches: int

    def batches_of(self, load: Load) -> int:
        """Micro-batches of an iteration: no more than it has tokens."""
        return min(self.micro_batches, max(1, load.tokens))

    def tokens_of(self, load: Load) -> int:
        """Tokens of one micro-batch of all replicas, by GPU with experts."""
        return max(1, ceil_div((load.pooled or load.tokens) * self.replicas, self.gpus * self.batches_of(load)))


class LayerParts(NamedTuple):
    """Seconds of a layer of one micro-batch: attention, messages to the experts, experts, messages back."""

    attention: float
    dispatch: float = 0.0
    experts: float = 0.0
    combine: float = 0.0

    @property
    def together(self) -> float:
        """Seconds of a layer of one micro-batch whose four parts run one after the other."""
        return sum(self)

    @property
    def longest(self) -> float:
        """Seconds of the longest of the four parts, for which all micro-batches wait."""
        return max(self)

    def cycle(self, batches: int) -> float:
        """Seconds from one layer of a micro-batch to its next, if `batches` micro-batches take turns."""
        return max(self.together, batches * self.longest)


def pipeline_seconds(layers: list[tuple[int, LayerParts]], batches: int) -> float:
    """Seconds of all layers, so many of each kind, for all micro-batches.

    >>> [pipeline_seconds([(10, LayerParts(2.0, 1.0, 2.0, 1.0))], batches) for batches in (1, 3, 4)]
    [60.0, 64.0, 84.0]
    """
    last = layers[-1][1]
    ends = last.together - last.cycle(batches) + (batches - 1) * last.longest
    return sum([n * parts.cycle(batches) for n, parts in layers]) + ends


def in_micro_batches(costs: Prices, afd: DisaggregatedExperts, load: Load) -> tuple[float, ...]:
    """Seconds of an iteration on the GPUs that compute attention, which wait for the experts."""
    (stage,) = costs.stages
    batches = afd.batches_of(load)
    layers = [(n, layer_parts(costs, afd, load, i)) for i, n in enumerate(stage.layers) if n]
    return (costs.with_ends(pipeline_seconds(layers, batches), stage, load.tokens, load.samples),)


def layer_parts(costs: Prices, afd: DisaggregatedExperts, load: Load, spec: int) -> LayerParts:
    """A layer of one micro-batch."""
    batches, kind = afd.batches_of(load), costs.specs[spec].attention
    prompts = load.prompts
    one = costs.host.padded(ceil_div(load.tokens, batches), prompts)
    attention_s = costs.tokens_s(Work.LAYER, one, spec)
    if kind is not None:
        attention_s += _core_s(costs, load, costs.attentions.index(kind), batches)
    sent = costs.specs[spec].serve_exchange(afd.experts.dims, tokens := afd.tokens_of(load))
    if not any(sent):
        return LayerParts(attention_s)
    attention_s -= costs.tokens_s(Work.ROUTED, one, spec)
    works = Work.ROUTED, Work.DISPATCH, Work.COMBINE
    whole, dispatch, combine = (afd.experts.tokens_s(work, tokens, spec) for work in works)
    busier = max(1.0, ceil_div(load.tokens, batches) / costs.dims.tp / tokens)
    out, back = (_message_s(costs, afd, item.bytes * busier) for (item,) in sent if isinstance(item, Comm))
    return LayerParts(attention_s, out, whole - dispatch - combine, back)


def _core_s(costs: Prices, load: Load, kind: int, batches: int) -> float:
    """Attention's kernels for one micro-batch: a part of the prompts', and of the single tokens."""
    prompts_s = costs.attention_s(replace(load, decodes=0), kind) / batches if load.prefills else 0.0
    decodes, kv = ceil_div(load.decodes, batches), ceil_div(load.decode_kv, batches)
    return prompts_s + costs.attention_s(replace(load, prefills=(), decodes=decodes, decode_kv=kv), kind)


def _message_s(costs: Prices, afd: DisaggregatedExperts, size_bytes: float) -> float:
    last = costs.plan.scenario.parallelism.ranks + afd.gpus - 1
    return costs.prices.pricing.network.send(0, last, size_bytes)
