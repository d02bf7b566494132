"""A serving workload simulated: requests arrive, iterations compute, tokens come out.

Replicas have a scheduler and a cache of their own. With round-robin routing they do not affect each other, and each can
be served alone (`sim.serve.quick_pass`); what couples them runs on SimPy (`sim.serve.on_simpy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from sim.core.gc_paused import no_collection
from sim.inputs.called import check_called
from sim.inputs.engine_file import engine_of, router_of
from sim.inputs.scenario import Overrides, Scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.serve.quick_pass import QuickPass, before_engine_s
from sim.serve.replicas.pools import Pool, decode_pool, experts_span, prefill_pool, whole_pool
from sim.serve.replicas.router import ROUTERS
from sim.serve.requests import Request, accepted, make_requests
from sim.serve.results.result import ServingSimulation
from sim.serve.scheduling.adapters import with_adapters, with_named
from sim.serve.scheduling.sequences import Sequence

if TYPE_CHECKING:
    from sim.core.engines import Engine
    from sim.serve.prices.costs import IterationCosts
    from sim.serve.replicas.autoscaler import Span
    from sim.serve.replicas.handover import Transfer

SIMPY_REQUESTS = 1000  # on SimPy they take a tenth of a second longer, which nobody notices; with pipeline stages fewer


def simulate_serving(
    scenario: Scenario,
    profile: Profile | None = None,
    requests: tuple[Request, ...] | None = None,
    *,
    engine: Engine = "auto",
    group: bool = True,
    held_bytes: float = 0.0,
    costs: IterationCosts | None = None,
    watch: Callable[[list[Sequence]], None] | None = None,
    overrides: Overrides = (),
) -> ServingSimulation:
    """Serve the scenario's requests, or `requests` in their place. `overrides`: of keys of the scenario.

    `engine`: simpy (`sim.serve.on_simpy`); static (`sim.serve.quick_pass`), which gives the same times where replicas
    do not affect each other; or auto: SimPy where they do, and for up to `SIMPY_REQUESTS` requests and stages
    that they pass. Without `group` the scheduler looks at every sequence in every iteration, which changes no time.
    `held_bytes` of every GPU belong to others. `costs`: of another simulation of this scenario; of one pool. `watch` is
    told of the sequences before they are served.

    Raises:
        InputError: without an inference section, for a trace that cannot be read, or for an engine that does not know
            what the scenario asks for.
    """
    check_called(scenario, profile, engine)
    scenario = scenario.with_overrides(overrides) if overrides else scenario
    begin = time.perf_counter()
    prices = profile or load_profile(scenario.calibration)
    scenario, sent = _sent(scenario, requests)
    found = _accepted(scenario, sent)
    path = _path(scenario, engine, found)
    sequences = [Sequence(r, n) for n, r in enumerate(found)]
    if watch is not None:
        watch(sequences)
    with no_collection():
        pools = _pools(scenario, prices, sequences, held_bytes, costs)
        transfers, spans = _serve(pools, sequences, scenario, path, group)
    wall_s = time.perf_counter() - begin
    refused = len(sent) - len(found)
    return ServingSimulation(scenario, prices, pools, transfers, path, wall_s, found, refused, held_bytes, spans)


def make_pools(scenario: Scenario, profile: Profile) -> tuple[Pool, ...]:
    """Return the engine's pools of GPUs, with their caches, before they serve anything.

    Raises:
        InputError: as `simulate_serving`.
    """
    scenario, sent = _sent(scenario, None)
    sequences = [Sequence(r, n) for n, r in enumerate(_accepted(scenario, sent))]
    return _pools(scenario, profile, sequences, 0.0, None)


def _sent(scenario: Scenario, requests: tuple[Request, ...] | None) -> tuple[Scenario, tuple[Request, ...]]:
    """The scenario's requests, or `requests`, with their LoRA adapters; the scenario with these adapters' names."""
    inference = scenario.inference
    if inference is None:
        raise scenario.error(("inference",), "is missing; this scenario serves no requests")
    found = make_requests(inference.requests) if requests is None else requests
    if inference.lora is not None:
        found = with_adapters(found, inference.lora)
        scenario = with_named(scenario, found)
    elif any(r.adapter for r in found):
        why = "the trace names LoRA adapters (adapter_id); inference.lora says their rank"
        raise scenario.error(("inference", "requests"), why)
    return scenario, found


def _accepted(scenario: Scenario, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The requests that the engine takes.

    Raises:
        InputError: if it takes none.
    """
    found = accepted(requests, scenario.for_serving)
    if not found:
        most = scenario.for_serving.max_request_tokens
        shortest = min([r.prompt_tokens + r.output_tokens for r in requests])
        why = f"every request has more tokens, prompt and answer together (the shortest {shortest:,})"
        raise scenario.error(("inference", "max_request_tokens"), f"found {most:,}; {why}, and the engine refuses them")
    return found


