"""A pool: equal replicas of the model, with their prices and caches."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import cached_property

from msgspec import Struct

from sim.inputs.engine_file import engine_of
from sim.inputs.scenario import Scenario
from sim.inputs.serving_keys import HASHED_TOKENS
from sim.inputs.workloads import Inference, PoolSize, Speculative
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.prices.profile import Profile
from sim.serve.cache.hashed_prefixes import HashedHostCache, HashedKvCache
from sim.serve.cache.host_copies import Link
from sim.serve.cache.kv_cache import HostCache, KvCache
from sim.serve.cache.tiers import cache_tiers
from sim.serve.memory import Capacity, adapter_bytes, cache_capacity, iteration_tokens
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.faults import replica_costs
from sim.serve.prices.iteration_shares import loads_of, priced_together
from sim.serve.prices.operator_prices import PricedProgram
from sim.serve.replicas.replica import Replica
from sim.serve.requests import Request
from sim.serve.scheduling.adapters import AdapterSlots
from sim.serve.scheduling.prompt_waits import BatchWait
from sim.serve.scheduling.reserved_output import LESS_CONSERVATIVE, ReservedOutput
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Limits, Sequence
from sim.serve.scheduling.sglang_scheduler import SglangScheduler
from sim.serve.scheduling.speculation import Acceptance
from sim.variants.engines.record import Engine

UNLIMITED = 1 << 60


class Pool(Struct, frozen=True, eq=False, dict=True):
    """Equal replicas. `name`: all, prefill or decode; `first_rank`: of its ranks among those of the cluster."""

    name: str
    scenario: Scenario
    costs: IterationCosts
    capacity: Capacity
    first_rank: int
    replicas: tuple[Replica, ...]

    @property
    def prices(self) -> list[IterationCosts]:
        """Prices of every replica, which may have slow ranks or links."""
        return [replica_costs(self.costs, self.scenario, r.index) for r in self.replicas]

    @cached_property
    def priced(self) -> PricedProgram:
        """What all iterations cost."""
        return priced_together(self.costs, loads_of([i for r in self.replicas for i in r.iterations]))

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        p = self.scenario.parallelism
        return p.ranks // p.dp

    def first_rank_of(self, replica: Replica, stage: int = 0) -> int:
        """The first rank of a replica's stage, among the cluster's."""
        strides = self.costs.plan.mesh.strides
        return self.first_rank + replica.index * strides["dp"] + stage * strides["pp"]


def experts_span(scenario: Scenario) -> int:
    """How many replicas share experts, and so wait for each other; 1 where each has all of them, or (a simplification)
    where a pipeline's iterations overlap."""
    p = scenario.parallelism
    if scenario.for_serving.afd is not None:
        return p.dp
    return p.sharing_replicas if p.pp == 1 else 1


def whole_pool(
    scenario: Scenario,
    profile: Profile,
    sequences: list[Sequence],
    held_bytes: float = 0.0,
    costs: IterationCosts | None = None,
) -> Pool:
    """A scenario's dp replicas, each of which does all of a request; sequences are dealt out in turn."""
    dp = scenario.parallelism.dp
    scaled = scenario.for_serving.autoscaling is not None  # then a replica without requests takes GPUs, too
    dealt = [sequences[i::dp] for i in range(dp if scaled else min(dp, len(sequences)))]
    return _pool("all", scenario, profile, [s.request for s in sequences], 0, dealt, held_bytes, costs)


def prefill_pool(scenario: Scenario, profile: Profile, sequences: list[Sequence], size: PoolSize) -> Pool:
    """Replicas that compute prompts and hand them over."""
    prompts = [s.request._replace(output_tokens=1) for s in sequences]
    pool = _pool("prefill", _sized(scenario, size), profile, prompts, 0, [[] for _ in range(size.replicas)])
    for replica in pool.replicas:
        replica.scheduler.hands_over = True
    return pool


def decode_pool(
    scenario: Scenario, profile: Profile, sequences: list[Sequence], size: PoolSize, first_rank: int
) -> Pool:
    """Replicas that take computed prompts over and add tokens."""
    sized, requests = _sized(scenario, size), [s.request for s in sequences]
    given = sized.for_serving
    untiered = given.kv_cache.model_copy(update={"tiers": None})  # prefixes are the other pool's
    engine = engine_of(given.engine)
    changes: dict[str, object] = {"prefix_cache": "none", "kv_cache": untiered}
    own = given.model_copy(update=changes | ({"preemption": "swap"} if engine.handing_over.swaps else {}))
    alone = sized.unchecked_copy(update={"inference": own})
    pool = _pool("decode", alone, profile, requests, first_rank, [[] for _ in range(size.replicas)])
    for replica in pool.replicas:  # the first tokens are the other pool's
        if isinstance(replica.scheduler, SglangScheduler):
            replica.scheduler.takes_over = True
    return pool


