"""A serving workload simulated: requests arrive, iterations compute, tokens come out.

Each data-parallel replica serves every dp-th request with a scheduler and a cache of its own (`sim.serve.clock`).
"""

from __future__ import annotations

import time

from sim.errors import InputError
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.serve.clock import Replica, Server
from sim.serve.kv_cache import HostCache, KvCache
from sim.serve.requests import Request, make_requests
from sim.serve.scheduler import Limits, Scheduler, Sequence
from sim.serve.serving_costs import IterationCosts, iteration_costs
from sim.serve.serving_faults import replica_costs
from sim.serve.serving_memory import Capacity, cache_capacity
from sim.serve.serving_result import ServingSimulation

UNLIMITED = 1 << 60


def simulate_serving(
    scenario: Scenario,
    profile: Profile | None = None,
    requests: tuple[Request, ...] | None = None,
    *,
    group: bool = True,
    held_bytes: float = 0.0,
) -> ServingSimulation:
    """Serve the scenario's requests, or `requests` in their place. Without `group` every iteration is its own.
    `held_bytes` of every GPU belong to others.

    Raises:
        InputError: without an inference section, or for a trace that cannot be read.
    """
    begin = time.perf_counter()
    inference = scenario.inference
    if inference is None:
        raise InputError(f"{scenario.name}: this scenario has no `inference` section")
    costs = iteration_costs(scenario, profile or load_profile(scenario.calibration))
    found = make_requests(inference.requests) if requests is None else requests
    dp = scenario.parallelism.dp
    capacity = cache_capacity(scenario, costs, found, held_bytes)
    replicas = []
    for i in range(min(dp, len(found))):
        sequences = [Sequence(r, n) for n, r in enumerate(found[i::dp])]
        replica = Replica(i, sequences, _scheduler(scenario, costs, capacity, sequences))
        Server(replica, replica_costs(costs, scenario, i), group and len(costs.stages) == 1).run()
        replicas.append(replica)
    return ServingSimulation(
        scenario, costs.pricing.costs.profile, costs, capacity, tuple(replicas), time.perf_counter() - begin
    )


def _scheduler(scenario: Scenario, costs: IterationCosts, capacity: Capacity, sequences: list[Sequence]) -> Scheduler:
    i, pp = scenario.inference, scenario.parallelism.pp
    assert i is not None
    if i.batching == "static":
        limits = Limits(len(sequences), UNLIMITED, -(-len(sequences) // pp))
    else:
        limits = Limits(i.max_running_requests, i.max_batch_tokens, -(-i.max_running_requests // pp))
    cache = KvCache(capacity.blocks, i.kv_cache.block_tokens, capacity.reserve_tokens)
    host = HostCache(capacity.host_tokens) if i.prefix_cache == "cpu" else None
    network = costs.pricing.network
    latency = network.host_copy(0.0)
    per_token = network.host_copy(capacity.stage_token_bytes) - latency
    room = capacity.host_tokens if i.preemption == "swap" else 0
    return Scheduler(cache, limits, i.prefix_cache == "gpu", host, per_token, latency, room)
