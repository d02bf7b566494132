"""The attention core over context-parallel ranks: ring, all-gather and all-to-all, for three splits of the
sequence.

Ring: Liu et al. 2023 (Ring Attention); zigzag as in Llama 3 and ring-flash-attention; striped: Brandon et al.
2023. All-gather: Llama 3 (2024) section 3.3.2. All-to-all: Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, Item, Phase, Wait
from sim.models.attention.core import Core, core_backward, core_forward, core_part, kv_bytes
from sim.models.attention.fp8 import in_its_format
from sim.models.attention.head_copies import repeated, with_repeats
from sim.models.attention.masked_windows import masked_window, with_mask
from sim.models.attention.packing import PackedBatch, pairs_between, queries_between
from sim.models.dims import Dims, Shard, ceil_div, packed_batch
from sim.models.operators import F, I, Operator, collective, memory_op

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def attention_core(scenario: Scenario, d: Dims, shard: Shard, own: Core) -> Operator:
    """The core of `own` queries, keys and values (this rank's seq / cp tokens) by `parallelism.cp_method`.

    Of packed sequences each document is cut as the whole is (zigzag in Transformer Engine's THD format:
    `thd_get_partitioned_indices`), so that each block of scores has the same part of its pairs; with split contiguous
    the sequence is cut, wherever documents end. torch's ring knows no windows; FlexAttention, which has them, gathers
    all keys for one kernel (torchtitan/distributed/context_parallel.py: `apply_cp_to_forward`).
    """
    batch = packed_batch(scenario)
    core = repeated(d, masked_window(d, own, batch))
    skipped = None if core.masked else batch  # documents between which a kernel skips all pairs
    part = in_its_format(d, core, lambda sizes: _exchanged(scenario, sizes, shard, core, skipped))
    return with_mask(d, core, with_repeats(d, core, part))


def _exchanged(scenario: Scenario, d: Dims, shard: Shard, own: Core, batch: PackedBatch | None) -> Operator:
    p = scenario.parallelism
    if batch is not None:
        if d.cp > 1 and p.cp_split == "contiguous" and p.cp_method != "all_to_all":
            return _contiguous(scenario, d, shard, own, batch)
        own = _packed(d, own, batch)
    if d.cp == 1:
        return core_part(d, own, (own,), core_forward(d, own), core_backward(d, own))
    if p.cp_method == "all_to_all":
        return _all_to_all(d, own)
    gathers = p.cp_method == "all_gather"
    if gathers and (not d.framework.context.blocks or scenario.model.window is not None):
        blocks = gathered_blocks(own, d.cp, shard.cp_rank, p.cp_split)
        return _all_gather(d, own, blocks, p.cp_split != "contiguous")
    return _ring(d, own, ring_blocks(own, d.cp, shard.cp_rank, p.cp_split), gathers)


def _packed(d: Dims, own: Core, batch: PackedBatch) -> Core:
    """The core of packed sequences: its scores lie within documents, and are a share of those of unpacked sequences."""

    def visible(length: int) -> float:
        return replace(own, q_len=length, kv_len=length).visible

    share = sum(n * visible(length) for length, n in batch.documents) / visible(d.full_seq)
    return _of_documents(own, share, d.full_seq, batch.documents)


def _of_documents(block: Core, share: float, queries: int, documents: Iterable[tuple[int, float]]) -> Core:
    """The core with `share` of its scores. `documents`: lengths of the documents' pieces among `queries` queries, and
    how many have each length."""
    found = tuple(documents)
    tokens, squares = (sum(n * length**power for length, n in found) for power in (1, 2))
    return replace(block, packed=share, filled=tokens / queries, documents=tokens**2 / squares)


def _contiguous(scenario: Scenario, d: Dims, shard: Shard, own: Core, batch: PackedBatch) -> Operator:
    """Packed sequences cut into contiguous pieces: of each pair of pieces the scores that documents have in both, in
    the mean over sequences."""
    n = own.q_len

    def part(block: Core, sources: range) -> Core | None:
        queries = (shard.cp_rank * n, (shard.cp_rank + 1) * n)
        keys = [(source * n, (source + 1) * n) for source in sources]
        found = sum(pairs_between(x, queries, piece) for x in batch.sequences for piece in keys) * each
        if not found:
            return None
        seeing = (queries_between(x, queries, (keys[0][0], keys[-1][1])) for x in batch.sequences)
        return _of_documents(block, found / block.visible, n, [(length, each) for x in seeing for length in x])

    each = 1.0 / len(batch.sequences)
    gathers = scenario.parallelism.cp_method == "all_gather"
    if gathers and not d.framework.context.blocks:
        (whole,) = gathered_blocks(own, d.cp, shard.cp_rank, "contiguous")
        one = part(whole, range(shard.cp_rank + 1))
        return _all_gather(d, own, () if one is None else (one,), False)
    steps = ring_blocks(own, d.cp, shard.cp_rank, "contiguous")
    sources = ((shard.cp_rank - step) % d.cp for step in range(d.cp))
    return _ring(d, own, tuple(b and part(b, range(at, at + 1)) for b, at in zip(steps, sources, strict=True)), gathers)


def ring_blocks(own: Core, cp: int, rank: int, split: str) -> tuple[Core | None, ...]:
    """Return what `rank` computes in each of the ring's steps, in step j with the keys of rank − j. None: nothing.

    Contiguous: its own block causal, earlier ranks' whole, later ranks' not at all: rank r does r + 1 of
    them. Zigzag (2·cp pieces, rank r holds r and 2cp − 1 − r): all queries see an earlier rank's first half
    of the keys, the second half of the queries sees all of a later rank's: half a square in every step.
    Striped (token i on rank i mod cp): every block is causal.

    >>> own = Core(8, 8, 1, 1, 4, 4)
    >>> [b.visible if b else 0 for b in ring_blocks(own, 4, 1, "contiguous")]
    [32.0, 64.0, 0, 0]
    >>> [b.visible for b in ring_blocks(own, 4, 1, "zigzag")]
    [32.0, 32.0, 32.0, 32.0]
    """
    n, half = own.q_len, ceil_div(own.q_len, 2)
    blocks: list[Core | None] = []
    for step in range(cp):
        source = (rank - step) % cp
        if source == rank or split == "striped":
            blocks.append(replace(own, causal=True))
        elif split == "contiguous":
            blocks.append(replace(own, causal=False) if source < rank else None)
        elif source < rank:
            blocks.append(replace(own, q_len=n, kv_len=half, causal=False))
        else:
            blocks.append(replace(own, q_len=half, kv_len=n, causal=False))
    return tuple(blocks)


def gathered_blocks(own: Core, cp: int, rank: int, split: str) -> tuple[Core, ...]:
    """Return what `rank` computes once all keys are there: each of its pieces of queries against the keys up to it.

    Striped: one kernel over all keys, which skips the half of the scores that are masked, unless it gets the mask as
    numbers (not causal).
    """
    n, half = own.q_len, ceil_div(own.q_len, 2)
    if split == "contiguous":
        return (replace(own, kv_len=(rank + 1) * n),)
    if split == "striped":
        return (replace(own, kv_len=cp * n, share=0.5 if own.causal else None),)
    return (
        replace(own, q_len=half, kv_len=(rank + 1) * half),
        replace(own, q_len=half, kv_len=(2 * cp - rank) * half),
    )


def _sent(d: Dims, name: str, kind: str, bytes_: float, phase: Phase) -> Comm:
    """A message; the attention after it waits for it if the framework's does."""
    return collective(name, kind, bytes_, phase, "" if d.framework.context.waits else name, "cp")


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


def _copied(d: Dims, name: str, bytes_: float, phase: Phase, accesses: int = 2, kernels: int = 1) -> list[Item]:
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


def _ring(d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool = False) -> Operator:
    """The blocks one after the other. `gathers`: all keys and values come by one all-gather, forward and backward."""
    forward = _ring_forward(d, own, blocks, gathers)
    backward = _ring_backward(d, own, blocks, gathers)
    part = core_part(d, own, tuple(b for b in blocks if b), forward, backward)
    in_flight = (d.cp if gathers else 2) * kv_bytes(d, own)  # all blocks, or the one in use and the one arriving
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


def _keys_sent(d: Dims, own: Core, step: int, gathers: bool, phase: Phase, name: str) -> list[Item]:
    """Return the message sent before step `step`: in a ring the present block of keys and values to the next rank; with
    `gathers` one all-gather of all blocks before the first step."""
    if gathers:
        return [] if step else [_sent(d, f"{name}0", "all_gather", d.cp * kv_bytes(d, own), phase)]
    return [_sent(d, f"{name}{step}", "send_recv", kv_bytes(d, own), phase)]


def _keys_received(d: Dims, step: int, gathers: bool, phase: Phase, name: str) -> list[Item]:
    return [] if gathers and step else _received(d, f"{name}{step}", phase)


def _ring_forward(d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool) -> tuple[Item, ...]:
    """Each step sends the keys and values on while it computes with them: cp − 1 messages."""
    items = _joined(d, own, F, "kv_join")
    last = len(blocks) - 1
    for step, block in enumerate(blocks):
        if step < last:
            items += _joined_again(d, own, step, gathers, F, "kv_join")
            items += _keys_sent(d, own, step, gathers, F, "ring_kv")
        if block:
            items += core_forward(d, block, f"attention{step}")
            items += _merges(d, own, block, step, step == last)
        if step < last:
            items += _keys_received(d, step, gathers, F, "ring_kv")
    return tuple(items)


def _ring_backward(d: Dims, own: Core, blocks: tuple[Core | None, ...], gathers: bool) -> tuple[Item, ...]:
    """Keys and values go round once more (cp − 1 messages), their gradients behind them and home (cp
    messages). The sum of two such gradients waits for a message, but not for the host, which issues it with the
    attention before it.

    Transformer Engine first copies keys and values into the buffer of messages. It then joins each block's dK and dV in
    one tensor before their sum, and copies or adds its dQ. torch does so in fp32 (`_partial_update`), and casts the
    sums at the end.
    """
    last, size, gradients, sum_kernels = len(blocks) - 1, kv_bytes(d, own), _gradient_bytes(d, own), 2
    context = d.framework.context
    items = _joined(d, own, I, "kv_copy")
    for step, block in enumerate(blocks):
        if step < last:
            items += _joined_again(d, own, step, gathers, I, "kv_copy")
            items += _keys_sent(d, own, step, gathers, I, "ring_backward_kv")
        if block:
            *before, kernel = core_backward(d, block, f"attention_backward{step}")
            assert isinstance(kernel, Compute)
            items += [*before, replace(kernel, kernels=kernel.kernels + sum_kernels) if step else kernel]
            items += _query_gradients(d, own, block, step, step == last)
        if step:
            items += _received(d, f"ring_dkv{step - 1}", I)
        if block and step:
            moved = 5 * kv_bytes(d, block) if context.copies else 3 * size
            if context.fp32_sums:
                moved = 2 * gradients + kv_bytes(d, block)
            items.append(memory_op(f"attention_dkv_sum{step}", I, "elementwise", size / d.act_bytes, moved, d.act, 0))
        elif block and context.fp32_sums:
            items.append(memory_op("attention_dkv_sum0", I, "copy", size / d.act_bytes, gradients + size, d.act))
        elif block:
            items += _copied(d, "attention_dkv_sum0", size, I, 4, 2)
        if step < last:
            items += _keys_received(d, step, gathers, I, "ring_backward_kv")
        items.append(_sent(d, f"ring_dkv{step}", "send_recv", gradients, I))
    items += _received(d, f"ring_dkv{last}", I)
    if context.fp32_sums:
        items.append(memory_op("attention_dkv_cast", I, "copy", size / d.act_bytes, gradients + size, d.act))
    return tuple(items)


def _query_gradients(d: Dims, own: Core, block: Core, step: int, last: bool) -> list[Item]:
    """A block's dQ copied or added to the others."""
    if not d.framework.context.fp32_sums:
        return _copied(d, f"attention_dq_sum{step}", _query_bytes(d, block), I, 3 if step else 2)
    whole = _query_bytes(d, own)
    fp32 = whole * FP32_BYTES / d.act_bytes
    moved = _query_bytes(d, block) + (2 if step else 1) * fp32 + (whole if last else 0.0)
    return [memory_op(f"attention_dq_sum{step}", I, "elementwise", whole / d.act_bytes, moved, d.act)]


def _all_gather(d: Dims, own: Core, blocks: tuple[Core, ...], reorder: bool) -> Operator:
    """Keys and values of all ranks gathered before the kernels, again for backward, whose dK, dV are
    reduce-scattered.

    `reorder`: what is gathered lies by ranks and is copied into the sequence's order, gradients back (Transformer
    Engine, `AttnFuncWithCPAndKVAllGather`). Of several kernels each one's dK, dV join the sum.
    """
    size = kv_bytes(d, own) * d.cp

    def copied(name: str, phase: Phase) -> list[Item]:
        return [memory_op(name, phase, "copy", size / d.act_bytes, 2 * size, d.act, 2)] if reorder else []

    f_items: list[Item] = [collective("kv_gather", "all_gather", size, F, group="cp"), *copied("kv_reorder", F)]
    b_items: list[Item] = [collective("kv_regather", "all_gather", size, I, group="cp"), *copied("kv_reorder", I)]
    for i, block in enumerate(blocks):
        f_items += core_forward(d, block, f"attention{i}")
        b_items += core_backward(d, block, f"attention_backward{i}")
        if len(blocks) > 1:
            n, moved = kv_bytes(d, block) / d.act_bytes, 3 * kv_bytes(d, block)
            b_items.append(memory_op(f"attention_dkv_sum{i}", I, "elementwise", n, moved, d.act, 2))
    b_items += [*copied("dkv_reorder", I), collective("dkv_scatter", "reduce_scatter", size, I, group="cp")]
    part = core_part(d, own, blocks, tuple(f_items), tuple(b_items))
    return replace(part, forward_bytes=part.forward_bytes + size, backward_bytes=part.backward_bytes + 2 * size)


def _all_to_all(d: Dims, own: Core) -> Operator:
    """Heads for tokens: four exchanges each way; in between every rank has the whole sequence of heads / cp.

    Where a rank has fewer key and value heads than cp, they are repeated so that each rank gets one.
    """
    kv_heads = max(own.kv_heads, d.cp)
    whole = replace(
        own,
        q_len=own.q_len * d.cp,
        kv_len=own.kv_len * d.cp,
        heads=ceil_div(own.heads, d.cp),
        kv_heads=ceil_div(kv_heads, d.cp),
    )
    unit = d.batch * own.q_len * d.act_bytes
    sizes = {
        "query": unit * own.heads * own.head_dim,
        "key": unit * kv_heads * own.head_dim,
        "value": unit * kv_heads * own.v_head_dim,
    }
    out = unit * own.heads * own.v_head_dim

    def exchange(name: str, size: float, phase: Phase) -> list[Item]:
        before, after = (_copied(d, f"{name}_{side}", size, phase) for side in ("split", "join"))
        return [*before, collective(f"ulysses_{name}", "all_to_all", size, phase, group="cp"), *after]

    again = exchange("output_again", out, I) if d.framework.context.copies else []
    forward = (
        *(item for n, s in sizes.items() for item in exchange(n, s, F)),
        *core_forward(d, whole),
        *exchange("output", out, F),
    )
    backward = (
        *again,
        *exchange("doutput", out, I),
        *core_backward(d, whole),
        *(item for n, s in sizes.items() for item in exchange(f"d{n}", s, I)),
    )
    part = core_part(d, whole, (whole,), forward, backward, exchanged=True)
    return replace(part, output_bytes=out)
