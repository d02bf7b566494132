"""The program of one rank, in order: computations, communications and waits.

A program is read like the code of a training loop that launches CUDA work on streams:

- `Compute` runs on the compute stream, after the computations before it;
- `Comm` runs on its own stream, in order there, and starts once the last computation before it in the program
  has ended (its input) and all its members have arrived. A blocking one holds up the next computation;
  an asynchronous one is waited for by the `Wait` of its handle (or by the end of the step);
- `Wait(handle)` makes the next computation wait for that communication.

So an overlap is written down where the real code writes it, never as a factor.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeGuard

from msgspec import Struct


class Phase(StrEnum):
    """Which action of a schedule an item belongs to; a full backward runs INPUT_GRAD and WEIGHT_GRAD items."""

    __hash__ = str.__hash__  # Enum's is written in Python; operators are looked up often
    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    OPTIMIZER = "optimizer"


class Role(StrEnum):
    """Which of a layer's three products a matmul computes: its output, or the gradient of its input or its weights.

    The phase does not say it: a recomputed forward is an OUTPUT, though it runs in phase INPUT_GRAD.
    """

    __hash__ = str.__hash__
    OUTPUT = "output"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class BlockKind(StrEnum):
    """The pieces that a model is cut into."""

    __hash__ = str.__hash__
    EMBEDDING = "embedding"
    LAYER = "layer"
    NORM = "final norm"  # by itself; else of the head
    HEAD = "head"
    MTP = "multi-token prediction"


class ModelPart(StrEnum):
    """The part of a model, or of a step, whose work an operator is."""

    __hash__ = str.__hash__
    EMBEDDING = "embedding"
    ATTENTION = "attention"  # its projections, core and residual sum
    STATE_SPACE = "state space"  # what stands in attention's place
    MLP = "mlp"
    EXPERTS = "experts"  # router, routed and shared experts, and what sorts tokens
    NORM = "norm"  # over the hidden size
    HEAD = "head"  # output matrix and loss
    LAYER = "layer"  # of a layer, its parts not told apart: measured blocks, much of captured programs
    OPTIMIZER = "optimizer"  # with clipping, and what is done to the gradient buffer
    PARAMETER_COPIES = "parameter copies"  # gathered parameters unpacked and cast
    COMMUNICATION = "communication"
    HOST = "host"  # the device waits for it
    OTHER = "other"


PART_OF_BLOCK = {
    BlockKind.EMBEDDING: ModelPart.EMBEDDING,
    BlockKind.LAYER: ModelPart.LAYER,
    BlockKind.NORM: ModelPart.NORM,
    BlockKind.HEAD: ModelPart.HEAD,
    BlockKind.MTP: ModelPart.LAYER,
}  # of operators of which nothing more is known


DEPTHWISE = "depthwise"  # a kernel of convolutions whose outputs see one channel each
ALIGNED = 8  # elements of 16 bits that tensor cores load at once (cuBLAS's alignment of 16 bytes)
# Kernels of torch's softmax: the backward over rows that fit in registers, both over longer ones and over a vocabulary.
TORCH_SOFTMAX_SHORT_BACKWARD = "torch_short_backward"
TORCH_SOFTMAX, TORCH_SOFTMAX_BACKWARD = "torch", "torch_backward"
TORCH_SOFTMAX_LONG, TORCH_SOFTMAX_LONG_BACKWARD = "torch_long", "torch_long_backward"
TORCH_SOFTMAXES = (
    TORCH_SOFTMAX_SHORT_BACKWARD,
    TORCH_SOFTMAX,
    TORCH_SOFTMAX_BACKWARD,
    TORCH_SOFTMAX_LONG,
    TORCH_SOFTMAX_LONG_BACKWARD,
)
TORCH_SOFTMAX_UNALIGNED = "torch_unaligned"
EAGER_NORM = "eager"  # the kernel of an RMSNorm written in separate torch operators


class BlockRef(NamedTuple):
    """The place of a measured run of computations in a profile: a block's key, an action, and the run's number there
    (communications cut a block into runs)."""

    key: str
    phase: str
    run: int = 0


class SumShape(NamedTuple):
    """What a sum goes over: `rows` numbers for each of `columns` results.

    `neighbours`: numbers that lie together in memory are added up; else they belong to different results. `joined`:
    one stride leads from each number of a result to the next. `stride`: elements from a number to its neighbour, in the
    order in which threads go. `at_once`: numbers that a thread loads before it adds them.
    """

    rows: float
    columns: float
    neighbours: bool = False
    joined: bool = True
    stride: int = 1
    at_once: int = 4  # ATen/native/cuda/Reduce.cuh: vt0


class Compute(Struct, frozen=True):
    """One operator on one rank. `name` is a label for people; nothing may depend on it.

    `kind` says how `shape` is read and how the operator is priced:

    - gemm: (batch, m, n, k), `[m, k] x [k, n]`, `batch` times; grouped_gemm: (groups, m of a group, n, k);
    - attention_forward, attention_backward: fused; (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim,
      causal 0/1); attention_decode: fused, one query a sequence; (batch, heads, kv_heads, kv_len, head_dim);
    - moe_layer: a rank's routed experts in serving, from the choice of experts to the weighted sum; (tokens, hidden,
      ffn, top_k, experts, expert_tp, ep);
    - norm, elementwise, softmax, embedding, cross_entropy, optimizer, permute, cast, copy: bound by the GPU's memory;
      (elements,);
    - host_update: an optimizer on the host's CPUs, bound by their memory; (elements,);
    - block: a measured run of a block's computations, priced by its place `block` in the profile; ().
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    flops: float  # a multiply-add counts as 2
    bytes: float  # read from and written to device memory
    phase: Phase
    kernels: int = 1  # launches; 0: they are counted with another operator, which issues these kernels too
    role: Role = Role.OUTPUT  # of a matmul
    # The library's kernel, where a profile may know several for the kind: flash2 or megatron of attentions, gelu or
    # adamw of kernels that memory binds.
    kernel: str = ""
    # Run as serving libraries do: a matmul quantizes its 16-bit input itself; an attention has the prices of points.
    served: bool = False
    # `bytes` are fewer than the shape's in its dtype: weights in 8 or 4 bits, experts that no token chose.
    own_bytes: bool = False
    # The largest power of two up to 8 that divides the elements of a row of a matmul's matrices. With less than 8, rows
    # of 16-bit elements do not all start at multiples of 16 bytes, which the fast kernels need.
    alignment: int = ALIGNED
    plain_host: bool = False  # torch's own functions issue the kernels, whatever the framework
    looped: bool = False  # one call of a library issues the kernels, in a loop over groups
    within_call: bool = False  # the call that issues the operator beside this one issues this one, too
    one_call: bool = False  # one operator of torch issues all its kernels in C++, or a loop without autograd does
    # Bound by memory, over strided tensors or unlike dtypes, for which torch has no vectorized kernel.
    strided: bool = False
    # Elements that a `strided` kernel handles one at a time, where their number is known; `strided` is false then.
    single_elements: float = 0.0
    casts: int = 0  # operands, with the result, for which a kernel chooses a cast for each element
    # The part of a step's micro-batches in which the operator runs; `flops` and `bytes` are means over all of them.
    share: float = 1.0
    host_share: float = 1.0  # an optimizer's part of the host's loop over all parameters
    sent_tokens: bool = False  # a moe_layer on a rank whose only tokens are those that an all-to-all sends to it
    random_numbers: float = 0.0  # drawn by a kernel that memory binds
    rows_in_turn: float = 0.0  # rows that one warp adds one after another in a loop
    sums: SumShape | None = None  # what a sum goes over, where thread blocks may share it
    clocks: float = 0.0  # of one multiprocessor, for a kernel's instructions; all multiprocessors share them
    lone_clocks: float = 0.0  # of one thread block, while the others wait or have ended
    instructions: float = 0.0  # of all threads, where they were counted in the kernel's machine code
    drops: bool = False  # a fused attention drops probabilities at random
    # Kernels that it consists of. Each has its own price where the profile has no points of the operator as a whole.
    runs: tuple[Compute, ...] = ()
    masked: bool = False  # a fused attention gets a tensor that says which pairs are hidden, and computes all pairs
    block: BlockRef | None = None
    part: ModelPart = ModelPart.OTHER  # whose work it is; no price depends on it
    graphed: bool = False  # a CUDA graph replays it, so that the host takes no time for it
    # Serving: it runs on a second stream beside so many computations, which are those before it and its neighbours with
    # the same number; 0: behind them.
    beside: int = 0


