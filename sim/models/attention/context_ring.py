"""The attention core as a ring over context-parallel ranks: blocks, messages, and what is moved around them.

Transformer Engine's is `AttnFuncWithCPAndKVP2P` (2.20.2, pytorch/attention/dot_product_attention/context_parallel.py),
torch's `_templated_ring_attention` (torch/distributed/tensor/experimental/_context_parallel/_attention.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, Item, Phase, Wait
from sim.models.attention.core import Core, core_backward, core_forward, core_part, kv_bytes
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, collective, memory_op


def _sent(d: Dims, name: str, kind: str, bytes_: float, phase: Phase, group: str = "cp") -> Comm:
    """A message; the attention after it waits for it if the framework's does."""
    return collective(name, kind, bytes_, phase, "" if d.framework.context.waits else name, group)


def _received(d: Dims, name: str, phase: Phase) -> list[Item]:
    return [] if d.framework.context.waits else [Wait(name, phase)]


def _merges(d: Dims, own: Core, block: Core, step: int, last: bool) -> list[Item]:
    """Online softmax: the block's output joins the fp32 sum by their log-sum-exps (read 4 + e, write 4 an element).

    Transformer Engine's sum has 16 bits. Its first block is scaled into it, and a kernel on one number a query corrects
    the log-sum-exp in every step (`flash_attn_fwd_out_correction_init`, `flash_attn_fwd_out_correction`). torch copies
    the sum of a rank's queries even if half of them see the block, and casts the first output and the last sum.
    """
    n, context = d.batch * block.heads * block.q_len * block.v_head_dim, d.framework.context
    if context.copies:
        moved, kernels = (3 if step else 2) * n * d.act_bytes, 2
    elif context.fp32_sums:
        whole = n * own.q_len / block.q_len
        moved, kernels = n * d.act_bytes + whole * FP32_BYTES * (2 if step else 1), 1
        moved += whole * d.act_bytes if last else 0.0
    elif not step:
        return []
    else:
        moved, kernels = n * (2 * FP32_BYTES + d.act_bytes), 1
    return [memory_op(f"attention_merge{step}", F, "elementwise", n, moved, d.act, kernels)]


def copied(d: Dims, name: str, bytes_: float, phase: Phase, accesses: float = 2.0, kernels: int = 1) -> list[Item]:
    """Transformer Engine's copies around messages: reads and writes of a tensor; () in other frameworks."""
    if not d.framework.context.copies:
        return []
    return [memory_op(name, phase, "copy", bytes_ / d.act_bytes, accesses * bytes_, d.act, kernels)]


def _joined(d: Dims, own: Core, phase: Phase, name: str) -> list[Item]:
    """Keys and values copied into the buffer of messages."""
    size, context = kv_bytes(d, own), d.framework.context
    if not (context.copies or context.blocks):
        return []
    return [memory_op(name, phase, "copy", size / d.act_bytes, 2 * size, d.act)]


def _joined_again(d: Dims, own: Core, step: int, gathers: bool, phase: Phase, name: str) -> list[Item]:
    """Keys and values that torch took out of the buffer that arrived, joined in the next one (`torch.cat` in each step
    of _templated_ring_attention and of its backward); of an all-gather nothing is sent on."""
    if gathers or not step or not d.framework.context.blocks:
        return []
    return _joined(d, own, phase, f"{name}{step}")


def _query_bytes(d: Dims, c: Core) -> float:
    """A rank's queries."""
    return d.batch * c.q_len * c.heads * c.head_dim * d.act_bytes


def ring(
    d: Dims,
    own: Core,
    blocks: tuple[Core | None, ...],
    gathers: bool = False,
    group: str = "cp",
    exchanged: bool = False,
) -> Operator:
    """The blocks one after the other. `gathers`: all keys and values come by one all-gather, forward and backward.
    `group`: the ranks of the ring. `exchanged`: as `core_part` has it."""
    forward = _ring_forward(d, own, blocks, gathers, group)
    of_framework = _backward_to_own if d.framework.context.own_last else _ring_backward
    backward = of_framework(d, own, blocks, gathers, group)
    if len(blocks) == 1:  # a rank sends itself nothing
        backward = tuple(item for item in backward if isinstance(item, Compute))
    part = core_part(d, own, tuple(b for b in blocks if b), forward, backward, exchanged)
    in_flight = (len(blocks) if gathers else 2) * kv_bytes(d, own)  # all blocks, or the one in use and the one arriving
    sum_fp32 = d.batch * own.heads * own.q_len * own.v_head_dim * FP32_BYTES
    gradients = 2 * _gradient_bytes(d, own)
    return replace(
        part,
        forward_bytes=part.forward_bytes + in_flight + sum_fp32,
        backward_bytes=part.backward_bytes + in_flight + gradients,
    )


def _gradient_bytes(d: Dims, c: Core) -> float:
    """dK and dV of a block as they are added up and sent."""
    return kv_bytes(d, c) * (FP32_BYTES / d.act_bytes if d.framework.context.fp32_sums else 1.0)


def _keys_sent(d: Dims, own: Core, step: int, gathers: bool, message: Comm) -> list[Item]:
    """Return the message sent before step `step`: in a ring the present block of keys and values to the next rank; with
    `gathers` one all-gather of all blocks before the first step."""
    if gathers:
        return [] if step else [replace(message, kind="all_gather", bytes=d.cp * kv_bytes(d, own))]
    return [message]


def _keys_received(d: Dims, step: int, gathers: bool, phase: Phase, name: str) -> list[Item]:
    return [] if gathers and step else _received(d, f"{name}{step}", phase)


