"""What is said of a simulated serving workload beside its numbers: whom the engine would refuse, what does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from sim.core.dtypes import sixteen_bit
from sim.core.quantization import QUANTIZATIONS
from sim.core.units import n_bytes
from sim.inputs.engine_file import engine_of
from sim.inputs.serving_formats import is_published
from sim.programs.priced_items import Shares
from sim.ranks.faults import has_jitter
from sim.results.metrics import roofline_warnings
from sim.serve.prices.measured_iterations import not_measured
from sim.serve.results.starts import room_for_longest, why_no_room, why_not_so_long
from sim.serve.scheduling.sequences import Sequence

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.prices.profile import Profile
    from sim.serve.prices.costs import IterationCosts
    from sim.serve.replicas.pools import Pool
    from sim.serve.replicas.replica import Replica

VLLM = "vLLM"  # product of the records whose cache is as large as it is told to be
LATE = 0.1  # of all tokens
OVERLOADED = 0.1  # of all requests: more that wait at the last arrival are a queue that grows


class Served(Protocol):
    """What of a simulated workload decides the warnings: see `ServingSimulation`."""

    @property
    def scenario(self) -> Scenario: ...
    @property
    def pools(self) -> tuple[Pool, ...]: ...
    @property
    def refused(self) -> int: ...
    @property
    def costs(self) -> IterationCosts: ...
    @property
    def profile(self) -> Profile: ...
    @property
    def replicas(self) -> tuple[Replica, ...]: ...
    @property
    def sequences(self) -> list[Sequence]: ...


def waiting_at_last_arrival(sequences: Iterable[Sequence]) -> int:
    """Requests that have come and are not admitted yet when the last one comes; 0 where all come at once."""
    sequences = list(sequences)
    arrivals = [s.arrival_s for s in sequences]
    last_s = max(arrivals, default=0.0)
    if last_s == min(arrivals, default=0.0):
        return 0
    return sum(s.admitted_s > last_s for s in sequences if s.arrival_s < last_s)


def lacks_memory(sim: Served) -> list[str]:
    """Warn if the engine does not start, or if the requests' cache does not fit in memory."""
    if (why := why_no_room(sim.pools)) is not None:
        return [f"does not fit in memory, so it does not start: {why}; its times are of a server with more memory"]
    if (why := why_not_so_long(sim.pools)) is not None:
        return [f"does not start: {why}; its times are of a server that does"]
    out = []
    for pool in sim.pools:
        c, block = pool.capacity, sim.scenario.for_serving.kv_cache.block_tokens
        where = "" if len(sim.pools) == 1 else f", pool {pool.name}"
        if c.blocks > c.blocks_fit and c.room >= c.blocks:
            out.append(
                f"does not fit in the cache{where}: the requests need {c.blocks * block:,} tokens; "
                f"inference.kv_cache.max_tokens leaves room for {c.blocks_fit * block:,}"
            )
        elif c.blocks > c.blocks_fit:
            out.append(
                f"does not fit in memory{where}: the requests need a cache of {c.blocks * block:,} tokens; beside "
                f"weights and buffers there is room for {c.blocks_fit * block:,}"
            )
    return out


def why_not_served(sim: Served) -> str | None:
    """Say why the workload cannot be served, and what of it has how much room; None if it can."""
    if (why := why_no_room(sim.pools)) is not None:
        return f"does not fit in memory: {why}"
    if (why := why_not_so_long(sim.pools)) is not None:
        return f"does not start: {why}"
    return next(iter(lacks_memory(sim)), None)


def serving_warnings(sim: Served, fits: bool, shares: Shares) -> list[str]:
    out, inference = [], sim.scenario.for_serving
    if has_jitter(sim.scenario):
        out.append("faults.jitter: is not simulated for serving; stragglers and links are")
    out += not_measured(sim.scenario, sim.profile) if sim.costs.measured is None else []
    out += [*_whole_prompts(sim), *_too_long(sim), *_beyond_positions(sim)]
    waiting = waiting_at_last_arrival(sim.sequences)
    if fits and waiting > OVERLOADED * len(sim.sequences):
        out.append(
            f"requests come faster than they are served: {waiting:,} of {len(sim.sequences):,} wait when the last one "
            "arrives, so latencies grow with the number of requests (`stepsim search --slo` finds the highest rate)"
        )
    out += [*_cache_too_large(sim), *_streams_late(sim)]
    own = sim.scenario.model.checkpoint_modules
    others = own.formats if own is not None and is_published(inference, sim.scenario.model) else ()
    gpu, act = sim.scenario.cluster.gpu, sixteen_bit(inference.precision)
    for name in dict.fromkeys((inference.quantization, *others)):
        form = QUANTIZATIONS[name]
        if {form.matmul, form.expert_matmul} - {None, *gpu.peak_flops_per_s}:
            bits = 4 if "nvfp4" in (form.matmul, form.expert_matmul) else 8
            linear = form.matmul if form.matmul in gpu.peak_flops_per_s else act
            out.append(
                f"inference.quantization: {gpu.name} multiplies no {name}; weights are kept in {bits} bits and "
                f"multiplied in {linear}"
            )
    return out + roofline_warnings(shares)