class Comm(Struct, frozen=True):
    """One collective of a group that this rank is a member of.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, reduce, broadcast, send_recv (a ring shift within
    `group`), offload, reload (host copies; `group` is `HOST` of `sim.core.timeline`).
    `group`: tp, cp, ep, dp, ... (names of `sim.ranks.plan`). `bytes` as nccl-tests counts them: the full buffer
    (all_gather: the gathered output; reduce_scatter: the input; all_to_all: one rank's send buffer; send_recv: the
    message).
    `stream`: where it queues; by default a stream named after the group. `after`: the handle of an asynchronous
    collective on another stream that this one waits for, too. `behind_input`: it waits for the action's input, without
    which parameters are gathered otherwise. `of_loss`: only the loss needs it, which a teacher does
    not compute. `within_call`: the library's call of the matmul beside it issues it, too.
    `graphed`: as a computation's. `sms`: multiprocessors that it takes from computations beside it, 0 if copy engines
    move it; None: those of NCCL's channels.
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
    behind_input: bool = False
    of_loss: bool = False
    within_call: bool = False
    graphed: bool = False
    sms: int | None = None


def exchanges_tokens(item: object) -> TypeGuard[Comm]:
    """Tell whether an item of a program sends tokens to their experts, or back."""
    return isinstance(item, Comm) and item.kind == "all_to_all" and item.group == "ep"


class Wait(Struct, frozen=True):
    """The next computation waits for the communication whose `handle` this is."""

    handle: str
    phase: Phase


BLOCK_END = Wait("", Phase.FORWARD)  # waits for nothing: tells where a block ends and the next begins
Item = Compute | Comm | Wait
Program = tuple[Item, ...]


class NeededBy(StrEnum):
    """Which half of a split backward reads a saved tensor: input gradients, weight gradients, or both.

    A tensor that INPUT_GRAD alone reads is freed before the weight half runs.
    """

    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    BOTH = "both"


class TensorRole(StrEnum):
    """The role of a tensor for the operator that keeps it."""

    INPUT = "input"
    STATISTICS = "statistics"  # a fused attention's log-sum-exp, from which its backward makes the scores again
    INNER = "inner"  # a result, a mask, anything else made on the way


class Saved(NamedTuple):
    """Bytes that a forward keeps for its backward. `name` is a label for people. `keys`: an attention core's keys or
    values, which other layers may read. `module`: the part of a layer that keeps it, where such parts are offloaded.
    `graphed`: it lies in the pool of a CUDA graph that holds parts of a layer."""

    name: str
    bytes: float
    needed_by: NeededBy = NeededBy.INPUT_GRAD
    role: TensorRole = TensorRole.INNER
    keys: bool = False
    module: str = ""
    graphed: bool = False

    @property
    def late(self) -> bool:
        """True where a split backward keeps it until its weight half (W) is done."""
        return self.needed_by is not NeededBy.INPUT_GRAD


class OwnBytes(Struct, frozen=True):
    """Bytes of a block's states where its program tells them, in place of a number of parameters and the scenario's
    dtypes.

    Its gradients are there from the step's first backward on (`set_to_none` frees them between steps).
    `first_backward_peak` is transient in that backward, its own gradients included, beyond what is saved and the
    gradients that are there already; `until_forward_end` is kept to the end of a forward, without being saved.
    """

    parameters: float
    frozen: float  # parameters that are never updated, and buffers
    gradients: float
    optimizer: float
    first_backward_peak: float
    until_forward_end: float


class WeightShape(NamedTuple):
    """Hold a number of weight matrices of one shape."""

    number: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Return the elements of all matrices of this shape."""
        return self.number * self.rows * self.columns


