"""Seconds of one serving iteration on every pipeline stage.

An iteration is a `Load`: tokens in all, prompt chunks, single tokens with the length of what they see, sequences
that need logits. Its price is the sum of parts that are priced once and kept. Between kept sizes prices are
linear: above 64 tokens sixteen sizes an octave, for decode attention four lengths an octave; a run of decode steps
is therefore exactly the sum of its steps, however it is grouped. Attention of prompt chunks is priced at two lengths an
octave, of the chunk and of what is cached before it (`_chunk_s`).
"""

from __future__ import annotations

import math

from msgspec import Struct, field
from msgspec.structs import replace

from sim.core.program import Program
from sim.inputs.engine_file import all2all_of, engine_of
from sim.inputs.scenario import Scenario
from sim.inputs.serving_keys import ServedLora
from sim.models.dims import ceil_div
from sim.models.layers import Attention, LayerSpec
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.serving.adapters import adapter_products
from sim.models.serving.context_parallel import split_decode, split_prefill
from sim.models.serving.operators import ServingDims, embedding_tokens, head_samples
from sim.prices.coefficients import PriceOptions
from sim.prices.profile import Profile
from sim.prices.rank_prices import Pricing
from sim.prices.serving_parts import MeasuredParts
from sim.prices.shared_cores import costs_of
from sim.ranks.plan import Plan, make_plan
from sim.serve.prices.afd import DisaggregatedExperts, in_micro_batches
from sim.serve.prices.dims import served_layers, serving_dims
from sim.serve.prices.host import Host, host_of, with_draft
from sim.serve.prices.iteration_parts import Key, StageLayers, Work
from sim.serve.prices.kept_sizes import LENGTHS, below, chunks_around, prefill_parts, sizes_around
from sim.serve.prices.load import Load
from sim.serve.prices.measured_iterations import attention_s, measured_for, priced_as_measured
from sim.serve.prices.operator_prices import OperatorPrices, PricedProgram, operator_prices_of
from sim.serve.prices.stages import attentions_of, experts_measured, launched_kernels, launched_pieces, stages_of
from sim.serve.prices.tiled_attention import slides, tiled, tiled_attentions
from sim.serve.prices.two_batches import in_two_batches, is_split
from sim.serve.prices.weight_offload import Streamed, streamed_weights
from sim.serve.scheduling.speculation import draft_of, drafting, joins_states
from sim.variants.engines.kernel_facts import TwoBatches
from topology.network import Network


