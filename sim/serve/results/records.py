"""The result of a serving workload as a frozen record."""

from __future__ import annotations

import numpy as np

from sim.inputs.scenario import Scenario
from sim.results.fit import Fit
from sim.results.records import Engine, MemoryRow, Provenance, Record


class Percentiles(Record, frozen=True):
    """Hold percentiles and the mean of a quantity over requests."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float


STATISTICS = Percentiles.__struct_fields__
Bounds = tuple[float, float]


class PercentileBounds(Record, frozen=True):
    """The 90 % intervals of `Percentiles`."""

    p50: Bounds
    p90: Bounds
    p95: Bounds
    p99: Bounds
    mean: Bounds


class ServingIntervals(Record, frozen=True, kw_only=True):
    """The 90 % intervals of a workload's quantities of the same names."""

    request_latency_s: PercentileBounds
    time_to_first_token_s: PercentileBounds
    time_per_output_token_s: PercentileBounds
    inter_token_latency_s: PercentileBounds
    output_tokens_per_s: Bounds
    output_tokens_per_s_per_gpu: Bounds
    total_tokens_per_s: Bounds
    requests_per_s: Bounds


class KvCacheUse(Record, frozen=True, kw_only=True):
    """The key-value cache over a workload. Blocks are those of one replica, counts the sums over replicas; waste and
    means are over time."""

    layout: str
    block_tokens: int
    blocks: int
    capacity_tokens: int
    bytes_per_token: float
    blocks_used: int  # at most
    blocks_used_mean: float
    waste: float  # empty places in blocks that are held
    running_max: int  # sequences
    running_mean: float
    preemptions: int
    recomputed_tokens: int
    prefix_hit_rate: float
    prefix_hit_tokens: int
    evicted_blocks: int
    loaded_bytes: float
    stored_bytes: float
    load_s: float
    swapped_bytes: float
    swap_s: float
    tiers: tuple[TierUse, ...] | None = None  # from the one below the GPU down


class TierUse(Record, frozen=True, kw_only=True):
    """A tier below the GPU's cache, over all replicas; bytes and seconds of a GPU's copies. `hit_tokens`: that came
    back from it; `stored_bytes` went down to it; `evicted_tokens` went on down, or out."""

    name: str
    capacity_tokens: int  # of one replica
    hit_tokens: int
    evicted_tokens: int
    loaded_bytes: float
    load_s: float
    stored_bytes: float
    store_s: float


class PoolUse(Record, frozen=True, kw_only=True):
    """One pool of a disaggregated workload. `busy_share`: of the time from the first arrival to the last token, that in
    which a replica computes; the mean over replicas."""

    name: str
    replicas: int
    gpus: int
    busy_share: float
    iterations: int
    kv_cache: KvCacheUse
    autoscaling: ScalingUse | None = None


class TransferUse(Record, frozen=True, kw_only=True):
    """Computed prompts sent from the pool that prefills to the one that decodes. `wait_s`: for links in use."""

    count: int
    bytes_per_gpu: float
    transfer_s: Percentiles
    wait_s: Percentiles


class ScalingUse(Record, frozen=True, kw_only=True):
    """Replicas that were on from the first arrival to the last token, of all pools; one that starts or drains is."""

    replicas_mean: float
    replicas_max: int
    starts: int  # after the first arrival
    stops: int
    gpu_hours: float
    gpu_hours_always_on: float  # of all replicas
    replicas: tuple[tuple[float, int], ...]  # from which second on how many

    def gpus_mean(self, gpus: int) -> float:
        """How many of all these GPUs were taken in the mean."""
        return gpus * self.gpu_hours / self.gpu_hours_always_on


class AdapterUse(Record, frozen=True, kw_only=True):
    """LoRA adapters over a workload. `loads`: copies of one to the GPUs of a replica, which took `load_s` in all."""

    adapters: int  # that some request used
    places: int  # on a GPU at once
    adapter_bytes: float  # of one, on the GPU that holds most of it
    loads: int
    load_s: float
    distinct_mean: float  # adapters in an iteration


class OffloadUse(Record, frozen=True, kw_only=True):
    """Weights in host memory. `host_bytes`: of the GPU with most of them; `copy_s`: of an iteration's copies there."""

    host_bytes: float
    copy_s: float


class SpeculationUse(Record, frozen=True, kw_only=True):
    """What became of drafted tokens. A verification is one sequence's in one iteration; accepted tokens beyond a
    request's end count as accepted."""

    verifications: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_verification: float
    expected_tokens_per_verification: float


class ServingResult(Record, frozen=True, kw_only=True):
    """A simulated serving workload: format sim-result/1."""

    format: str = "sim-result/1"
    scenario: Scenario
    duration_s: float
    duration_interval_s: Bounds  # 90 %, of which `interval_from` says in words what it is made of
    interval_from: str
    intervals: ServingIntervals | None = None  # of the other quantities; None where nobody asked for them
    requests: int  # that were served
    requests_refused: int = 0  # further ones, with more tokens than `inference.max_request_tokens`
    request_latency_s: Percentiles
    queue_time_s: Percentiles  # from a request's arrival to its first admission
    time_to_first_token_s: Percentiles
    time_per_output_token_s: Percentiles  # of each request's mean
    inter_token_latency_s: Percentiles  # over the gaps between tokens
    output_tokens: int
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    total_tokens_per_s: float  # of prompts and outputs
    requests_per_s: float  # finished
    iterations: int
    kv_cache: KvCacheUse  # of the pool that adds tokens
    pools: tuple[PoolUse, ...] | None = None  # disaggregated: prefill, decode
    transfers: TransferUse | None = None
    speculation: SpeculationUse | None = None
    autoscaling: ScalingUse | None = None
    lora: AdapterUse | None = None
    weight_offload: OffloadUse | None = None
    perplexity_added: float | None = None  # by the quantization, where it was measured
    comm_share: float
    peak_memory_bytes: float  # the most in use
    peak_reserved_bytes: float  # by the engine: weights, the whole cache, an iteration's tensors
    memory: tuple[MemoryRow, ...]
    fits_in_memory: bool
    fit: Fit
    does_not_start: str | None = None  # why; the figures are then those of a server with more memory
    provenance: Provenance
    warnings: tuple[str, ...]
    engine: Engine


def percentiles(values: list[float]) -> Percentiles:
    """p50, p90, p95, p99, between neighbours where needed, and the mean; zeros for no values."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p95, p99 = np.percentile(np.array(values), (50, 90, 95, 99)).tolist()
    return Percentiles(p50, p90, p95, p99, sum(values) / len(values))
