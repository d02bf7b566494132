"""On which stream the collectives of each group queue during forwards and backwards."""

from __future__ import annotations

from sim.core.timeline import DP, REPLICA
from sim.ranks.plan import Plan
from sim.variants.frameworks.records import zero_engine


def streams_of_groups(plan: Plan) -> dict[str, str]:
    """Return the stream of each group whose collectives run beside forwards and backwards.

    Without ZeRO, gradients are all-reduced over dp and cp at once, and so they are with some stages of some engines
    (`ZeroEngine.all_reduced_at`: DeepSpeed's first two). With ZeRO they are scattered over the shards, then
    all-reduced over the replicas of the shards (Megatron's num_distributed_optimizer_instances, FSDP's HSDP).
    `tests/sim/programs/test_program_check.py` compares this with the messages of every shipped scenario's programs.
    """
    p = plan.scenario.parallelism
    whole = p.zero == 0 or p.zero in zero_engine(plan.scenario.for_training, p).all_reduced_at
    data = {} if p.zero == 0 else {"shard": DP, "replica": REPLICA}
    data |= {"secondary": DP} if p.zero_hpz_partition_size else {}
    data |= {"local": DP, "between": DP} if p.zero_quantized_gradients else {}
    context = ("cp_exchanged", "cp_ring") if p.cp_exchanged > 1 else ()
    streams = {**{name: name for name in ("tp", "cp", *context)}, **data}
    if plan.scenario.model.moe is not None:
        streams |= {"ep": "ep", "expert_tp": "expert_tp", **{f"expert_{name}": s for name, s in data.items()}}
        streams |= {"expert_dp": DP} if whole else {}
    return streams | ({"dp_cp": DP} if whole else {})