class Block(Struct, frozen=True):
    """One layer, embedding or head as one rank runs it, for one micro-batch. `name` is a label for people.

    `backward` is in execution order; its items are INPUT_GRAD or WEIGHT_GRAD and a split backward runs just one kind.
    `recompute` is rerun right before the backward (empty without recomputation); its items are INPUT_GRAD.
    `params` and `expert_params` are this rank's own parameter counts (tensor- and expert-parallel shards taken,
    data-parallel sharding not); `tensors` are the elements of each tensor that `params` counts; `shared` those of each
    that all ranks of tp hold whole, and of whose gradient each has what its own tokens give (sequence parallelism).
    `forward_peak_bytes` and `backward_peak_bytes` are transient, beyond what is saved (recomputed activations included
    in the latter). `workspace_bytes` stay allocated from the first backward on, one set for all layers of these shapes
    on a rank; `quantized_bytes` are its weights in the matmuls' own format, kept beside the 16-bit ones.
    `rebuilt_bytes`: what a rerun brings back that a split backward's weight half needs.
    `backward_moments`: of a backward whose operators are told apart, transient bytes as each runs, and for how many
    parameters it and those before it have brought gradients.
    `key` names the block in a profile of measured blocks (see `sim.prices.operator_prices`), "" where none can be.
    """

    name: str
    kind: BlockKind
    forward: Program
    backward: Program
    recompute: Program
    saved: tuple[Saved, ...]
    params: int
    expert_params: int = 0
    tensors: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0
    key: str = ""
    workspace_bytes: float = 0.0
    quantized_bytes: float = 0.0
    rebuilt_bytes: float = 0.0
    backward_moments: tuple[tuple[float, int], ...] = ()
    frozen_params: int = 0  # beside `params`: kept and gathered, never updated
    few_bit_params: int = 0  # of `frozen_params`, what is kept in 4 or 8 bits
    own: OwnBytes | None = None  # of a captured program
    matrices: tuple[WeightShape, ...] = ()  # of `params` what are a layer's matrices, and
    expert_matrices: tuple[WeightShape, ...] = ()  # of `expert_params`
    in_sixteen_bits: bool = False  # its matrices are multiplied and gathered in 16 bits, whatever the others' are

    @property
    def held_params(self) -> int:
        """Dense parameters, updated or not."""
        return self.params + self.frozen_params