def _pools(
    scenario: Scenario, prices: Profile, sequences: list[Sequence], held_bytes: float, costs: IterationCosts | None
) -> tuple[Pool, ...]:
    """One pool, or those for prompts and for the tokens after them."""
    sizes = scenario.for_serving.disaggregated
    if sizes is None:
        return (whole_pool(scenario, prices, sequences, held_bytes, costs),)
    prefill = prefill_pool(scenario, prices, sequences, sizes.prefill)
    return prefill, decode_pool(scenario, prices, sequences, sizes.decode, sizes.prefill.ranks)


def _serve(
    pools: tuple[Pool, ...],
    sequences: list[Sequence],
    scenario: Scenario,
    path: Literal["simpy", "static"],
    group: bool,
) -> tuple[tuple[Transfer, ...], tuple[Span, ...]]:
    """Serve all; what went from one pool to another, and when which replica was on, where a rule starts and stops
    them."""
    inference = scenario.for_serving
    if path == "static":
        for replica, own in zip(pools[0].replicas, pools[0].prices, strict=True):
            QuickPass(replica, own, group, inference.requests.max_concurrency).run()
        return (), ()
    from sim.engine.simpy_events import Clock
    from sim.serve.on_simpy import deal, replica_processes, serve_on_simpy, take_in
    from sim.serve.replicas.autoscaler import Autoscaler, Unserved
    from sim.serve.replicas.handover import Handover

    clock = Clock()
    name = router_of(inference, scenario.parallelism)
    score = engine_of(inference.engine).routers.score
    routers = [ROUTERS[name]([r.scheduler for r in pool.replicas], score) for pool in pools]
    processes = [replica_processes(clock, pool, group) for pool in pools]
    handover = Handover(clock, pools, processes, routers) if len(pools) > 1 else None
    for members, router in zip(processes, routers, strict=True):
        for process in members:
            process.on_left.append(partial(deal, members, router))
    scalers: list[Autoscaler] = []
    if (rule := inference.autoscaling) is not None:
        unserved, begin_s = Unserved(len(sequences), processes), sequences[0].request.arrival_s
        each = enumerate(zip(processes, routers, strict=True))
        scalers = [Autoscaler(clock, rule, own, router, begin_s, unserved, n) for n, (own, router) in each]
    for replica in pools[0].replicas:
        replica.sequences.clear()  # the router deals them out
    most, before_s = inference.requests.max_concurrency, before_engine_s(pools[0].costs, sequences)
    enter = partial(take_in, processes[0], routers[0]) if handover is None else handover.enter
    serve_on_simpy(clock, processes, sequences, enter, most, before_s)
    return tuple(handover.transfers) if handover else (), tuple([span for s in scalers for span in s.finished()])


def coupling(scenario: Scenario) -> str:
    """What makes replicas affect each other, in words; empty where they do not, and the quick pass can serve each."""
    inference = scenario.for_serving
    found = "inference.disaggregated" if inference.disaggregated is not None else ""
    router = router_of(inference, scenario.parallelism)
    if router != "round_robin" and scenario.parallelism.dp > 1:
        found = f"inference.router {router}"
    if inference.requests.max_concurrency is not None and scenario.parallelism.dp > 1:
        found = "inference.requests.max_concurrency over several replicas"
    if inference.autoscaling is not None:
        found = "inference.autoscaling"
    if experts_span(scenario) > 1:
        found = "replicas that share experts (parallelism.ep, inference.afd)"
    return found


def _path(scenario: Scenario, engine: Engine, requests: tuple[Request, ...]) -> Literal["simpy", "static"]:
    """Which engine serves."""
    coupled = coupling(scenario)
    if coupled and engine == "static":
        raise scenario.error((), f"--engine static does not know {coupled}; simpy does (auto)")
    small = len(requests) * scenario.parallelism.pp <= SIMPY_REQUESTS
    return "simpy" if coupled or engine == "simpy" or (engine == "auto" and small) else "static"
