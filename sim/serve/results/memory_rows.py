"""What the GPUs of a served workload hold: in use, and reserved by the engine."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.units import rank_numbers
from sim.results.beside_allocator import left_of
from sim.results.fit import RESERVED_UNCERTAINTY
from sim.results.records import MemoryRow
from sim.serve.memory import buffer_bytes, outside_of, routed_bytes
from sim.serve.replicas.pools import Pool
from sim.serve.results.timeline import classes_of


def memory_rows(pools: tuple[Pool, ...]) -> tuple[MemoryRow, ...]:
    """Per pool and pipeline stage: weights, the most cache in use (as activations), and an iteration's own tensors.

    An engine reserves the whole cache when it starts, static batching what its batch needs. One that does not start
    has no cache.
    """
    out = list[MemoryRow]()
    for pool in pools:
        inference = pool.scenario.for_serving
        block = inference.kv_cache.block_tokens
        used = max([int((s.held + s.unused).max()) for s in [r.states.arrays() for r in pool.replicas]])
        whole = used if inference.batching == "static" else pool.capacity.blocks
        if not pool.capacity.starts:
            used = whole = 0
        for i, c in enumerate(classes_of(pool, pool.replicas[0])):
            block_bytes = block * pool.capacity.token_bytes[i]
            cache = used * block_bytes
            weights, buffers = pool.capacity.weight_bytes[i], pool.capacity.buffer_bytes[i]
            out.append(
                MemoryRow(
                    ranks=rank_numbers(c.ranks),
                    rank=c.rank,
                    count=len(c.ranks),
                    parameters=weights,
                    gradients=0.0,
                    optimizer=0.0,
                    activations=cache,
                    kv_cache=cache,
                    buffers=buffers,
                    peak=weights + cache + buffers,
                    reserved=weights + whole * block_bytes + buffers,
                    uncertainty=RESERVED_UNCERTAINTY if inference.batching == "static" else 0.0,
                    **_limit(pool),
                )
            )
    return (*out, *_expert_memory(pools[-1]))


def _limit(pool: Pool) -> dict[str, float]:
    """What an engine's process leaves of a GPU for its tensors; of one of which nothing is known, CUDA's context."""
    gpu, own = pool.scenario.cluster.gpu, outside_of(pool.scenario).held
    limit = gpu.shown_bytes - own if own else left_of(gpu).limit
    return {"limit": limit, "beside": gpu.memory_bytes - limit}


def _expert_memory(pool: Pool) -> tuple[MemoryRow, ...]:
    """GPUs that have routed experts alone: these, and the tensors of the largest micro-batch."""
    costs, afd = pool.costs, pool.costs.afd
    if afd is None:
        return ()
    d, (stage,) = afd.experts.dims, costs.stages
    tokens = max([afd.tokens_of(i.load) for r in pool.replicas for i in r.iterations])
    weights = routed_bytes(d, costs.specs, stage)
    buffers = buffer_bytes(d, costs.specs, replace(stage, embedding=False, head=False), tokens, 0)
    first = pool.scenario.parallelism.ranks
    ranks, held = rank_numbers(tuple(range(first, first + afd.gpus))), weights + buffers
    none = {"gradients": 0.0, "optimizer": 0.0, "activations": 0.0, "kv_cache": 0.0}
    of_all = {"parameters": weights, "buffers": buffers, "peak": held, "reserved": held, **_limit(pool)}
    return (MemoryRow(ranks=ranks, rank=first, count=afd.gpus, **none, **of_all),)