def _ring_forward(d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool, group: str) -> tuple[Item, ...]:
    """Each step sends the keys and values on while it computes with them: cp − 1 messages."""
    items = _joined(d, own, F, "kv_join")
    last = len(blocks) - 1
    for step, block in enumerate(blocks):
        if step < last:
            items += _joined_again(d, own, step, gathers, F, "kv_join")
            message = _sent(d, f"ring_kv{step}", "send_recv", kv_bytes(d, own), F, group)
            items += _keys_sent(d, own, step, gathers, message)
        if block:
            items += core_forward(d, block, f"attention{step}")
            items += _merges(d, own, block, step, step == last)
        if step < last:
            items += _keys_received(d, step, gathers, F, "ring_kv")
    return tuple(items)


def _ring_backward(d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool, group: str) -> tuple[Item, ...]:
    """Keys and values go round once more (cp − 1 messages), their gradients behind them and home (cp
    messages). The sum of two such gradients waits for a message, but not for the host, which issues it with the
    attention before it.

    torch joins each block's dK and dV in one tensor before their sum, in fp32 (`_partial_update`), and casts the sums
    at the end.
    """
    last, size, gradients = len(blocks) - 1, kv_bytes(d, own), _gradient_bytes(d, own)
    context = d.framework.context
    items = _joined(d, own, I, "kv_copy")
    for step, block in enumerate(blocks):
        if step < last:
            items += _joined_again(d, own, step, gathers, I, "kv_copy")
            message = _sent(d, f"ring_backward_kv{step}", "send_recv", size, I, group)
            items += _keys_sent(d, own, step, gathers, message)
        if block:
            items += _block_backward(d, block, step, 2 if step else 0)
            items += _query_gradients(d, own, block, step, step == last)
        if step:
            items += _received(d, f"ring_dkv{step - 1}", I)
        if block and step:
            moved = 2 * gradients + kv_bytes(d, block) if context.fp32_sums else 3 * size
            items.append(memory_op(f"attention_dkv_sum{step}", I, "elementwise", size / d.act_bytes, moved, d.act, 0))
        elif block and context.fp32_sums:
            items.append(memory_op("attention_dkv_sum0", I, "copy", size / d.act_bytes, gradients + size, d.act))
        if step < last:
            items += _keys_received(d, step, gathers, I, "ring_backward_kv")
        items.append(_sent(d, f"ring_dkv{step}", "send_recv", gradients, I, group))
    items += _received(d, f"ring_dkv{last}", I)
    if context.fp32_sums:
        items.append(memory_op("attention_dkv_cast", I, "copy", size / d.act_bytes, gradients + size, d.act))
    return tuple(items)


def _block_backward(d: Dims, block: Core, step: int, sum_kernels: int) -> list[Item]:
    """A block's backward, whose call also issues the kernels that add up dK and dV."""
    *before, kernel = core_backward(d, block, f"attention_backward{step}")
    assert isinstance(kernel, Compute)
    return [*before, replace(kernel, kernels=kernel.kernels + sum_kernels)]


def _backward_to_own(
    d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool, group: str
) -> tuple[Item, ...]:
    """Transformer Engine's backward begins with the keys that arrived last, and ends with the rank's own.

    Messages go the other way than in the forward. The first step sends on keys and values, the last one the sum of
    other ranks' dK and dV, every other both in one message: cp in all, of 2·(cp − 1) times the size of keys and values.
    Each is sent before the step's attention, which hides it, and waited for behind it, so that none is left at the end.
    Of 8-bit attention the gradients stay where they are made until the last step's all-to-all (`dkv_send_buffer`).

    Each half of the queries' dQ is copied the first time and added later. dK and dV are copied in the first step, and
    added later; what no other rank's queries see, half of the first rank's keys, is copied in the last. Before
    Transformer Engine 2.8 each block's two were joined first (`combine_tensors`).
    """
    last, size, context = len(blocks) - 1, kv_bytes(d, own), d.framework.context
    halves = last > 0 and all(b is not None and b.q_len < own.q_len for b in blocks[1:])  # of the first rank's keys
    items = copied(d, "kv_copy", size, I)
    seen = 0
    for step, block in enumerate(reversed(blocks)):
        if d.fp8_attention and step == last:
            kind, message = "all_to_all", len(blocks) * size
        else:
            kind, message = "send_recv", size * ((step < last) + (step > 0 and not d.fp8_attention))
        items.append(_sent(d, f"ring_backward{step}", kind, message, I, group))
        if block:
            items += _block_backward(d, block, step, 2)
            accesses = 3 - max(0, block.q_len - seen) / block.q_len
            items += copied(d, f"attention_dq_sum{step}", _query_bytes(d, block), I, accesses)
            seen = max(seen, block.q_len)
        items += _received(d, f"ring_backward{step}", I)
        if block:
            accesses = (3.0 if step else 2.0) - (0.5 if halves and step == last else 0.0)
            accesses += 2.0 if context.joins_gradients else 0.0
            items += copied(d, f"attention_dkv_sum{step}", kv_bytes(d, block), I, accesses, 0)
    return tuple(items)


def _query_gradients(d: Dims, own: Core, block: Core, step: int, last: bool) -> list[Item]:
    """torch's sum of all blocks' dQ in fp32."""
    if not d.framework.context.fp32_sums:
        return []
    whole = _query_bytes(d, own)
    fp32 = whole * FP32_BYTES / d.act_bytes
    moved = _query_bytes(d, block) + (2 if step else 1) * fp32 + (whole if last else 0.0)
    return [memory_op(f"attention_dq_sum{step}", I, "elementwise", whole / d.act_bytes, moved, d.act)]
