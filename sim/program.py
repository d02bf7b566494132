"""What one rank executes, in program order: computations, communications and waits.

A program is read like the code of a training loop that launches CUDA work on streams:

- `Compute` runs on the compute stream, after the computations before it;
- `Comm` runs on its own stream, in order there, and starts once the last computation before it in the program
  has ended (its input) and all its members have arrived. A blocking one holds up the next computation;
  an asynchronous one is waited for by the `Wait` of its handle (or by the end of the step);
- `Wait(handle)` makes the next computation wait for that communication.

So an overlap is written down where the real code writes it, never as a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Which action of a schedule an item belongs to; a full backward runs INPUT_GRAD and WEIGHT_GRAD items."""

    __hash__ = str.__hash__  # Enum's is written in Python; operators are looked up often
    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on one rank.

    `kind` says how `shape` is read and how it is priced:
    gemm (batch, m, n, k): `[m, k] x [k, n]`, batch times; grouped_gemm (groups, m per group, n, k);
    attention_forward, attention_backward (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, causal 0/1):
    fused; norm, elementwise, softmax, embedding, cross_entropy, optimizer, permute, cast, copy (elements,): bound by
    memory;
    block: a whole measured part of the model, shape () and `name` its profile key.
    `flops` counts a multiply-add as 2; `bytes` is what is read from and written to device memory;
    `kernels` is how many launches it takes; 0: they are counted with another operator, which issues them too.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    flops: float
    bytes: float
    phase: Phase
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective of a group that this rank is a member of.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv (a ring shift within `group`),
    offload, reload (host copies; `group` is "host").
    `group`: tp, cp, ep, dp, ... (names of `sim.plan`). `bytes` as nccl-tests counts them: the full buffer
    (all_gather: the gathered output; reduce_scatter: the input; all_to_all: one rank's send buffer; send_recv: the
    message).
    `stream`: where it queues; by default a stream named after the group. `after`: the handle of an asynchronous one
    on another stream that it waits for, too.
    """

    name: str
    kind: str
    group: str
    bytes: float
    phase: Phase
    blocking: bool = True
    handle: str = ""
    stream: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """The next computation waits for the communication whose `handle` this is."""

    handle: str
    phase: Phase


BLOCK_END = Wait("", Phase.FORWARD)  # waits for nothing: tells where a block ends and the next begins
Item = Compute | Comm | Wait
Program = tuple[Item, ...]


class Saved(NamedTuple):
    """Bytes that a forward keeps for its backward. `part`: attention | mlp | norm | embedding | head | moe | layer.

    `weight_grad`: still needed by the weight gradient (freed after W); else freed after the input gradient (I or B).
    """

    part: str
    name: str
    bytes: float
    weight_grad: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, embedding or head as one rank runs it, for one micro-batch.

    `backward` is in execution order; its items are INPUT_GRAD or WEIGHT_GRAD and a split backward runs just one sort.
    `recompute` is rerun right before the backward (empty without recomputation); its items are INPUT_GRAD.
    `params` and `expert_params` are this rank's own parameter counts (tensor- and expert-parallel shards taken,
    data-parallel sharding not); `tensors` are the elements of each tensor that `params` counts.
    `forward_peak_bytes` and `backward_peak_bytes` are transient, beyond what is saved (recomputed activations included
    in the latter). `workspace_bytes` stay allocated from the first backward on, one set for all layers of these shapes
    on a rank; `quantized_bytes` are its weights in the matmuls' own format, kept beside the 16-bit ones.
    `rebuilt_bytes`: what a rerun brings back that a split backward's weight half needs.
    `key` names the block in a profile of measured blocks (see `sim.prices.costs`), "" where none can be.
    """

    name: str
    forward: Program
    backward: Program
    recompute: Program
    saved: tuple[Saved, ...]
    params: int
    expert_params: int = 0
    tensors: tuple[int, ...] = ()
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0
    key: str = ""
    workspace_bytes: float = 0.0
    quantized_bytes: float = 0.0
    rebuilt_bytes: float = 0.0
    frozen_params: int = 0  # beside `params`: kept and gathered, never updated

    @property
    def held_params(self) -> int:
        """Dense parameters, updated or not."""
        return self.params + self.frozen_params
