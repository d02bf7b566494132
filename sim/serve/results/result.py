"""A simulated serving workload: its result, timeline and memory."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from sim.core.timeline import Timeline
from sim.core.units import counted
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.programs.priced_items import Shares, add_all
from sim.results.certainty import StepInterval
from sim.results.fit import Fit
from sim.results.memory import MemoryCurve
from sim.results.metrics import provenance
from sim.results.records import Engine, tightest
from sim.serve.cache.use import kv_cache_use
from sim.serve.memory import Capacity, adapter_bytes
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.iteration_shares import HOST, LAUNCHES
from sim.serve.replicas.pools import Pool
from sim.serve.replicas.replica import Replica
from sim.serve.replicas.scaling_use import scaling_use
from sim.serve.results.certainty import server_interval
from sim.serve.results.latencies import RequestTimes, TokenGaps, request_times, token_gaps
from sim.serve.results.memory_rows import memory_rows
from sim.serve.results.perplexity import perplexity_added
from sim.serve.results.records import (
    AdapterUse,
    OffloadUse,
    Percentiles,
    PoolUse,
    ScalingUse,
    ServingResult,
    SpeculationUse,
    TransferUse,
    percentiles,
)
from sim.serve.results.serving_warnings import lacks_memory, serving_warnings
from sim.serve.results.starts import room_for_longest, why_not_started
from sim.serve.results.timeline import make_timeline, memory_curves
from sim.serve.scheduling.sequences import Sequence
from sim.serve.scheduling.speculation import expected_tokens

if TYPE_CHECKING:
    from sim.serve.replicas.autoscaler import Span
    from sim.serve.replicas.handover import Transfer
    from sim.serve.requests import Request


class ServingSimulation(Struct, frozen=True, eq=False, dict=True):
    """One simulated workload: `outcome` holds its numbers, `timeline` and `memory` are for views."""

    scenario: Scenario
    profile: Profile
    pools: tuple[Pool, ...]  # one, or disaggregated: prefill and decode
    transfers: tuple[Transfer, ...]
    path: str  # simpy or static: what gave the times
    wall_s: float
    requests: tuple[Request, ...]
    refused: int = 0  # further ones, which the engine did not take
    held_bytes: float = 0.0  # of every GPU, which belong to others
    spans: tuple[Span, ...] = ()  # autoscaling: when which replica was on

    @property
    def costs(self) -> IterationCosts:
        """Prices of the last pool, which adds the tokens."""
        return self.pools[-1].costs

    @property
    def capacity(self) -> Capacity:
        """The cache of one of its replicas."""
        return self.pools[-1].capacity

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Replicas of all pools."""
        return tuple([r for pool in self.pools for r in pool.replicas])

    @cached_property
    def sequences(self) -> list[Sequence]:
        """What became of every request."""
        return [s for r in self.replicas for s in r.sequences]

    @cached_property
    def times(self) -> RequestTimes:
        """How long each of `sequences` took."""
        return request_times(self.sequences, self.costs.host.times)

    @cached_property
    def gaps(self) -> TokenGaps | None:
        """How long each token took after a request's first; None where no request has a second."""
        return token_gaps(self.replicas)

    @cached_property
    def latencies(self) -> dict[str, Percentiles]:
        """Percentiles of the requests' times and of the gaps between tokens, by their keys in the result."""
        times, gaps = self.times, self.gaps
        return {
            "request_latency_s": percentiles(times.latency_s.tolist()),
            "queue_time_s": percentiles(times.queue_s.tolist()),
            "time_to_first_token_s": percentiles(times.first_token_s.tolist()),
            "time_per_output_token_s": percentiles(times.per_output_token_s.tolist()),
            "inter_token_latency_s": percentiles([]) if gaps is None else gaps.percentiles,
        }

    @property
    def busy_s(self) -> float:
        """Seconds from the first arrival to the last token; infinite where all came at once."""
        return self.end_s - self.start_s if self.end_s > self.start_s else math.inf

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of all answers by `busy_s`."""
        return sum([s.request.output_tokens for s in self.sequences]) / self.busy_s

    @cached_property
    def shares(self) -> Shares:
        """Seconds of all iterations, by (operator kind, source, uncertainty)."""
        total: Shares = {}
        for pool in self.pools:
            add_all(total, pool.priced.shares)
        return total

    @property
    def host_uncertainty(self) -> float:
        """Standard deviation that the engine's own host gives the whole by its work and its launches, a part of 1."""
        whole = sum(self.shares.values())
        return sum([sigma * s / whole for (kind, _, sigma), s in self.shares.items() if kind in (HOST, LAUNCHES)])

    @cached_property
    def start_s(self) -> float:
        """When the first request arrived: a trace may begin at any time, and rates and means count from here."""
        return min([s.arrival_s for s in self.sequences])

    @cached_property
    def end_s(self) -> float:
        """When the last token came out."""
        return max([s.finish_s for s in self.sequences])

    @cached_property
    def likely(self) -> StepInterval:
        """The seconds from the first arrival to the last token, had the server worked all along."""
        seconds = self.end_s - self.start_s
        return server_interval(self.scenario, self.profile, seconds, self.shares, self.host_uncertainty)

    @cached_property
    def result(self) -> dict[str, Any]:
        """`outcome` as plain data, in the form of `sim.run --json`."""
        return self.outcome.to_json()

    @cached_property
    def outcome(self) -> ServingResult:
        """The numbers."""
        return _make_result(self)

    @cached_property
    def timeline(self) -> Timeline:
        """A span for every iteration (or run of alike ones) on every stage."""
        return make_timeline(self.pools, self.transfers)

    @cached_property
    def memory(self) -> list[MemoryCurve]:
        """Weights, cache (as activations) and what an iteration needs for the moment, on every stage."""
        return memory_curves(self.pools)

    def __repr__(self) -> str:
        return (
            f"ServingSimulation({self.scenario.name}: {counted(len(self.sequences), 'request')} in {self.end_s:.6g} s)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim.views.notebook import result_html

        return result_html(self.outcome)

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """`memory`: a workload has no further steps."""
        return self.memory

    @property
    def critical_rows(self) -> list[int]:
        """No row is marked: an iteration follows the one before."""
        return []


def _make_result(sim: ServingSimulation) -> ServingResult:
    sequences = sim.sequences
    output, prompts = sum(s.request.output_tokens for s in sequences), sum(s.request.prompt_tokens for s in sequences)
    busy_s, times = sim.busy_s, sim.latencies
    memory = memory_rows(sim.pools)
    fit = tightest(memory).fit
    fits = fit.fits and all(pool.capacity.blocks <= pool.capacity.blocks_fit for pool in sim.pools)
    shares, scaling, gpus = sim.shares, scaling_use(sim.spans, sim.pools, sim.start_s, sim.end_s), sim.scenario.ranks
    on = gpus if scaling is None or not scaling.gpu_hours_always_on else scaling.gpus_mean(gpus)
    return ServingResult(
        scenario=sim.scenario,
        duration_s=sim.end_s,
        duration_interval_s=(sim.start_s + sim.likely.low_s, sim.start_s + sim.likely.high_s),
        interval_from=sim.likely.why,
        requests=len(sequences),
        requests_refused=sim.refused,
        request_latency_s=times["request_latency_s"],
        queue_time_s=times["queue_time_s"],
        time_to_first_token_s=times["time_to_first_token_s"],
        time_per_output_token_s=times["time_per_output_token_s"],
        inter_token_latency_s=times["inter_token_latency_s"],
        output_tokens=output,
        output_tokens_per_s=sim.output_tokens_per_s,
        output_tokens_per_s_per_gpu=output / busy_s / on,
        total_tokens_per_s=(output + prompts) / busy_s,
        requests_per_s=len(sequences) / busy_s,
        iterations=sum(i.steps for r in sim.replicas for i in r.iterations),
        kv_cache=kv_cache_use(sim.pools[-1], sim.start_s),
        pools=None if len(sim.pools) == 1 else tuple([_pool_use(sim, pool) for pool in sim.pools]),
        transfers=_transfer_use(sim) if len(sim.pools) > 1 else None,
        speculation=_speculation(sim),
        autoscaling=scaling,
        lora=_adapters(sim),
        weight_offload=_offload(sim),
        perplexity_added=perplexity_added(sim.scenario.for_serving.quantization),
        comm_share=_comm_share(sim),
        peak_memory_bytes=max(row.peak for row in memory),
        peak_reserved_bytes=max(row.reserved for row in memory),
        memory=memory,
        fits_in_memory=fits and not _too_long(sim),
        fit=fit if fits and not _too_long(sim) else Fit("does not fit", 0.0),
        does_not_start=why_not_started(sim.pools),
        provenance=replace(provenance(sim.profile, shares), kernels=_kernels(sim)),
        warnings=(*lacks_memory(sim), *sim.scenario.warnings, *serving_warnings(sim, fits, shares)),
        engine=Engine(tasks=sum(len(r.iterations) for r in sim.replicas), wall_s=sim.wall_s, path=sim.path),
    )


def _kernels(sim: ServingSimulation) -> dict[str, str] | None:
    """Whose kernels priced the operators of all pools; None if none was measured."""
    used = [pool.costs.prices.pricing.costs.kernels for pool in sim.pools]
    return dict(sorted({name: said for each in used for name, said in each.items()}.items())) or None


def _too_long(sim: ServingSimulation) -> bool:
    """Tell whether a cache lacks room for one request of `max_request_tokens`, if the scenario sets this limit."""
    return sim.scenario.for_serving.max_request_tokens is not None and room_for_longest(sim.pools) is not None


def _comm_share(sim: ServingSimulation) -> float:
    """Communication's part of all iterations' seconds."""
    seconds = sum(sim.shares.values())
    return sum([pool.priced.comm_s for pool in sim.pools]) / seconds if seconds > 0 else 0.0


def _pool_use(sim: ServingSimulation, pool: Pool) -> PoolUse:
    """One of several pools."""
    busy = [sum([i.spans[0][1] - i.spans[0][0] for i in r.iterations]) for r in pool.replicas]
    whole = (sim.end_s - sim.start_s) * len(busy)
    p = pool.scenario.parallelism
    return PoolUse(
        name=pool.name,
        replicas=p.dp,
        gpus=p.ranks,
        busy_share=sum(busy) / whole if whole else 0.0,
        iterations=sum(i.steps for r in pool.replicas for i in r.iterations),
        kv_cache=kv_cache_use(pool, sim.start_s),
        autoscaling=_pool_scaling(sim, pool),
    )


def _pool_scaling(sim: ServingSimulation, pool: Pool) -> ScalingUse | None:
    """How many replicas of one of several pools were on."""
    own = [replace(x, pool=0) for x in sim.spans if sim.pools[x.pool] is pool]
    return scaling_use(own, (pool,), sim.start_s, sim.end_s)


def _transfer_use(sim: ServingSimulation) -> TransferUse:
    """Computed prompts that moved between pools."""
    moved = sim.transfers
    size = max(pool.capacity.stage_token_bytes for pool in sim.pools)
    return TransferUse(
        count=sum(t.last for t in moved),
        bytes_per_gpu=sum(t.tokens for t in moved) * size,
        transfer_s=percentiles([t.end_s - t.start_s for t in moved]),
        wait_s=percentiles([t.start_s - t.asked_s for t in moved]),
    )


def _speculation(sim: ServingSimulation) -> SpeculationUse | None:
    """What became of drafted tokens."""
    speculative = sim.scenario.for_serving.speculative
    if speculative is None:
        return None
    counts, most = [r.counts for r in sim.replicas], min(speculative.tokens, speculative.checked)
    drafted, accepted = sum(c.drafted_tokens for c in counts), sum(c.accepted_tokens for c in counts)
    checks = sum(c.verifications for c in counts)
    of_all = speculative.lookup is not None and sim.replicas[-1].scheduler.finds is None
    found = speculative.lookup if of_all and speculative.lookup is not None else 1.0
    return SpeculationUse(
        verifications=checks,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        tokens_per_verification=1.0 + accepted / checks if checks else 0.0,
        expected_tokens_per_verification=1.0 + found * (expected_tokens(most, speculative.acceptance) - 1.0),
    )


def _adapters(sim: ServingSimulation) -> AdapterUse | None:
    """What became of LoRA adapters."""
    slots = next((r.scheduler.adapters for r in sim.replicas), None)
    if slots is None:
        return None
    steps = sum([i.steps for r in sim.replicas for i in r.iterations])
    distinct = sum([i.steps * i.load.adapters for r in sim.replicas for i in r.iterations])
    loads = [c.end_s - c.start_s for r in sim.replicas for c in r.scheduler.copies if c.what == "LoRA adapter"]
    return AdapterUse(
        adapters=len({s.request.adapter for s in sim.sequences} - {""}),
        places=slots.places,
        adapter_bytes=max([adapter_bytes(sim.costs, stage) for stage in sim.costs.stages]),
        loads=len(loads),
        load_s=sum(loads),
        distinct_mean=distinct / steps,
    )


def _offload(sim: ServingSimulation) -> OffloadUse | None:
    """Weights in host memory."""
    own = [stage for pool in sim.pools for stage in pool.costs.offloaded]
    most = max(own, key=lambda stage: stage.copy_s, default=None)
    return None if most is None else OffloadUse(host_bytes=most.host_bytes, copy_s=most.copy_s)