def _sized(scenario: Scenario, size: PoolSize) -> Scenario:
    own = {**size.degrees(scenario.model), "shard_size": size.replicas}
    changes: dict[str, object] = {"parallelism": scenario.parallelism.model_copy(update=own)}
    if size.memory_fraction is not None:
        i = scenario.for_serving
        cache = i.kv_cache.model_copy(update={"memory_fraction": size.memory_fraction})
        changes["inference"] = i.model_copy(update={"kv_cache": cache})
    return scenario.unchecked_copy(update=changes)


def _pool(
    name: str,
    scenario: Scenario,
    profile: Profile,
    requests: Items[Request],
    first_rank: int,
    dealt: list[list[Sequence]],
    held_bytes: float = 0.0,
    costs: IterationCosts | None = None,
) -> Pool:
    costs = costs or iteration_costs(scenario, profile)
    capacity = cache_capacity(scenario, costs, requests, held_bytes)
    hashed = any(r.hashes for r in requests)
    cache = scenario.for_serving.kv_cache
    if hashed and scenario.for_serving.prefix_cache != "none" and HASHED_TOKENS % cache.block_tokens:
        why = f"must divide {HASHED_TOKENS}, the tokens for each hash of the requests"
        raise scenario.error(("inference", "kv_cache", "block_tokens"), f"found {cache.block_tokens}; {why}")
    tokens = iteration_tokens(scenario.for_serving, requests)
    replicas = [
        Replica(i, own, _scheduler(scenario, costs, capacity, own, hashed, tokens)) for i, own in enumerate(dealt)
    ]
    return Pool(name, scenario, costs, capacity, first_rank, tuple(replicas))


def _scheduler(
    scenario: Scenario,
    costs: IterationCosts,
    capacity: Capacity,
    sequences: list[Sequence],
    hashed: bool,
    tokens: int,
) -> Scheduler:
    """A replica's scheduler; `hashed`: requests name their prefixes by hashes; `tokens`: the most of an iteration."""
    i, pp = scenario.for_serving, scenario.parallelism.pp
    engine = engine_of(i.engine)
    limits = _limits(i, engine, pp, len(sequences), tokens)
    kind = HashedKvCache if hashed and i.prefix_cache == "gpu" else KvCache
    cache = kind(capacity.blocks, i.kv_cache.block_tokens, capacity.reserve_tokens)
    store = HashedHostCache if hashed else HostCache
    host = store(capacity.host_tokens) if i.prefix_cache == "cpu" else None
    network = costs.prices.pricing.network
    latency = network.host_copy(0.0)
    swap_room = capacity.host_tokens if i.preemption == "swap" else 0
    pieces = _copies_of_a_block(costs) if engine.copies_blocks else 0
    token_s = network.host_copy(capacity.stage_token_bytes) - latency + pieces * latency / i.kv_cache.block_tokens
    bus = Link(token_s, latency)
    class_of_engine = SglangScheduler if engine.prompts_lead else Scheduler
    scheduler = class_of_engine(cache, limits, i.prefix_cache == "gpu", host, bus, swap_room)
    _follow_rules(scheduler, engine, i, pp, costs.host.overlaps)
    if engine.prompts_lead:
        shared = engine.dp_attention and scenario.parallelism.sharing_replicas > 1
        cautious = 1.0 if i.schedule_conservativeness is None else i.schedule_conservativeness
        scheduler.output = scheduler.output.of(cautious * (LESS_CONSERVATIVE if shared else 1.0))
    if i.kv_cache.tiers is not None:
        scheduler.tiers = cache_tiers(i.kv_cache.tiers, cache, bus, capacity.stage_token_bytes, scheduler.copies)
    if engine.sparse_windows and scheduler.by_content and _some_have_windows(costs):
        scheduler.ends = set()
    # capacityScheduler.cpp, skippingIsRelevant: not where windows differ
    scheduler.defers_shared = engine.defers_shared and scheduler.share_on_gpu and not _some_have_windows(costs)
    if i.lora is not None:
        size = max([adapter_bytes(costs, stage) for stage in costs.stages])
        scheduler.adapters = AdapterSlots(i.lora.places, network.host_copy(size), bus, scheduler.copies)
    if i.speculative is not None:
        _draft(scheduler, engine, i.speculative)
    return scheduler


