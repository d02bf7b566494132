"""How DeepSpeed's ZeRO shards, reduces and gathers; two of `sim.variants.frameworks.records` run under its engine."""

from __future__ import annotations

from sim.variants.frameworks.parts import Former
from sim.variants.frameworks.zero import ZeroEngine

# deepspeed/runtime/zero. config.py: reduce_bucket_size and stage3_prefetch_bucket_size are elements;
# `overlap_comm_valid`; stage3_max_live_parameters, which the prefetcher fills (partitioned_param_coordinator.py:
# `__params_to_release` keeps what the backward's prefetch has passed over). stage_1_and_2.py: a bucket is filled (2
# accesses), divided by the ranks (2), and its parts joined (2) for one all-reduce (`use_multi_rank_bucket_allreduce`),
# and parameters are gathered in `step`. runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced: joined and
# divided likewise. Of a shard, before the optimizer: largest and smallest number (4 bytes, has_inf_or_nan), an fp64
# copy for the norm (16, get_grad_norm_direct), the fp32 copy (6), and clipping that (4 more than in 16 bits).
# stage3.py: `_prepare_sub_group` makes that copy for the parameters of one sub-group (`sub_group_size`).
DEEPSPEED_ZERO = ZeroEngine(
    fsdp_version=0,
    flat_at=(1, 2, 3),  # single_partition_of_fp32_groups; fp32_partitioned_groups_flat
    all_reduced_at=(1, 2),
    alone_at=(0, 1, 2),
    gathers_ahead=False,
    bucket_elements=(500_000_000, 0),
    gather_bucket_elements=50_000_000,
    buckets_shards=True,
    closes_before=True,
    mixes_experts=True,  # stage_1_and_2.py: `ipg_buckets`, one for a dtype
    joining_accesses=6,
    joining_kernels=(1, 2),  # copied into the bucket; divided, and the ranks' parts joined
    buffers=1,
    shard_bytes=30.0,
    updated_elements=1_000_000_000,
    # stage_1_and_2.py: async_inplace_copy_grad_to_fp32_buffer_from_gpu; stage3.py: grad_partitions_flat_buffer
    on_host_at=(2, 3),
    live_elements=1_000_000_000,
    scaled_elements=8_000,  # zero/partition_parameters.py: CUDAQuantizer.target_group_size
    gathers_apart=False,
    shards_apart=False,
    adds_up_as_sent=False,
)
# stage_1_and_2.py of 0.12.3, average_tensor: `dist.reduce` of each part of a bucket. Left out: they were not joined.
REDUCED_TO_OWNERS = Former(
    "2023-12",
    {"zero": DEEPSPEED_ZERO._replace(reduces_to_owners=True)},
    "DeepSpeed before 0.12.4, which brought use_multi_rank_bucket_allreduce",
)
