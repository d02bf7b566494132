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
from typing import NamedTuple

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


class Compute(Struct, frozen=True):
    """One operator on one rank. `name` is a label for people; nothing may depend on it.

    `kind` says how `shape` is read and how it is priced:
    gemm (batch, m, n, k): `[m, k] x [k, n]`, batch times; grouped_gemm (groups, m per group, n, k);
    attention_forward, attention_backward (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, causal 0/1):
    fused; attention_decode (batch, heads, kv_heads, kv_len, head_dim): fused, one query a sequence;
    moe_layer (tokens, hidden, ffn, top_k, experts, expert_tp, ep): a rank's routed experts in serving, from the choice
    of experts to the weighted sum; norm, elementwise, softmax, embedding, cross_entropy, optimizer, permute, cast, copy
    (elements,): bound by memory; host_update (elements,): an optimizer on the host's CPUs, bound by their memory;
    block: a measured run of a block's computations, shape (), priced by its place `block` in the profile.
    `flops` counts a multiply-add as 2; `bytes` is what is read from and written to device memory;
    `kernels` is how many launches it takes; 0: they are counted with another operator, which issues them too.
    `role`: of a matmul. `kernel`: the library's kernel, where a profile may know more than one for the kind
    (attention: flash2, megatron, ...; bound by memory: gelu, adamw, ...). `served`: run as serving
    libraries do: a matmul takes a 16-bit input and quantizes it, an attention is one of the measured points.
    `own_bytes`: `bytes` are less than those of its shape in its dtype (weights in 8 or 4 bits, experts that nobody
    chose), and so much less is read. `alignment`: the largest power of two up to 8 that divides the elements between
    rows of a matmul's matrices; below 8 rows of 16-bit elements do not start at multiples of 16 bytes, which the fast
    kernels need. `plain_host`: torch's own functions issue its kernels, whatever the framework. `looped`: one call of a
    library does, in a loop over groups. `within_call`: the call that issues the matmul beside it issues it, too.
    `strided`: bound by memory, over strided tensors or unlike dtypes, for which torch has no vectorized kernel.
    `single_elements`: where it is known how many elements such a kernel handles one at a time, their number (`strided`
    is false then);
    `casts`: for how many operands, with the result, it chooses a cast for each element. `share`: the part of a
    step's micro-batches in which it runs; `flops` and `bytes` are means over all of them. `sent_tokens`: of a
    moe_layer on a rank that has no tokens but those that an all-to-all sends to it. `random_numbers`: how many a kernel
    that is bound by memory draws. `rows_in_turn`: how many rows it adds one after another, in a loop of one warp.
    `summed_rows`: of a sum over the rows of a matrix, how many one thread block adds up before blocks wait for others.
    `clocks`: of one multiprocessor, that the instructions of a kernel take which is bound by memory; all share them;
    `lone_clocks`: those of one thread block, while others wait or have ended. `instructions`: of all threads of such a
    kernel, where they were counted in its machine code.
    `drops`: a fused attention drops probabilities at random. `masked`: it gets a tensor of numbers that says which
    pairs it hides, and computes all. `part`: whose work it is; no price depends on it. `graphed`: a CUDA graph of a
    layer's parts replays it, so that it costs the host nothing.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    flops: float
    bytes: float
    phase: Phase
    kernels: int = 1
    role: Role = Role.OUTPUT
    kernel: str = ""
    served: bool = False
    own_bytes: bool = False
    alignment: int = ALIGNED
    plain_host: bool = False
    looped: bool = False
    within_call: bool = False
    strided: bool = False
    single_elements: float = 0.0
    casts: int = 0
    share: float = 1.0
    sent_tokens: bool = False
    random_numbers: float = 0.0
    rows_in_turn: float = 0.0
    summed_rows: float = 0.0
    clocks: float = 0.0
    lone_clocks: float = 0.0
    instructions: float = 0.0
    drops: bool = False
    masked: bool = False
    block: BlockRef | None = None
    part: ModelPart = ModelPart.OTHER
    graphed: bool = False


class Comm(Struct, frozen=True):
    """One collective of a group that this rank is a member of.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, reduce, broadcast, send_recv (a ring shift within
    `group`), offload, reload (host copies; `group` is "host").
    `group`: tp, cp, ep, dp, ... (names of `sim.ranks.plan`). `bytes` as nccl-tests counts them: the full buffer
    (all_gather: the gathered output; reduce_scatter: the input; all_to_all: one rank's send buffer; send_recv: the
    message).
    `stream`: where it queues; by default a stream named after the group. `after`: the handle of an asynchronous one
    on another stream that it waits for, too. `of_loss`: needed by the loss alone, which a teacher does not compute.
    `within_call`: the library's call of the matmul beside it issues it, too. `graphed`: as a computation's.
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
    of_loss: bool = False
    within_call: bool = False
    graphed: bool = False


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
    four_bit_params: int = 0  # of `frozen_params`, what is kept in 4 bits
    own: OwnBytes | None = None  # of a captured program
    matrices: tuple[WeightShape, ...] = ()  # of `params` what are a layer's matrices, and
    expert_matrices: tuple[WeightShape, ...] = ()  # of `expert_params`
    in_sixteen_bits: bool = False  # its matrices are multiplied and gathered in 16 bits, whatever the others' are

    @property
    def held_params(self) -> int:
        """Dense parameters, updated or not."""
        return self.params + self.frozen_params