def _draft(scheduler: Scheduler, engine: Engine, own: Speculative) -> None:
    """Let a scheduler check drafted tokens."""
    from_text = own.lookup is not None
    scheduler.drafted = own.checked
    # vLLM, v1/core/sched/scheduler.py, later config/vllm.py: num_lookahead_tokens of EAGLE and of draft models
    scheduler.lookahead = own.tokens if engine.looks_ahead and not from_text else 0
    found = 1.0 if own.lookup is None else own.lookup
    acceptance = scheduler.acceptance = Acceptance(own.acceptance, own.seed, own.tokens, found)
    if from_text and engine.text is not None and not engine.text.always:
        scheduler.finds = acceptance.finds


def _limits(i: Inference, engine: Engine, pp: int, requests: int, tokens: int) -> Limits:
    """The most sequences at once, in all and on a stage, and the most tokens; a static batch takes all `requests`."""
    static = i.batching == "static"
    running, most = (requests, UNLIMITED) if static else (i.max_running_requests, tokens)
    if engine.slots_of_all and i.drafts == "model" and not static:
        most -= running  # vLLM 0.17 to 0.27, config/vllm.py, _set_max_num_scheduled_tokens
    all_run = running * pp if engine.runs_by_stage and not static else running
    return Limits(all_run, most, -(-all_run // pp) if engine.shares_stages or static else all_run)


def _some_have_windows(costs: IterationCosts) -> bool:
    """Whether some layers have windows, beside others without; chunks of a sequence count as none."""
    grouped = [a.window for a in costs.attentions if isinstance(a, GroupedQueryAttention)]
    return len({window is None or window.chunked for window in grouped}) > 1


def _copies_of_a_block(costs: IterationCosts) -> int:
    """Copies of a block on the stage that has most: of keys and of values in each layer, latent caches of both."""
    each = [2 if isinstance(a, GroupedQueryAttention) else 1 for a in costs.attentions]
    return max([sum([n * m for n, m in zip(s.attentions, each, strict=True)]) for s in costs.stages])


def _follow_rules(scheduler: Scheduler, engine: Engine, i: Inference, pp: int, overlaps: bool) -> None:
    """Let a scheduler follow the rules of an engine's record, as far as the scenario has its options on."""
    if isinstance(scheduler, SglangScheduler):
        scheduler.room_tokens, scheduler.caps_chunks = engine.retract_room_tokens, engine.caps_chunks
    scheduler.cache.merges = engine.merges_prefixes
    first, least = engine.reserved_at_first or engine.reserved_output, engine.reserved_output
    if i.capacity_policy == "max_utilization":
        first = least = 0.0
    scheduler.output = ReservedOutput(first, least, first)
    scheduler.mixes = engine.mixes(i.chunked_prefill, i.speculative is not None, pp)
    scheduler.splits = i.chunked_prefill or not engine.whole_prompts
    scheduler.shares_at_once = engine.shares_at_once
    computes_again = engine.drops_last_hit and i.drafts == "layer" and i.prefix_cache == "gpu"
    ahead = engine.hashes_ahead and i.disaggregated is None and i.kv_cache.tiers is None
    scheduler.drops_last, scheduler.hashes_ahead = computes_again and not ahead, computes_again and ahead
    scheduler.prompt_limit, scheduler.limits_alone = i.max_prompt_tokens, engine.prompt_limit != "others"
    if i.batch_wait is not None and i.disaggregated is None:
        scheduler.wait = BatchWait(i.batch_wait.iterations, i.batch_wait.tokens_ratio)
    rules = engine.admission
    scheduler.whole_prompts_fit = engine.whole_prompts_fit or rules.whole_blocks
    scheduler.whole_blocks = rules.whole_blocks or engine.watermark is not None
    scheduler.counts_found, scheduler.block_chunks = rules.counts_found, rules.block_chunks
    scheduler.keeps_ended = rules.keeps_ended
    scheduler.watermark, scheduler.paddings = engine.watermark, engine.paddings
    behind = overlaps and pp == 1
    scheduler.token_more = (
        engine.token_more and i.speculative is None and (behind or (not engine.overlaps and i.cuda_graphs and pp == 1))
    )
    scheduler.one_behind, scheduler.sees_arrivals = behind or scheduler.token_more, not behind
