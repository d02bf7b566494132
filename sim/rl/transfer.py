"""New weights on their way from the trainer to the engine (a "refit").

The trainer's ranks hold pieces of every matrix, the engine's ranks other pieces. NeMo-RL, verl and OpenRLHF make whole
16-bit tensors in between:

1. gather: the ranks that together hold one copy of the parameters all-gather them (torch's `DTensor.full_tensor`,
   Megatron's export), M·(n−1)/n bytes to each of n ranks, for M bytes of the model;
2. ipc (the engine on the same GPUs): its process opens the gathered tensors where they lie (CUDA IPC), so nothing
   travels; or broadcast: the trainer's first rank sends all M bytes to every rank of the engine;
3. load: each rank of the engine copies its own piece into place, which reads and writes these bytes once.

Tensor follows tensor in buckets, and the three are taken one after another: implementations that fetch ahead hide a
part. An engine with quantized weights gets 16 bits and quantizes them itself, which is not priced.
"""

from __future__ import annotations

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.inputs.rl_config import Rl
from sim.models.parameters import count_parameters
from sim.prices.rank_prices import Pricing
from sim.ranks.plan import Plan
from sim.rl.records import WeightTransfer

BUCKETS, BUCKET_BYTES = 2, 2.0**30  # vLLM's packed weight transfer: two buffers of 1 GiB


def weight_transfer(rl: Rl, pricing: Pricing, engine_weight_bytes: float) -> WeightTransfer:
    """Bytes and seconds of one transfer. `engine_weight_bytes`: of one rank of the engine.

    With pools of their own the engine's ranks follow the trainer's.
    """
    plan = pricing.plan
    scenario = plan.scenario
    size = count_parameters(scenario.model).total * dtype_bytes(sixteen_bit(scenario.for_training.precision))
    holders = holders_of_a_copy(plan)
    gather_s = pricing.collective("all_gather", holders, size).seconds if len(holders) > 1 else 0.0
    broadcast_s = 0.0
    if rl.transfer == "broadcast":
        first = 0 if rl.colocated else scenario.parallelism.ranks
        ranks = sorted({0, *range(first, first + rl.generation.ranks)})
        broadcast_s = pricing.collective("broadcast", ranks, size).seconds if len(ranks) > 1 else 0.0
    load_s = 2.0 * engine_weight_bytes / scenario.cluster.gpu.memory_bandwidth_bytes_per_s
    return WeightTransfer(rl.transfer, size, len(holders), gather_s, broadcast_s, load_s)


def holders_of_a_copy(plan: Plan) -> list[int]:
    """Ranks that together hold one copy of all parameters, rank 0's: tp·pp of them, with experts those of all expert
    ranks, under ZeRO-3 those of all shards. Dense parameters and experts are taken to be gathered over the same."""
    p = plan.scenario.parallelism
    shards = plan.group_size("shard") if p.zero == 3 else 1
    of_stage = max(p.tp * shards, p.ep * p.expert_tp * (plan.group_size("expert_shard") if p.zero == 3 else 1))
    plane = plan.group("plane", 0)
    stride = plan.mesh.strides["pp"]
    return sorted(rank + stage * stride for stage in range(p.pp) for rank in plane[:of_stage])


def buffer_bytes(plan: Plan) -> float:
    """Return what a transfer holds for the moment: buckets of gathered tensors, each at least the largest tensor."""
    model, t = plan.scenario.model, plan.scenario.for_training
    element = dtype_bytes(sixteen_bit(t.precision))
    largest = model.vocab * model.hidden * element
    return min(BUCKETS * max(BUCKET_BYTES, largest), count_parameters(model).total * element)
