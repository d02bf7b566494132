"""Data parallelism and ZeRO, woven into the programs of blocks.

What is sent, in elements of a rank's parameters Ψ (Rajbhandari et al. 2020, sections 5 and 7, an all-reduce being a
reduce-scatter and an all-gather, a pass of Ψ each), with k micro-batches a step:

- zero 0: one all-reduce of the accumulated gradients: 2Ψ;
- zero 1: reduce-scatter of the gradients, all-gather of the updated parameters: 2Ψ; frameworks that all-reduce: 3Ψ;
- zero 2: a reduce-scatter each micro-batch, one all-gather: (k+1)Ψ; with `accumulate_unsharded` 2Ψ; with
  `accumulate_in_a_row` and r micro-batches in a row (k/r+1)Ψ; frameworks that all-reduce: (2k+1)Ψ;
- zero 3: parameters gathered for each forward and again for each backward, gradients reduce-scattered: 3kΨ; with
  `accumulate_unsharded` (2k+1)Ψ; without `reshard_after_forward` k gathers instead of 2k (one a step: `stays`).

Hybrid sharding (`shard_size` below dp·cp) adds an all-reduce of the reduced shard over the replicas
(Zhao et al. 2023, PyTorch FSDP, section 3.2), with every reduction or, with `all_reduce_once`, with the step's last
(torch's FSDP2, `set_requires_all_reduce`): 2kΨ/n or 2Ψ/n with shards over n ranks. Experts do the same over the ranks
that hold the same experts.
All of a rank's data-parallel traffic queues on one stream, "dp", but for that all-reduce: shards lie within nodes and
replicas across, so it has a stream of its own and waits for its shard (torch's FSDP2, `foreach_reduce`).

Norms' gradients are all-reduced over tp with sp as `ZeroEngine.sums_shared` and `sums_shared_once` say. What computes
around the messages is in `sim.programs.around_messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Block, BlockKind, Comm, Phase
from sim.core.timeline import DP, HOST, REPLICA, TO_HOST
from sim.inputs.parallelism import AT_THE_END
from sim.inputs.scenario import Scenario
from sim.models.dims import gathers_quantized_shards, holds_back_sums
from sim.models.frozen_weights import format_of
from sim.models.source import compute_bytes, source_of
from sim.programs.cast_copies import CastCopies, cast_copies
from sim.programs.eight_bit_parameters import EightBitParameters, eight_bit_parameters
from sim.programs.message_shares import message_shares
from sim.programs.parameters_on_host import OnHost, on_host_of
from sim.programs.two_levels import behind_replicas, quantized_messages
from sim.ranks.plan import Plan
from sim.variants.frameworks.records import framework_of, frees_gradients, zero_engine
from sim.variants.frameworks.zero import ZeroEngine


class DataParallel(Struct, frozen=True):
    """How a pipeline's first stage gathers parameters and reduces gradients; `behind_first`: how the others do. `shard`
    to `expert_replica` are numbers of ranks; bytes are of an element."""

    zero: int
    sync: str
    bucket_bytes: float
    shard: int
    replica: int
    expert_shard: int
    expert_replica: int
    parameter_bytes: float  # as the layers use it
    gathered_bytes: float  # as it is gathered
    gradient_bytes: float
    reshard: bool
    each_micro_batch: bool  # gradients are reduced every micro-batch
    gather_overlap: bool
    each_row: bool = False  # or once for the micro-batches that a stage takes in a row; else once a step
    fleeting_gradient_bytes: float = 0.0  # an element, of gradients that are freed between steps (`zero_grad`)
    late_gradient_bytes: float = 0.0  # an element, of gradients that a backward holds until it ends
    few_bits_bytes: float = 0.0  # an element, of frozen matrices in 4 or 8 bits, their scales left out
    matrix_bytes: float | None = None  # as layers' dense matrices are gathered, where it is not `gathered_bytes`
    engine: ZeroEngine = ZeroEngine()
    eight_bit: EightBitParameters = EightBitParameters()
    aligned: bool = False  # buckets are sent behind a stage's last backward (`aligns_stages`, `reduces_stages`)
    gather_bucket_bytes: int | None = None  # the least bytes of ZeRO-3's messages that gather a block's tensors
    replicas_once: bool = False  # of a step's reductions to a shard only the last goes on to the replicas
    held_back_bytes: float = 0.0  # an element, of a shard's sum that waits for this
    on_host: bool = False  # shards of gradients go to host memory, where the optimizer runs
    host: OnHost = OnHost()  # parameters in host memory, and gradients on their way there
    by_tensor: bool = False  # ZeRO-1 copies each rank's part of each gathered tensor by a kernel of its own
    prefetches: bool = True  # ZeRO-3 gathers a block's parameters while the block before it runs its backward
    dequantized_copies: int = 0  # how often ZeRO-3 copies the fp16 numbers that it makes of gathered 8-bit integers
    stays: bool = False  # ZeRO-3 without `reshard` keeps gathered parameters from the first forward to the step's end
    # ZeRO-3's replicas of shards share the optimizer: their number, of dense parameters and of experts; else 1.
    outer: int = 1
    expert_outer: int = 1
    secondary: int = 1  # ranks over which ZeRO-3 gathers from a second copy, except in the step's first forward
    local: int = 1  # ranks of a node that exchange gradients in 4 bits before nodes do
    gathered_early: bool = False  # ZeRO-1 gathers a rank's first stage while it updates the others
    input_first: tuple[Phase, ...] = ()  # phases in which ZeRO-3 gathers behind an action's input
    tied: int = 0  # elements of a matrix that ZeRO-3 gathers for embedding and output (`ZeroEngine.gathers_tied`)
    casts: CastCopies | None = None  # 16-bit copies of whole fp32 parameters under autocast
    gathered_late: bool = False  # and a stage when its first input has arrived (`ZeroEngine.gathers_when_used`)

    @property
    def behind_first(self) -> DataParallel:
        """The data parallelism of all stages but the first rank's first (`ZeroEngine.first_stage_alone`)."""
        if self.zero > 1 or self.sync != "bucketed" or not self.engine.first_stage_alone:
            return self
        return replace(self, bucket_bytes=float("inf"))

    @property
    def by_place(self) -> tuple[DataParallel, DataParallel, DataParallel]:
        """The data parallelism of the first rank's first stage, of the other ranks' first, and of all other stages.

        If first stages are gathered early, no stage has buckets (Megatron-LM 0.19, training/training.py:
        `per_chunk_disable_bucketing`; core 0.19, optimizer/optimizer.py: `ChainedOptimizer._step`).
        """
        later = self.behind_first
        if not self.gathered_early:
            return (replace(self, gathered_late=False) if self.gathered_late else self), later, later
        return later, later, replace(later, gathered_early=False)

    @property
    def _whole_reduction(self) -> tuple[str, ...]:
        """Collectives that leave the sum of whole gradients on every rank, or on those that go on with it."""
        if self.zero and self.engine.reduces_to_owners:
            return ("reduce",)
        return ("reduce", "broadcast") if self.sync == "reduce_broadcast" else ("all_reduce",)

    @property
    def at_the_end(self) -> bool:
        """Gradients are reduced when the last backward has ended, if they are reduced once a step."""
        return self.sync in AT_THE_END and not self.each_row

    @property
    def mixes_experts(self) -> bool:
        """Dense gradients and those of experts fill the same buckets, or are one block's (ZeRO-3)."""
        return self.zero == 3 or self.engine.mixes_experts

    @property
    def copies_replicas(self) -> bool:
        """Gradients are copied into buckets, which stay, and back (`ZeroEngine.copies_replicas`)."""
        return self.zero == 0 and self.engine.copies_replicas and self.shard * self.replica > 1

    @property
    def keeps_shards(self) -> bool:
        """Between backwards a rank keeps its shard of the gradients alone."""
        return self.each_micro_batch or self.each_row

    @property
    def exposed(self) -> bool:
        """No overlap (`dp_sync: after_backward`), but several reductions a step: each holds up computing, and so do
        ZeRO-3's gathers."""
        return self.sync == "after_backward" and (self.zero == 3 or self.each_micro_batch)

    def gather(self, name: str, params: float, experts: float, phase: Phase, handle: str) -> list[Comm]:
        """All-gathers of a unit's parameters from its shards; asynchronous if `handle` is given."""
        b, handle = self.gathered_bytes, "" if self.exposed else handle
        parts = (("shard", params * b, self.shard, ""), ("expert_shard", experts * b, self.expert_shard, "x"))
        return [
            Comm(f"{name} parameters", "all_gather", group, size, phase, not handle, handle and handle + tag, DP)
            for group, size, n, tag in parts
            if size > 0 and n > 1
        ]

    def gather_block(self, b: Block, phase: Phase, handle: str, first: bool = False, early: bool = False) -> list[Comm]:
        """`gather` of all that a block holds, its dense tensors in as many messages as `gather_bucket_bytes` says.
        `first`: for the step's first forward; `early`: before the first backward has ended."""
        whole = self.gather(b.name, self.gathered_params(b), self.gathered_experts(b), phase, handle)
        if self.outer > 1 and early:
            return behind_replicas(whole, (self.shard, self.expert_shard))
        if self.secondary > 1 and not first:
            whole = [replace(c, group="secondary") for c in whole]
        if self.gather_bucket_bytes is None or not whole or whole[0].group not in ("shard", "secondary"):
            return whole
        dense, *rest = whole
        shares = message_shares(b, dense.bytes / self.gather_bucket_bytes)
        handles = [dense.handle and f"{dense.handle}.{i}" for i in range(len(shares))]
        parts = zip(shares, handles, strict=True)
        return [*(replace(dense, bytes=dense.bytes * share, handle=own) for share, own in parts), *rest]

    def from_host(self, unit: Sequence[Block], gathers: list[Comm], phase: Phase, handle: str) -> list[Comm]:
        """A unit's gathers behind the copy of its shard, where parameters lie in host memory."""
        return self.host.fetched(unit, gathers, phase, "" if self.exposed else handle)

    @property
    def passes(self) -> bool:
        """Whole parameters come and go, from other ranks or from host memory."""
        return self.zero == 3 and (max(self.shard, self.expert_shard) > 1 or self.host.parameters)

    @property
    def gathers_twice(self) -> bool:
        """Each forward and each backward gathers all parameters."""
        return self.zero == 3 and self.reshard and not self.engine.live_elements

    def gathered_experts(self, b: Block) -> float:
        """A block's parameters of experts, as `gathered_params`: those that are kept in 8 bits, where ZeRO-3 gathers
        them so."""
        saved = self.eight_bit.elements(b)[1] if self.zero == 3 else 0.0
        return b.expert_params - saved * (1.0 - self.eight_bit.gathered / self.gathered_bytes)

    def gathered_params(self, b: Block) -> float:
        """A block's dense parameters, a matrix that is gathered in fewer bytes counted by its bytes. Frozen numbers of
        4 or 8 bits are gathered as they are kept, packed in the dtype of the others (bitsandbytes' `quant_storage`)."""
        whole = b.held_params - b.few_bit_params * (1.0 - self.few_bits_bytes / self.gathered_bytes)
        whole += self.tied if self.reshard and b.kind is BlockKind.HEAD else 0
        if self.matrix_bytes is None or b.in_sixteen_bits:
            return whole
        return whole - sum(m.elements for m in b.matrices) * (1.0 - self.matrix_bytes / self.gathered_bytes)

    @property
    def _of_replicas(self) -> str:
        """The collective that adds up shards of gradients over replicas."""
        return "reduce_scatter" if self.outer > 1 else "all_reduce"

    def reduce(
        self, name: str, params: float, experts: float, handle: str, last: bool = True, tensors: int = 1
    ) -> list[Comm]:
        """The reduction of the gradients of a unit of `tensors`, and their copies to host memory; asynchronous if
        `handle` is given. `last`: the step's last."""
        b, phase, handle = self.gradient_bytes, Phase.WEIGHT_GRAD, "" if self.exposed else handle
        if self.local > 1:
            return quantized_messages(name, params, tensors, (self.local, self.shard // self.local), handle)
        sharded = self.zero >= 1 and self.zero not in self.engine.all_reduced_at
        out: list[Comm] = []
        for prefix, elements, shard, replica in (
            ("", params, self.shard, self.replica),
            ("expert_", experts, self.expert_shard, self.expert_replica),
        ):
            size = elements * b
            steps = [
                ("reduce_scatter", f"{prefix}shard", size, shard, DP),
                (self._of_replicas, f"{prefix}replica", size / shard, replica, REPLICA),
            ][: 1 if self.replicas_once and not last else 2]
            if not sharded:
                group = f"{prefix}dp" if prefix else "dp_cp"
                steps = [(kind, group, size, shard * replica, DP) for kind in self._whole_reduction]
            if last or not self.replicas_once:
                copies = self.host.copied(elements / shard, last)
                steps += [(kind, HOST, nbytes, 0, TO_HOST) for kind, nbytes in copies]
            after = ""
            for i, (kind, group, nbytes, n, stream) in enumerate(steps):
                if nbytes > 0 and n != 1:
                    own = handle and f"{handle}{group}" + (f" {prefix}{i}" if group == HOST else "")
                    out.append(Comm(f"{name} gradients", kind, group, nbytes, phase, not handle, own, stream, after))
                    after = own
        return out


def make_data_parallel(plan: Plan, sums_unsharded: bool | None = None) -> DataParallel:
    """The data parallelism of a plan. `sums_unsharded`: whether micro-batches add up whole gradients, for another
    number of them than the scenario's; None: as `Scenario.sums_unsharded` says."""
    p, t = plan.scenario.parallelism, plan.scenario.for_training
    own_bytes, virtual = source_of(plan.scenario).parameter_bytes(), p.virtual_stages > 1 and p.pp > 1
    framework, engine = framework_of(t), zero_engine(t, p)
    sums_unsharded = plan.scenario.sums_unsharded if sums_unsharded is None else sums_unsharded
    gathered_bytes, messages, copies = _gathered(plan.scenario, own_bytes)
    quantized = gathers_quantized_shards(plan.scenario)
    behind_stage = engine.reduces_stages and p.zero >= 2 and p.pp > 1 and sums_unsharded and not p.reduces_rows
    found = DataParallel(
        zero=p.zero,
        sync="after_backward" if p.zero in engine.at_once_at else p.dp_sync,
        bucket_bytes=float(p.bucket_bytes),
        **_numbers_of_ranks(plan),
        parameter_bytes=own_bytes,
        gathered_bytes=gathered_bytes,
        gradient_bytes=dtype_bytes(t.grad_reduce_dtype),
        reshard=p.reshard_after_forward,
        each_micro_batch=p.zero >= 2 and not (p.reduces_rows or sums_unsharded),
        gather_overlap=bool(p.param_gather_overlap),
        each_row=p.reduces_rows,
        matrix_bytes=dtype_bytes(t.precision) if quantized or (t.fp8_param_gather and p.zero == 3) else None,
        few_bits_bytes=0.0 if (few := format_of(t.lora)) is None else few.data,
        engine=engine,
        eight_bit=eight_bit_parameters(plan.scenario),
        aligned=behind_stage or (engine.aligns_stages and virtual and p.zero < 2),
        gather_bucket_bytes=messages,
        replicas_once=p.holds_back_replicas,
        by_tensor=framework.gathers_tensor_by_tensor and p.zero == 1,
        prefetches=p.backward_prefetch or engine.fsdp_version != 1,
        dequantized_copies=copies,
        stays=p.keeps_gathered and (p.pp > 1 or p.reduces_rows or engine.keeps_unreduced),
        gathered_early=p.overlap_param_gather_with_optimizer_step,
        input_first=() if engine.fsdp_version and virtual else engine.input_first,
        tied=source_of(plan.scenario).tied_elements() if engine.gathers_tied and p.zero == 3 and p.pp == 1 else 0,
        casts=None if p.zero == 3 else cast_copies(plan.scenario, own_bytes),
        gathered_late=engine.gathers_when_used and p.zero == 1 and bool(p.param_gather_overlap) and not virtual,
    )
    return _with_gradients(found, plan.scenario)


def _numbers_of_ranks(plan: Plan) -> dict[str, Any]:
    """Fields of `DataParallel`: how many ranks share parameters, gradients and optimizer."""
    p, size, has_experts = plan.scenario.parallelism, plan.group_size, plan.scenario.model.may_have_experts
    replica, expert_replica = size("replica"), size("expert_replica") if has_experts else 1
    return {
        "shard": size("shard"),
        "replica": replica,
        "expert_shard": size("expert_shard") if has_experts else 1,
        "expert_replica": expert_replica,
        "outer": replica if p.shares_optimizer else 1,
        "expert_outer": expert_replica if p.shares_optimizer else 1,
        "secondary": size("secondary"),
        "local": size("local") if size("between") > 1 else 1,
    }


def _with_gradients(dp: DataParallel, scenario: Scenario) -> DataParallel:
    """Return `dp` with the fields on gradients that wait to be reduced, and on what lies in host memory."""
    p, t = scenario.parallelism, scenario.for_training
    dp = replace(dp, host=on_host_of(scenario, dp.engine, (dp.shard, dp.expert_shard), dp.tied))
    late, own_bytes = framework_of(t).adds_gradients_late, compute_bytes(t.precision)
    # A buffer of gradients holds the sum itself.
    held_back = dp.gradient_bytes if holds_back_sums(scenario) and dp.engine.fsdp_version else 0.0
    # torch's first FSDP adds shards up on the GPU.
    there = p.zero in dp.engine.on_host_at or dp.host.adds
    on_host = t.optimizer_offload == "cpu" and there and dp.keeps_shards
    return replace(
        dp,
        # DDP fills buckets with parameters' own gradients, where a hook reduces the sums kept beside them.
        bucket_bytes=float(p.bucket_bytes * (dp.gradient_bytes / own_bytes if late else 1.0)),
        fleeting_gradient_bytes=0.0 if on_host else _fleeting_bytes(scenario, dp.each_micro_batch, held_back),
        late_gradient_bytes=own_bytes if late else 0.0,
        held_back_bytes=held_back,
        on_host=on_host,
    )


def _fleeting_bytes(scenario: Scenario, reduces_each: bool, held_back_bytes: float) -> float:
    """Return `DataParallel.fleeting_gradient_bytes` of gradients that stay on the GPU; `reduces_each`: they are reduced
    every micro-batch."""
    t = scenario.for_training
    kept = dtype_bytes(t.grad_dtype if reduces_each else scenario.sum_dtype)
    return max(kept, held_back_bytes) if frees_gradients(t, scenario.parallelism.zero) else 0.0


def _gathered(scenario: Scenario, own_bytes: float) -> tuple[float, int | None, int]:
    """Return a gathered parameter's bytes, `gather_bucket_bytes`, and copies made of what integers stand for
    (`DataParallel.dequantized_copies`). Messages of integers, beside which their scales travel, have as many elements
    as those of parameters."""
    p, t = scenario.parallelism, scenario.for_training
    if p.param_gather_dtype != "int8":
        each = own_bytes if p.param_gather_dtype in (None, "fp8") else dtype_bytes(p.param_gather_dtype)
        return each, p.gather_bucket_bytes, 0
    each = dtype_bytes("int8") + FP32_BYTES / zero_engine(t, p).scaled_elements
    messages = None if p.gather_bucket_bytes is None else round(p.gather_bucket_bytes * each / own_bytes)
    return each, messages, 1 if t.precision == "fp16" else 2  # torch.cat; a cast to bf16