class IterationCosts(Struct):
    """Prices of iterations under one scenario and profile; see `stage_seconds`. `draft`: of a draft's own iterations on
    the last stage; `of_stages`: of each stage alone, where some have slow ranks or links."""

    plan: Plan
    prices: OperatorPrices
    dims: ServingDims
    specs: tuple[LayerSpec, ...]
    attentions: tuple[Attention, ...]
    stages: tuple[StageLayers, ...]
    overhead_s: float  # of the engine's own work between iterations, where it was measured
    host: Host
    measured: MeasuredParts | None = None
    lora: ServedLora | None = None
    offloaded: tuple[Streamed, ...] = ()  # weights in host memory, by stage
    two_batches: TwoBatches | None = None  # how two halves of a batch overlap
    draft: IterationCosts | None = None
    later: IterationCosts | None = None  # of a draft's passes in which it reads no hidden states of the model
    afd: DisaggregatedExperts | None = None  # experts on GPUs of their own
    of_stages: tuple[IterationCosts, ...] = ()
    tiled_attentions: tuple[bool, ...] = ()  # of `attentions`; empty until asked for
    priced_programs: dict[Key, PricedProgram] = field(default_factory=dict)
    without_attention: dict[tuple[int, int, bool], tuple[float, ...]] = field(default_factory=dict)
    decode_lines: dict[tuple[Work, int, int, int, int], tuple[float, float]] = field(default_factory=dict)
    chunk_s: dict[tuple[int, int, int, int], float] = field(default_factory=dict)  # by `_chunk_s`' arguments
    interpolated_s: dict[tuple[Work, int, int, int], float] = field(default_factory=dict)  # by `tokens_s`' arguments
    kept_s: dict[tuple[Work, int, int, int, int], float] = field(default_factory=dict)  # of `priced_programs`

    def with_prices(
        self, prices: OperatorPrices, stages: tuple[StageLayers, ...], draft: IterationCosts | None
    ) -> IterationCosts:
        """Return the same iterations at other prices, with empty caches."""
        same = self.dims, self.specs, self.attentions, stages, self.overhead_s, self.host, self.measured
        later = None if self.later is None else self.later.with_prices(prices, stages, None)
        return IterationCosts(self.plan, prices, *same, self.lora, self.offloaded, self.two_batches, draft, later)

    def stage_seconds(self, load: Load) -> tuple[float, ...]:
        """Seconds of the iteration on every stage, without messages between stages."""
        if self.of_stages:
            return tuple([own.stage_seconds(load)[i] for i, own in enumerate(self.of_stages)])
        load = self.own_share(load)
        each = list(zip(self.device_seconds(load), self.draft_seconds(load), self.copied_s, strict=True))
        return self.host.stage_seconds(each, load)

    @property
    def copied_s(self) -> tuple[float, ...]:
        """Seconds for which every stage copies weights in each iteration, beside all that its GPU computes."""
        return tuple([own.beside_s for own in self.offloaded]) or (0.0,) * len(self.stages)

    def draft_seconds(self, load: Load) -> tuple[float, ...]:
        """Seconds for which every stage's GPU drafts, or waits for drafts, after an iteration: the last one's."""
        own = self.host.drafted_each(self.drafting_device_s(load), load) if self.draft else [self.host.search_s(load)]
        return (0.0,) * (len(self.stages) - 1) + (sum(own),)

    def drafting_device_s(self, load: Load) -> list[float]:
        """Seconds for which a GPU computes in each of the draft's passes."""
        return [self.drafting_costs(own).stage_seconds(own)[0] for own in self.drafted(load)]

    def drafting_costs(self, load: Load) -> IterationCosts:
        """The prices of one of the draft's passes."""
        assert self.draft is not None
        return self.draft if self.draft.later is None or joins_states(load) else self.draft.later

    def drafted(self, load: Load) -> list[Load]:
        """What the draft computes beside an iteration."""
        speculative, on_prompts = self.plan.scenario.for_serving.speculative, self.host.engine.drafts_on_prompts
        return [] if self.draft is None or speculative is None else drafting(load, speculative, on_prompts)

    def device_seconds(self, load: Load) -> tuple[float, ...]:
        """What a rank's own share of an iteration takes on every stage's GPU, without its host, its draft and the
        copies beside it."""
        if self.afd is not None:
            return in_micro_batches(self, self.afd, load)
        if self.two_batches is not None and is_split(self.two_batches, load):
            return in_two_batches(self, self.two_batches, load)
        return self.one_batch(load)

    def one_batch(self, load: Load) -> tuple[float, ...]:
        """As `device_seconds`, where no halves of the batch overlap."""
        rest = self._without_attention_s(load.tokens, load.samples, load.prompts)
        if load.pooled:
            rest = tuple([seconds + self._routed_more_s(load, s) for seconds, s in zip(rest, self.stages, strict=True)])
        if load.adapters:
            rest = tuple([seconds + self._adapters_s(load, s) for seconds, s in zip(rest, self.stages, strict=True)])
        attentions = [self.attention_s(load, i) for i in range(len(self.attentions))]
        device_s = tuple([r + s.attention_s(attentions) for r, s in zip(rest, self.stages, strict=True)])
        if self.offloaded:
            device_s = tuple([seconds + own.read_s for own, seconds in zip(self.offloaded, device_s, strict=True)])
        return device_s

    def own_share(self, load: Load) -> Load:
        """The load with tokens and samples of one of the ranks over which they are split; attention's sizes stay."""
        cp = self.dims.cp
        if cp == 1:
            return load
        tokens = ceil_div(load.tokens - load.decodes, cp) + ceil_div(load.decodes, cp)
        return replace(load, tokens=tokens, samples=ceil_div(load.samples, cp), adapted=ceil_div(load.adapted, cp))

    def _without_attention_s(self, tokens: int, samples: int, prompts: bool) -> tuple[float, ...]:
        """Seconds of all but attention on every stage's GPU, kept."""
        key = tokens, samples, prompts
        if (rest := self.without_attention.get(key)) is None:
            rest = self.without_attention[key] = self._priced_without_attention(*key)
        return rest

    def _routed_more_s(self, load: Load, stage: StageLayers) -> float:
        """What experts take more for the tokens of all replicas than if all had as many as this one."""
        prompts, split = load.prompts, self.dims.ep > 1
        of_all, own = (self.host.routed(n, prompts, split) for n in (load.pooled, load.tokens))
        summed = self.summed(prompts)
        return sum([n * self._routed_difference_s(of_all, own, i, summed) for i, n in enumerate(stage.layers) if n])

    def _routed_difference_s(self, tokens: int, than: int, spec: int, summed: int = 0) -> float:
        if tokens == than:
            return 0.0
        return self.tokens_s(Work.ROUTED, tokens, spec, summed) - self.tokens_s(Work.ROUTED, than, spec, summed)

    def summed(self, prompts: bool) -> int:
        """1 where an iteration with prompts sends by all-reduces, else 0: a size of its layers' keys."""
        return int(prompts and self.dims.prompt_sums[0])

    def _adapters_s(self, load: Load, stage: StageLayers) -> float:
        """What LoRA adapters add to a stage."""
        kinds = enumerate(stage.layers)
        return sum([n * self.tokens_s(Work.ADAPTERS, load.adapted, i, load.adapters) for i, n in kinds if n])

    def _priced_without_attention(self, tokens: int, samples: int, prompts: bool) -> tuple[float, ...]:
        """Seconds of what depends on the numbers of tokens and samples alone, on every stage."""
        kinds, summed = range(len(self.specs)), self.summed(prompts)
        computed, routed = self.host.padded(tokens, prompts), self.host.routed(tokens, prompts, self.dims.ep > 1)
        layers = [
            self.tokens_s(Work.LAYER, computed, i, summed) + self._routed_difference_s(routed, computed, i, summed)
            for i in kinds
        ]
        out = []
        for s in self.stages:
            seconds = sum([count * each for count, each in zip(s.layers, layers, strict=True)])
            out.append(self.with_ends(seconds, s, tokens, samples))
        return tuple(out)

    def with_ends(self, seconds: float, stage: StageLayers, tokens: int, samples: int) -> float:
        """Seconds of a stage's layers with those of the embedding and the output layer, where it has them."""
        if stage.embedding:
            seconds += self.overhead_s + self.tokens_s(Work.EMBEDDING, tokens)
        if stage.head and samples:
            seconds += self.tokens_s(Work.HEAD, samples)
        return seconds

    @property
    def tells_lengths(self) -> bool:
        """Whether an iteration's price depends on how unequal its single tokens' caches are."""
        return self.measured is not None and self.measured.tells_lengths

    def decode_run(self, decodes: int, first_kv: int, steps: int, lengths: tuple[int, int] = (0, 0)) -> list[float]:
        """Seconds of `steps` iterations of `decodes` single tokens on one stage, the first seeing `first_kv` in all,
        between the two `lengths` each; nothing is drafted in a run."""
        if self.afd is not None or self.tells_lengths:
            load = Load(decodes, decodes, first_kv, (), decodes, lengths=lengths)
            return [self.stage_seconds(load.later(n))[0] for n in range(steps)]
        own = ceil_div(decodes, self.dims.cp)
        base, alone = self._without_attention_s(own, own, False)[0], Work.DECODE
        seconds: list[float] = []
        while len(seconds) < steps:
            kv = first_kv + decodes * len(seconds)
            low = below(LENGTHS, kv / decodes)
            # Prices are linear until the mean length comes to the next kept one.
            until = steps - len(seconds)
            if low + 1 < len(LENGTHS):
                until = min(until, ceil_div(LENGTHS[low + 1] * decodes - kv, decodes))
            length, sums = LENGTHS[low], range(kv, kv + decodes * until, decodes)
            # The very sums of `stage_seconds`, in its order: an iteration ends at the same bit, alone or in a run.
            if len(self.stages[0].attentions) == 1:
                (layers,), (first, slope) = self.stages[0].attentions, self._decode_line(alone, 0, decodes, low, 1)
                seconds += [base + layers * (first + slope * (k / decodes - length)) for k in sums]
                continue
            attention = [0.0] * until
            for i, layers in enumerate(self.stages[0].attentions):
                first, slope = self._decode_line(alone, i, decodes, low, 1)
                beyond = zip(attention, sums, strict=True)
                attention = [a + layers * (first + slope * (k / decodes - length)) for a, k in beyond]
            seconds += [base + a for a in attention]
        if self.offloaded:
            seconds = [s + self.offloaded[0].read_s for s in seconds]
        return self.host.seconds_each(0, seconds, Load(own, decodes, samples=own), copied_s=self.copied_s[0])

    def send_s(self, stage: int, tokens: int) -> float:
        """Seconds to hand the residual stream of `tokens` from a stage to the next."""
        own = self.of_stages[stage] if self.of_stages else self
        size = ceil_div(tokens, self.dims.cp) * self.dims.stream_width * self.dims.act_bytes
        return own.prices.pricing.send(own.stages[stage].rank, own.stages[stage + 1].rank, size).seconds

    def tokens_s(self, work: Work, tokens: int, spec: int = 0, adapters: int = 0) -> float:
        """Seconds of so many tokens, between the kept sizes around them."""
        found = self.interpolated_s.get((work, spec, tokens, adapters))
        if found is None:
            # Measured sizes are closer to each other, and time jumps between them.
            low, high, share = (tokens, tokens, 0.0) if self.measured is not None else sizes_around(tokens)
            found = self._kept_s(work, spec, low, adapters)
            if share:
                found += share * (self._kept_s(work, spec, high, adapters) - found)
            self.interpolated_s[work, spec, tokens, adapters] = found
        return found

    def _kept_s(self, work: Work, spec: int, a: int, b: int, c: int = 0) -> float:
        """Seconds at kept sizes; without making a key for each question, of which there are ten thousands."""
        found = self.kept_s.get((work, spec, a, b, c))
        if found is None:
            found = self.kept_s[work, spec, a, b, c] = self.priced(Key(work, spec, a, b, c)).seconds
        return found

    def attention_s(self, load: Load, spec: int) -> float:
        """Seconds of a layer's attention."""
        if self.attends_jointly(load):
            assert self.measured is not None
            return attention_s(self.measured, load) * self.prices.slowdown
        seconds = 0.0
        for tokens, cached, equal, part in prefill_parts(load.prefills):
            seconds += part * self._chunk_s(spec, tokens, cached, equal)
        if load.decodes:
            mean = load.decode_kv / load.decodes
            low, work = below(LENGTHS, mean), self.decode_work(load.prompts, load.queries, spec)
            first, slope = self._decode_line(work, spec, load.decodes, low, load.queries)
            seconds += first + slope * (mean - LENGTHS[low])
        return seconds

    def attends_jointly(self, load: Load) -> bool:
        """Whether attention of all prompts and single tokens of such an iteration was measured together."""
        measured = self.measured
        if measured is None or not measured.mixes or load.queries > 1:
            return False
        return load.prompts or measured.tells_lengths

    def _chunk_s(self, spec: int, tokens: int, cached: int, equal: int) -> float:
        """Attention of a prompt chunk behind `cached` tokens, one of `equal`, between the kept sizes around it: linear
        in what is cached, as its products are, and a power of the chunk, for these grow with its square or less."""
        found = self.chunk_s.get((spec, tokens, cached, equal))
        if found is None:
            low, high, between = chunks_around(tokens)
            found = self._chunk_of_kept_size_s(spec, low, cached, equal)
            if between:
                share = math.log(tokens / low) / math.log(high / low)
                found = found ** (1.0 - share) * self._chunk_of_kept_size_s(spec, high, cached, equal) ** share
            self.chunk_s[spec, tokens, cached, equal] = found
        return found

    def _chunk_of_kept_size_s(self, spec: int, tokens: int, cached: int, equal: int) -> float:
        """Attention of a prompt chunk of a kept size behind `cached` tokens, between the kept sizes around these."""
        low, high, share = chunks_around(cached)
        first = self._kept_s(Work.PREFILL, spec, tokens, low, equal)
        if not share:
            return first
        return (1.0 - share) * first + share * self._kept_s(Work.PREFILL, spec, tokens, high, equal)

    def decode_work(self, prompts: bool, queries: int, spec: int) -> Work:
        """How single tokens attend, beside prompts or not, each sequence with so many."""
        if self.measured is not None or not (prompts or queries > 1 or slides(self.attentions[spec])):
            return Work.DECODE
        if not self.tiled_attentions:
            self.tiled_attentions = tiled_attentions(self.plan.scenario, self.dims, self.attentions)
        return Work.TILED if self.tiled_attentions[spec] else Work.DECODE

    def _decode_line(self, work: Work, spec: int, decodes: int, low: int, queries: int) -> tuple[float, float]:
        """Single tokens' attention from the kept length number `low` to the next: seconds there, and for each token."""
        found = self.decode_lines.get((work, spec, decodes, low, queries))
        if found is None:
            at = [self.priced(Key(work, spec, decodes, k, queries)).seconds for k in LENGTHS[low : low + 2]]
            slope = (at[1] - at[0]) / (LENGTHS[low + 1] - LENGTHS[low]) if len(at) > 1 else 0.0
            found = self.decode_lines[work, spec, decodes, low, queries] = at[0], slope
        return found

    def priced(self, key: Key) -> PricedProgram:
        """A part's price, kept."""
        found = self.priced_programs.get(key)
        if found is None:
            if self.measured is not None and key.work is not Work.ADAPTERS:
                spec = self.specs[key.spec]
                found = priced_as_measured(self.measured, key, spec, self.dims, self.prices, self._program)
            elif key.work is Work.TILED:
                alone = self.priced(key._replace(work=Work.DECODE))
                found = tiled(key, self.attentions[key.spec], self.dims, self.prices, alone)
            else:
                found = self.prices.priced(self._program(key))
            self.priced_programs[key] = found
        return found

    def _attention_dims(self, number: int) -> ServingDims:
        """Sizes with the format of the weights of an attention's first layer: its kernels of keys absorb some."""
        attention = self.attentions[number]
        return next(spec for spec in self.specs if spec.attention == attention).attention_dims(self.dims)

    def _program(self, key: Key) -> Program:
        if self.dims.cp > 1 and key.work in (Work.PREFILL, Work.DECODE):
            attention = self.attentions[key.spec]
            assert isinstance(attention, GroupedQueryAttention), "refused by sim.inputs.rules.layout"
            if key.work is Work.PREFILL:
                return split_prefill(self.dims, attention, key.c, key.a, key.a + key.b)
            return split_decode(self.dims, attention, key.a, key.b)
        if key.work is Work.PREFILL:
            return self.attentions[key.spec].prefill(self._attention_dims(key.spec), key.c, key.a, key.a + key.b)
        if key.work is Work.DECODE:
            return self.attentions[key.spec].decode(self._attention_dims(key.spec), key.a, key.b, key.c)
        if key.work is Work.ADAPTERS:
            assert self.lora is not None
            sizes = self.lora.targets, self.lora.rank, key.a, key.b
            return adapter_products(self.dims, self.specs[key.spec], *sizes)
        if key.work is Work.EMBEDDING:
            return embedding_tokens(self.dims, key.a)
        if key.work is Work.HEAD:
            return head_samples(self.dims, key.a)
        dims = replace(self.dims, prompts=True) if key.b else self.dims
        if key.work is Work.ROUTED:
            return self.specs[key.spec].serve_routed(dims, key.a)
        if key.work in (Work.DISPATCH, Work.COMBINE):
            return self.specs[key.spec].serve_exchange(self.dims, key.a)[key.work is Work.COMBINE]
        return self.specs[key.spec].serve_tokens(dims, key.a)


