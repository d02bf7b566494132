"""Whether a served workload's engine starts at all, with its weights, its cache and its limits."""

from __future__ import annotations

from sim.core.units import n_bytes, percent
from sim.inputs.engine_file import engine_of
from sim.serve.memory import outside_of
from sim.serve.replicas.pools import Pool


def why_no_room(pools: tuple[Pool, ...]) -> str | None:
    """What a GPU would hold and what it has, where beside that there is no room for one block of the cache; None where
    there is. vLLM ends with "No available memory for the cache blocks" then (v1/core/kv_cache_utils.py), others alike.
    """
    pool = next((p for p in pools if not p.capacity.starts), None)
    if pool is None:
        return None
    c, memory = pool.capacity, pool.scenario.cluster.gpu.shown_bytes
    weights, buffers = max(zip(c.weight_bytes, c.buffer_bytes, strict=True), key=sum)
    where = "" if len(pools) == 1 else f"pool {pool.name}: "
    held = f"{where}weights {n_bytes(weights)}"
    if weights > memory:
        return f"{held}, the GPU has {n_bytes(memory)}"
    own_bytes = outside_of(pool.scenario).held
    held += f"{',' if own_bytes else ' and'} an iteration's tensors {n_bytes(buffers)}"
    held += f" and CUDA's context and communicators {n_bytes(own_bytes)}" if own_bytes else ""
    return f"{held}, the GPU has {n_bytes(memory)}{_part_for_engine(pool, memory)}"


def room_for_longest(pools: tuple[Pool, ...]) -> tuple[int, int] | None:
    """Tokens of the longest request that an engine takes, and those that its cache has room for, where these are fewer
    and the engine therefore does not start (vLLM, v1/core/kv_cache_utils.py, check_enough_kv_cache_memory; before V1
    engine/llm_engine.py: a sequence as long as max_model_len has to fit).
    """
    for pool in pools:
        inference = pool.scenario.for_serving
        longest, block = inference.longest(pool.scenario.model), inference.kv_cache.block_tokens
        asked = inference.batching != "static" and engine_of(inference.engine).room_for_longest
        if asked and -(-longest // block) > pool.capacity.longest_fit:
            return longest, pool.capacity.longest_fit * block
    return None


def why_not_so_long(pools: tuple[Pool, ...]) -> str | None:
    """Return why an engine that was told how long requests may be does not start; None where it does."""
    inference = pools[-1].scenario.for_serving
    most = inference.max_request_tokens
    if most is None:
        return None
    if (found := room_for_longest(pools)) is not None:
        return f"a request may have {most:,} tokens (inference.max_request_tokens), the cache has room for {found[1]:,}"
    return None


def why_not_started(pools: tuple[Pool, ...]) -> str | None:
    """Return why an engine does not start; None where it does."""
    return why_no_room(pools) or why_not_so_long(pools)


def _part_for_engine(pool: Pool, memory: float) -> str:
    """What the engine takes of a GPU, where that is not all."""
    inference = pool.scenario.for_serving
    whole = inference.batching == "static" or inference.kv_cache.memory_bytes is not None
    share = 1.0 if whole else inference.kv_cache.memory_fraction
    if share == 1.0:
        return ""
    return f", of which the engine takes {n_bytes(share * memory)} (kv_cache.memory_fraction {percent(share)})"
