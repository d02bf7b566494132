"""Define how a framework reduces gradients and gathers parameters: the part of its record that is about ZeRO."""

from __future__ import annotations

from typing import NamedTuple

from sim.core.program import Phase

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb


class ZeroEngine(NamedTuple):
    """Hold how a framework reduces gradients and gathers parameters. Tuples list ZeRO stages.

    `all_reduced_at`: whole gradients are all-reduced, and each rank goes on with its shard. `all_reduces_for_matrices`:
    so they are at stage 1 with an optimizer that updates whole matrices. `reduces_to_owners`: instead each part of a
    bucket is reduced to the rank that updates it, one part after the other. `at_once_at`: in one message after the last
    backward, whatever `parallelism.dp_sync` says. Defaults of keys of `parallelism`: `alone_at`: `dp_sync` is
    after_backward; `gathers_ahead`: `param_gather_overlap`; `bucket_bytes`; `gather_bucket_elements`, of
    `gather_bucket_bytes`. `bucket_elements`: in place of `bucket_bytes`, gradients of a bucket: at least so many, and
    so many for each of the dp ranks. `first_stage_alone`: with ZeRO-0 and -1 the first rank's first stage alone fills
    buckets, every other stage has one. `gathers_when_used`: without virtual stages ZeRO-1 starts the gather of such a
    stage behind the arrival of its first input, so that nothing hides it. `aligns_stages`: with virtual stages a
    stage's buckets are all sent when its last backward has ended. `buckets_shards`: with ZeRO-3 a layer's gradients are
    reduced in such buckets, too. `closes_before`: a bucket is sent before a tensor would make it larger than
    `bucket_bytes`, not after. `mixes_experts`: gradients of experts fill the same buckets as the others', in place of
    buckets of their own.

    `joining_accesses`: memory accesses of each reduced element in copies and the division before it is sent, in the
    dtype of the reduction; `views_accesses`: in the layers' dtype, where gradients of views are joined to one of the
    flat parameter. `joining_kernels`: of these, for each tensor and for each message.
    `copies_replicas`: with ZeRO-0, torch's DDP: each gradient is divided into its bucket (2 accesses) and copied back
    when all are reduced (2), in place of these copies, and all buckets stay beside the gradients
    (torch/csrc/distributed/c10d/reducer.cpp: `mark_variable_ready_dense`, `copy_bucket_to_grad`, unless
    `gradient_as_bucket_view`).
    `buffers`: tensors of a bucket's size that stay; there is one more where reductions overlap with ZeRO-1 or -2, and
    one more while a bucket is reduced. `shard_bytes`: moved for each element of a rank's shard of the gradients before
    the optimizer reads an fp32 copy of it. `updated_elements`: with ZeRO-3 a rank updates so many parameters at a time,
    and has that copy of them alone. `on_host_at`: with `training.optimizer_offload: cpu` a shard of the
    gradients lies in host memory. `live_elements`: with ZeRO-3 so many parameters may be gathered at once; the last of
    the forward stay for the backward. `scaled_elements`: parameters may be gathered as 8-bit integers
    (`parallelism.param_gather_dtype`), so many with one fp32 scale; 0: they cannot. `kept_last`: with ZeRO-3 so many
    units at the end of the model stay gathered from the forward to the backward, which begins with them.
    `ends_together`: embedding, last norm and output are one unit, torch's root: gathered as a forward begins, kept
    until its backward has ended, and reduced then (torch/distributed/ fsdp/_fully_shard/_fsdp_state.py: `_lazy_init`,
    `_root_post_backward_final_callback`). `root_again`: it is freed behind the forward, and gathered as the backward
    begins. `gathers_tied`: with ZeRO-3 a matrix that embedding and output share is a unit of its own, gathered for
    either and freed behind it; the backward begins with it and keeps it to its end, when its one gradient is whole
    (llm-foundry models/mpt/modeling_mpt.py: `child._fsdp_wrap`; torch/distributed/fsdp: `_post_backward_hook`).
    `ends_stay`: embedding, last norm and output, which are in no unit, are gathered once a step and stay to its
    end. `fills_buckets`: where every micro-batch's gradients are reduced, each is copied into a bucket even if it has
    that dtype, unless its matmul wrote it there, and the shard that comes back is added to the rank's, to zeros in the
    first micro-batch. `ahead_elements`: units are gathered ahead until they have so many parameters; a backward begins
    with such a run, of which its own unit arrives last. `queued_elements`: buckets of gradients that are reduced stay
    until more than so many gradients wait behind the oldest. `replicas_once`: the default of
    `parallelism.all_reduce_once`. `sums_shared`: with ZeRO-3, before a unit is reduced, the gradient of each of its
    tensors that all ranks of tp hold whole (`Block.shared`) is all-reduced over them, and the computation waits
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `_get_grad_inner_tensor`). `sums_shared_once`: all these
    gradients of a rank are joined in one tensor once a step, behind their reduction over data-parallel ranks,
    all-reduced over tp, and copied back one by one (megatron/core/distributed/ finalize_model_grads.py:
    `_allreduce_non_tensor_model_parallel_grads`); of routers, biases and matrices that are not split, too.

    `input_first`: the phases in which ZeRO-3's gathers wait for the input of a pipeline's action; torch's FSDP: for the
    stream that computes, which has waited for the message, at the root's forward (torch/distributed/fsdp/_fully_shard/
    _fsdp_state.py: `_root_pre_forward`; _runtime_utils.py: `_root_pre_forward`). With several stages a rank, torch's
    schedules gather them with the step (pipelining/schedules.py: `_add_unshard_reshard`).

    `reduces_stages`: in a pipeline, FSDP2's reductions of a stage's sums of gradients begin when its last backward has
    ended (torch/distributed/pipelining/stage.py: `perform_reduce_grad`, formerly in `backward_maybe_with_nosync`). Left
    out: that with several stages a rank its next computation waits for them (`finalize_backward` in
    _fsdp_param_group.py).

    `copies_gathered`: with ZeRO-3 a block's parameters are copied out of the buffer that they arrive in. torch's
    allocator gives memory back to the stream that it was allocated on: `gathers_apart` says that these buffers are
    allocated on a stream of their own, `shards_apart` that a gradient's shards are (torch/distributed/fsdp/
    _fully_shard/_fsdp_collectives.py: `foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).

    `adds_up_as_sent`: whole gradients that ZeRO-2 or -3 adds up before it reduces them have the dtype of the reduction,
    and a shard comes to `training.grad_dtype` behind it (torch/distributed/fsdp/_fully_shard/_fsdp_param.py:
    `to_accumulated_grad_if_needed`; _fsdp_collectives.py: `foreach_reduce`). `sends_in_precision`: with ZeRO-2 and -3
    gradients are reduced in the precision's 16-bit dtype, the default of `training.grad_reduce_dtype`
    (accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin.set_mixed_precision). `keeps_unreduced`: with
    ZeRO-3 without `reshard_after_forward` a backward that reduces nothing leaves its parameters gathered
    (torch/distributed/fsdp/_runtime_utils.py: `_should_free_in_backward`; not FSDP2's `post_backward`).

    `fsdp_version`: of torch's FSDP, which ZeRO-2 and -3 are; 0 where it is another's. `or_torch`: torch's FSDP2 can
    take that one's place (megatron/core/distributed/torch_fully_sharded_data_parallel.py, which makes units of layers,
    embedding and output, too). `flat_at`: the values of `parallelism.zero` with which the optimizer has a rank's shards
    as vectors, not as rows of matrices. `one_tensor_a_unit`: such a vector is one parameter to it, else it has the
    parts of the unit's tensors that lie there (torch/distributed/fsdp: `use_orig_params`). `clips_tensors_at`: values
    with which clipping loops over tensors; `clips_whole_at`: with which each rank clips whole gradients, not its shard.
    """

    fsdp_version: int = 2
    or_torch: bool = False
    one_tensor_a_unit: bool = False
    clips_tensors_at: tuple[int, ...] = ()
    clips_whole_at: tuple[int, ...] = ()
    flat_at: tuple[int, ...] = ()

    all_reduced_at: tuple[int, ...] = ()
    all_reduces_for_matrices: bool = False
    reduces_to_owners: bool = False
    at_once_at: tuple[int, ...] = ()
    alone_at: tuple[int, ...] = ()
    gathers_ahead: bool = True
    bucket_bytes: int = DDP_BUCKET_BYTES
    gather_bucket_elements: int | None = None
    bucket_elements: tuple[int, int] | None = None
    first_stage_alone: bool = False
    gathers_when_used: bool = False
    aligns_stages: bool = False
    buckets_shards: bool = False
    closes_before: bool = False
    mixes_experts: bool = False
    joining_accesses: int = 0
    views_accesses: int = 0
    joining_kernels: tuple[int, int] = (0, 0)
    copies_replicas: bool = False
    buffers: int = 0
    shard_bytes: float = 0.0
    updated_elements: int = 0
    on_host_at: tuple[int, ...] = ()
    live_elements: int = 0
    scaled_elements: int = 0
    kept_last: int = 0
    ends_together: bool = False
    root_again: bool = False
    gathers_tied: bool = False
    ends_stay: bool = False
    fills_buckets: bool = False
    ahead_elements: int = 0
    queued_elements: int = 0
    replicas_once: bool = False
    sums_shared: bool = False
    sums_shared_once: bool = False
    input_first: tuple[Phase, ...] = (Phase.FORWARD,)
    reduces_stages: bool = False
    copies_gathered: bool = True
    gathers_apart: bool = True
    shards_apart: bool = True
    adds_up_as_sent: bool = True
    sends_in_precision: bool = False
    keeps_unreduced: bool = False

    @property
    def as_first_fsdp(self) -> ZeroEngine:
        """This engine's record with torch's first FSDP (torch/distributed/fsdp) in place of FSDP2.

        _flat_param.py, `_get_unflat_views_unaligned`: parameters are views of what is gathered, and the backward of
        torch.split joins their gradients (2 accesses). _runtime_utils.py, `_reduce_grad`: these are divided (2). Layers
        alone are wrapped; `_post_forward_reshard`: the root's parameters stay.
        """
        return self._replace(
            fsdp_version=1,
            flat_at=(2, 3),  # `FlatParameter`
            clips_tensors_at=(2, 3),  # fully_sharded_data_parallel.py: `_get_grad_norm`, `clip_grad_norm_`
            copies_gathered=False,
            gathers_apart=False,
            joining_accesses=2,
            views_accesses=2,
            joining_kernels=(0, 2),
            ends_together=True,
            kept_last=0,
            root_again=False,
            sums_shared=False,
            reduces_stages=False,
            keeps_unreduced=True,
        )

    def bucket_bytes_of(self, dp: int, element_bytes: float) -> int:
        """Return the size of a bucket of gradients of `element_bytes` each, among `dp` ranks."""
        if self.bucket_elements is None:
            return self.bucket_bytes
        least, each = self.bucket_elements
        return round(max(least, each * dp) * element_bytes)
