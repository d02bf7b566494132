"""The output matrix's weight gradients, put off until the last pipeline rank's backwards have ended.

Megatron-Core's `--defer-embedding-wgrad-compute` (0.19): `LinearWithGradAccumulationAndAsyncCommunication` in
core/tensor_parallel/layers.py keeps the gradient of the logits in place of the matmul, for the first
`wgrad_deferral_limit` micro-batches (0: for all), and `ColumnParallelLinear` keeps its input. The rank computes what is
left in the pipeline's flush (core/utils.py: `drain_embedding_wgrad_compute`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.program import Block, BlockKind, Comm, Compute, Item, NeededBy, Phase, Program, Role, Wait


class Deferral(Struct, frozen=True):
    """What the last stage puts off. `micro_batches`: of this many, the first ones; `bytes`: what it keeps for each, the
    output layer's input and the gradient of its output; `gather`: the message that brings the input together with
    sequence parallelism; `product`: the matmul."""

    micro_batches: int
    bytes: float
    gather: Comm | None
    product: Compute


def deferral_of(blocks: Sequence[Block], micro_batches: int) -> Deferral | None:
    """Return what a stage puts off for its first `micro_batches`; None for none, and without the output layer."""
    head = next((b for b in blocks if b.kind is BlockKind.HEAD and micro_batches), None)
    product = None if head is None else _product(head)
    if head is None or product is None:
        return None
    kept = sum(s.bytes for s in head.saved if s.needed_by is NeededBy.WEIGHT_GRAD)
    batch, outputs, _, rows = product.shape
    return Deferral(micro_batches, kept + batch * outputs * rows * dtype_bytes(product.dtype), _gather(head), product)


def without_product(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks, the head's backward without what is put off; a measured time of the whole does not count."""
    return tuple(_left(b) if b.kind is BlockKind.HEAD else b for b in blocks)


def drained(deferral: Deferral) -> Program:
    """Return the program of all that was put off: each input is gathered while the matmul before it runs."""
    gather, product = deferral.gather, deferral.product
    if gather is None:
        return (product,) * deferral.micro_batches
    out: list[Item] = [replace(gather, blocking=True, handle="")]
    for i in range(1, deferral.micro_batches):
        handle = f"{gather.handle}{i}"
        out += [replace(gather, blocking=False, handle=handle), product, Wait(handle, Phase.WEIGHT_GRAD)]
    return (*out, product)


def _product(head: Block) -> Compute | None:
    return next((i for i in head.backward if isinstance(i, Compute) and i.role is Role.WEIGHT_GRADIENT), None)


def _gather(head: Block) -> Comm | None:
    return next((i for i in head.backward if isinstance(i, Comm) and i.phase is Phase.WEIGHT_GRAD), None)


def _left(head: Block) -> Block:
    gather, product = _gather(head), _product(head)
    handle = gather.handle if gather is not None else ""
    kept = (
        i
        for i in head.backward
        if i is not gather and i is not product and not (isinstance(i, Wait) and handle and i.handle == handle)
    )
    return replace(head, backward=tuple(kept), key="")