def _cache_too_large(sim: Served) -> list[str]:
    """Warn of a cache that is asked for and does not fit: SGLang and TensorRT-LLM take what fits (SGLang,
    model_executor/model_runner_kv_cache_mixin.py, _apply_token_constraints), vLLM as much as it is told
    (v1/core/kv_cache_utils.py, may_override_num_blocks)."""
    i = sim.scenario.for_serving
    block, asked, out = i.kv_cache.block_tokens, i.kv_cache.max_tokens or 0, []
    if i.batching == "static":
        return []
    does = (
        f"{VLLM} runs out of memory with so many" if engine_of(i.engine).product == VLLM else "the engine takes no more"
    )
    room = min([pool.capacity.room for pool in sim.pools]) * block
    if asked > room:
        out.append(f"inference.kv_cache.max_tokens: found {asked:,}; there is room for {room:,}, and {does}")
    held = min([(pool.capacity.room + 1) * block * pool.capacity.stage_token_bytes for pool in sim.pools])
    if (given := i.kv_cache.memory_bytes) is not None and given > held:
        words = f"found {n_bytes(given)}; beside weights and an iteration's tensors there are {n_bytes(held)}"
        out.append(f"inference.kv_cache.memory_bytes: {words}, and {does}")
    return out


def _streams_late(sim: Served) -> list[str]:
    """Warn of a server whose process does not stream an iteration's tokens before the next ones come."""
    front = sim.costs.host.front
    if front is None:
        return []
    late = whole = 0
    for replica in sim.replicas:
        for iteration in replica.iterations:
            begin_s, end_s = iteration.spans[-1]
            tokens = iteration.load.sequences * iteration.steps
            whole += tokens
            if not front.keeps_up(iteration.load.sequences, (end_s - begin_s) / iteration.steps):
                late += tokens
    if late <= LATE * whole:
        return []
    does = (
        "tokens of several iterations leave in one piece, so a client sees longer gaps than inter_token_latency_s says"
    )
    if not engine_of(sim.scenario.for_serving.engine).joins_pieces:
        does = "pieces leave one by one, so a client falls further behind the longer this lasts, which is not simulated"
    return [
        f"the server's process cannot stream {late / whole:.0%} of the tokens before the next ones come: {does} (vLLM: "
        "--api-server-count starts more such processes, SGLang: --tokenizer-worker-num, TensorRT-LLM: "
        "num_postprocess_workers; one is simulated for each replica)"
    ]


def _whole_prompts(sim: Served) -> list[str]:
    """Warn of prompts that an engine which cuts none would refuse, or compute when next to no other request runs."""
    i, scheduler = sim.scenario.for_serving, sim.replicas[0].scheduler
    most, told = i.max_batch_tokens, scheduler.limits.batch_tokens
    if scheduler.splits or told <= most or i.batching == "static":
        return []
    lengths = [s.request.prompt_tokens for s in sim.sequences]
    longest, long = max(lengths), sum(n > most for n in lengths)
    does = f"computes the longest prompt ({longest:,} tokens) while at most {most - longest:,} requests run"
    if long:
        does = f"refuses {long:,} of {len(lengths):,} prompts, of which the longest has {longest:,} tokens"
    return [
        f"inference.max_batch_tokens: found {most:,}, with which engine {i.engine} {does}, as it cuts no prompts with "
        f"chunked_prefill false; simulated with {told:,}"
    ]


def _too_long(sim: Served) -> list[str]:
    """Warn of refused requests, and of a limit beyond the model's positions, which engines take only when told twice
    (vLLM, config/model.py: VLLM_ALLOW_LONG_MAX_MODEL_LEN; SGLang, srt/configs/model_config.py:
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN)."""
    i, positions, out = sim.scenario.for_serving, sim.scenario.model.longest, []
    if i.max_request_tokens is None:
        return []
    if sim.refused:
        out.append(
            f"inference.max_request_tokens: {sim.refused:,} of {sim.refused + len(sim.sequences):,} requests have more "
            f"than {i.max_request_tokens:,} tokens, prompt and answer together; engine {i.engine} refuses them"
        )
    if positions and i.max_request_tokens > positions:
        out.append(
            f"inference.max_request_tokens: {i.max_request_tokens:,} exceeds the {positions:,} positions that the "
            "model was made for (model.trained_positions); engines refuse that unless an environment variable allows it"
        )
    return out


def _beyond_positions(sim: Served) -> list[str]:
    """Warn of requests that are longer than the model's positions, and of a cache without room for one as long.

    vLLM (max_model_len), SGLang (context_length) and TensorRT-LLM (max_seq_len) take the positions of the model's
    config.json as their limit. They refuse longer requests, and do not start without that room.
    """
    longest, i = sim.scenario.model.longest, sim.scenario.for_serving
    lengths = [s.request.prompt_tokens + s.request.output_tokens for s in sim.sequences]
    long = [tokens for tokens in lengths if tokens > longest]
    if not longest or i.max_request_tokens is not None:
        return []
    if (found := room_for_longest(sim.pools)) is not None and why_no_room(sim.pools) is None:
        return [
            f"inference.max_request_tokens: left out, so engine {i.engine} takes the model's {found[0]:,} positions "
            f"and does not start, as its cache has room for {found[1]:,} tokens; simulated as if it had started"
        ]
    if not long:
        return []
    return [
        f"inference.requests: {len(long):,} of {len(lengths):,} have more tokens (prompt and answer, up to "
        f"{max(long):,}) than the {longest:,} positions that the model was made for (model.trained_positions); engines "
        "refuse such requests by default; simulated as if they were served"
    ]