def iteration_costs(scenario: Scenario, profile: Profile, specs: tuple[LayerSpec, ...] | None = None) -> IterationCosts:
    """Prices for `scenario` out of `profile`, of the model's layers or of these in their place."""
    plan, inference = make_plan(scenario), scenario.for_serving
    engine = engine_of(inference.engine)
    release = f"{engine.product} {'.'.join(map(str, engine.since))}"
    # Serving libraries run all experts at once.
    costs = costs_of(scenario, profile, PriceOptions(group_launch=False, engine=release))
    measured = measured_for(scenario, profile)
    dims = serving_dims(scenario)
    dims = replace(dims, one_kernel=experts_measured(profile, dims))
    specs = specs or served_layers(scenario, dims, lambda own: experts_measured(profile, own))
    kinds, attentions = tuple(dict.fromkeys(specs)), attentions_of(specs)
    stages = stages_of(plan, specs, kinds, attentions)
    launched = tuple([launched_kernels(dims, kinds, attentions, s, inference.lora) for s in stages])
    pieces = tuple([launched_pieces(dims, attentions, s) for s in stages])
    host, draft = host_of(scenario, engine, launched, pieces), _draft_costs(scenario, profile)
    host = host if draft is None else with_draft(host, draft.host, (draft.later or draft).host, scenario)
    pricing = Pricing(plan, costs, Network(scenario.cluster))
    offload = inference.weight_offload
    offloaded = [streamed_weights(offload, dims, kinds, s.layers, pricing.network) for s in stages] if offload else []
    return IterationCosts(
        plan,
        operator_prices_of(pricing, profile, dims, host),
        dims,
        specs=kinds,
        attentions=attentions,
        stages=stages,
        overhead_s=0.0 if measured is None else measured.engine,
        host=host,
        measured=measured,
        lora=inference.lora,
        offloaded=tuple(offloaded),
        two_batches=engine.two_batches if inference.two_batch_overlap else None,
        draft=draft,
        afd=_disaggregated_experts(scenario, profile),
    )


def _draft_costs(scenario: Scenario, profile: Profile) -> IterationCosts | None:
    """Prices of the draft's passes; None where nothing is drafted."""
    draft, speculative = draft_of(scenario), scenario.for_serving.speculative
    if draft is None or speculative is None:
        return None
    costs = iteration_costs(draft[0], profile, draft[1])
    if speculative.hidden_states > 1 and (later := draft_of(scenario, joins=False)) is not None:
        costs.later = iteration_costs(later[0], profile, later[1])
    return costs


def _disaggregated_experts(scenario: Scenario, profile: Profile) -> DisaggregatedExperts | None:
    """Experts on GPUs of their own: as if each of these had its part of all tokens."""
    inference, p = scenario.for_serving, scenario.parallelism
    if (afd := inference.afd) is None:
        return None
    n = afd.expert_gpus
    own = p.model_copy(update={"tp": 1, "dp": n, "ep": n, "expert_tp": 1, "shard_size": n})
    alone = inference.model_copy(update={"afd": None, "all2all_backend": all2all_of(inference).name})
    costs = iteration_costs(scenario.unchecked_copy(update={"parallelism": own, "inference": alone}), profile)
    return DisaggregatedExperts(costs, n, p.dp, afd.micro_batches)
