"""The attention core over context-parallel ranks: ring, all-gather and all-to-all, for three splits of the
sequence.

Ring: Liu et al. 2023 (Ring Attention); zigzag as in Llama 3 and ring-flash-attention; striped: Brandon et al.
2023. All-gather: Llama 3 (2024) section 3.3.2. All-to-all: Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.core.program import Item, Phase, Wait
from sim.inputs.packed_documents import PackedBatch, pairs_between, queries_between
from sim.models.attention.context_ring import copied, ring
from sim.models.attention.core import Core, core_backward, core_forward, core_part, kv_bytes
from sim.models.attention.fp8 import in_its_format
from sim.models.attention.head_copies import repeated, with_repeats
from sim.models.attention.masked_windows import masked_window, with_mask
from sim.models.dims import Dims, Shard, ceil_div, packed_batch
from sim.models.operators import F, I, Operator, collective, memory_op

if TYPE_CHECKING:
    from sim.inputs.parallelism import Parallelism
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
    rings = d.cp > 1 and d.cp_method == "all_to_all_ring" and p.cp_exchanged > 1  # else one ring of all ranks
    if batch is not None:
        if d.cp > 1 and p.cp_split == "contiguous" and d.cp_method != "all_to_all":
            pieces = _Pieces(batch, d.cp_method == "all_gather")
            return _rings(d, own, shard.cp_rank, p, pieces) if rings else pieces.core(d, own, shard.cp_rank, d.cp)
        own = _packed(d, own, batch)
    if d.cp == 1:
        return core_part(d, own, (own,), core_forward(d, own), core_backward(d, own))
    if d.cp_method == "all_to_all":
        return _all_to_all(d, own, d.cp, "cp", lambda whole: _whole_heads(d, whole))
    if rings:
        return _rings(d, own, shard.cp_rank, p)
    gathers = d.cp_method == "all_gather"
    if gathers and (not d.framework.context.blocks or scenario.model.window is not None):
        blocks = gathered_blocks(own, d.cp, shard.cp_rank, p.cp_split)
        return _all_gather(d, own, blocks, p.cp_split != "contiguous")
    return ring(d, own, ring_blocks(own, d.cp, shard.cp_rank, p.cp_split), gathers)


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


class _Pieces(NamedTuple):
    """Packed sequences cut into contiguous pieces, whose keys are gathered at once (`gathers`) or come by a ring."""

    batch: PackedBatch
    gathers: bool

    def core(self, d: Dims, own: Core, rank: int, count: int, group: str = "cp", exchanged: bool = False) -> Operator:
        """The core of piece `rank` of `count`, one for each rank of `group`. `exchanged`: as `core_part` has it."""
        if self.gathers and not d.framework.context.blocks:
            (whole,) = gathered_blocks(own, count, rank, "contiguous")
            one = self._part(whole, own.q_len, rank, range(rank + 1))
            return _all_gather(d, own, () if one is None else (one,), False)
        steps = ring_blocks(own, count, rank, "contiguous")
        sources = ((rank - step) % count for step in range(count))
        blocks = [b and self._part(b, own.q_len, rank, range(at, at + 1)) for b, at in zip(steps, sources, strict=True)]
        return ring(d, own, tuple(blocks), self.gathers, group, exchanged)

    def _part(self, block: Core, n: int, rank: int, sources: range) -> Core | None:
        """The block with documents' scores alone, in the mean over sequences: of queries in piece `rank` and keys in
        the pieces `sources`, each of `n` tokens. None: no document lies in both."""
        sequences = self.batch.sequences
        queries, each = (rank * n, (rank + 1) * n), 1.0 / len(sequences)
        keys = [(source * n, (source + 1) * n) for source in sources]
        found = sum(pairs_between(x, queries, piece) for x in sequences for piece in keys) * each
        if not found:
            return None
        seeing = (queries_between(x, queries, (keys[0][0], keys[-1][1])) for x in sequences)
        return _of_documents(block, found / block.visible, n, [(length, each) for x in seeing for length in x])


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


def _all_gather(d: Dims, own: Core, blocks: tuple[Core, ...], reorder: bool) -> Operator:
    """Keys and values of all ranks gathered before the kernels, again for backward, whose dK, dV are
    reduce-scattered.

    `reorder`: what is gathered lies by ranks and is copied into the sequence's order, gradients back (Transformer
    Engine, `AttnFuncWithCPAndKVAllGather`). Of several kernels each one's dK, dV join the sum. There this sum begins
    with zeros, and each kernel's output and dQ are copied to their place (`out_f16[i - 1].copy_`).
    """
    size = kv_bytes(d, own) * d.cp

    def ordered(name: str, phase: Phase) -> list[Item]:
        return [memory_op(name, phase, "copy", size / d.act_bytes, 2 * size, d.act, 2)] if reorder else []

    f_items: list[Item] = [collective("kv_gather", "all_gather", size, F, group="cp"), *ordered("kv_reorder", F)]
    b_items: list[Item] = [collective("kv_regather", "all_gather", size, I, group="cp"), *ordered("kv_reorder", I)]
    b_items += copied(d, "attention_dkv_zeros", size, I, 1, 2)
    for i, block in enumerate(blocks):
        queries, out = (
            d.batch * block.q_len * block.heads * w * d.act_bytes for w in (block.head_dim, block.v_head_dim)
        )
        f_items += [*core_forward(d, block, f"attention{i}"), *copied(d, f"attention_out_copy{i}", out, F)]
        b_items += core_backward(d, block, f"attention_backward{i}")
        if len(blocks) > 1:
            n, moved = kv_bytes(d, block) / d.act_bytes, 3 * kv_bytes(d, block)
            b_items.append(memory_op(f"attention_dkv_sum{i}", I, "elementwise", n, moved, d.act, 2))
        b_items += copied(d, f"attention_dq_copy{i}", queries, I)
    b_items += [*ordered("dkv_reorder", I), collective("dkv_scatter", "reduce_scatter", size, I, group="cp")]
    part = core_part(d, own, blocks, tuple(f_items), tuple(b_items))
    return replace(part, forward_bytes=part.forward_bytes + size, backward_bytes=part.backward_bytes + 2 * size)


def _all_to_all(d: Dims, own: Core, ranks: int, group: str, core: Callable[[Core], Operator]) -> Operator:
    """Heads for tokens among the `ranks` of `group`: four exchanges each way; in between `core` has their tokens of
    heads / ranks.

    Where a rank has fewer key and value heads than `ranks`, they are repeated so that each rank gets one.
    """
    kv_heads = max(own.kv_heads, ranks)
    whole = replace(
        own,
        q_len=own.q_len * ranks,
        kv_len=own.kv_len * ranks,
        heads=ceil_div(own.heads, ranks),
        kv_heads=ceil_div(kv_heads, ranks),
    )
    unit = d.batch * own.q_len * d.act_bytes
    sizes = {
        "query": unit * own.heads * own.head_dim,
        "key": unit * kv_heads * own.head_dim,
        "value": unit * kv_heads * own.v_head_dim,
    }
    out = unit * own.heads * own.v_head_dim
    outputs = {"output_again": out, "doutput": out} if d.framework.context.exchanges_output else {"doutput": out}
    part = core(whole)
    return replace(
        part,
        forward=(*_exchanges(d, sizes, group, F), *part.forward, *_exchanges(d, {"output": out}, group, F)),
        backward=(
            *_exchanges(d, outputs, group, I),
            *part.backward,
            *_exchanges(d, {f"d{n}": s for n, s in sizes.items()}, group, I),
        ),
        output_bytes=out,
    )


def _rings(d: Dims, own: Core, rank: int, p: Parallelism, pieces: _Pieces | None = None) -> Operator:
    """Heads exchanged for tokens among consecutive ranks, and rings of one rank of each such group, as Transformer
    Engine's `cp_comm_type` a2a+p2p (`AttnFuncWithCPAndKVP2P`, whose `cp_group` is then a list of two).

    Consecutive ranks hold consecutive pieces of a zigzag, and those folded back, so what a group holds is a rank's part
    of a zigzag over groups. A ring message has as many bytes as that of a ring over all ranks, and there are
    cp / exchanged − 1 of them. `pieces`: of packed sequences cut contiguously, of which a group holds one.
    """
    ranks = p.cp_exchanged
    beside = not d.framework.context.exchanges_output

    def over_groups(part: Core) -> Operator:
        if pieces is not None:
            return pieces.core(d, part, rank // ranks, d.cp // ranks, "cp_ring", beside)
        blocks = ring_blocks(part, d.cp // ranks, rank // ranks, p.cp_split)
        return ring(d, part, blocks, group="cp_ring", exchanged=beside)

    return _all_to_all(d, own, ranks, "cp_exchanged", over_groups)


def _exchanges(d: Dims, sizes: dict[str, float], group: str, phase: Phase) -> list[Item]:
    """Exchanges of tensors of these bytes, one after the other.

    Transformer Engine copies each tensor before and behind its exchange. While one is on its way, the next one is
    copied, and the one before it, on another stream (`flash_attn_a2a_communicate`).
    """
    kind = "all_to_all"
    if not d.framework.context.copies:
        return [collective(f"ulysses_{name}", kind, size, phase, group=group) for name, size in sizes.items()]
    items: list[Item] = []
    for name, size in sizes.items():
        items += copied(d, f"{name}_split", size, phase)
        items.append(collective(f"ulysses_{name}", kind, size, phase, f"ulysses_{name}", group))
    for name, size in sizes.items():
        items += [Wait(f"ulysses_{name}", phase), *copied(d, f"{name}_join", size, phase)]
    return items


def _whole_heads(d: Dims, whole: Core) -> Operator:
    """The core of whole sequences of some heads."""
    beside = not d.framework.context.exchanges_output
    return core_part(d, whole, (whole,), core_forward(d, whole), core_backward(d, whole), exchanged=beside)
