"""Documents of uneven lengths packed into sequences: how long they are, and who waits for whom.

A query of a packed sequence sees its own document alone, so that attention takes Σ l² in place of seq_len²: kernels of
variable lengths over `cu_seqlens` (FlashAttention's `flash_attn_varlen_func`, Transformer Engine's THD format).
Everything else takes every token, padding too.

Lengths are listed, or drawn as Megatron's mock data for fine-tuning are (`MockSFTLowLevelDataset` in
megatron/training/datasets/sft_dataset.py): lognormal of `mean_seq_len` and `lognormal_sigma`, cut off at both ends.
They are packed as TRL does (`pack_dataset` in trl/data_utils.py): `bfd`, the longest first, each into the fullest
sequence with room (best fit, decreasing), the rest of a sequence is padding; or `wrapped`, one behind the other, cut
where a sequence ends. Sequences are shuffled and dealt to replicas in turn, as `DistributedSampler` does.

The step waits for the replica whose sequences have most pairs. All replicas are simulated as that one, and each of its
micro-batches as their mean: how micro-batches of one replica differ, which costs a pipeline bubbles, is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from sim.inputs.windows import Window

if TYPE_CHECKING:
    from sim.inputs.training_config import Packing


MOST_DOCUMENTS = 1_000_000  # of a step that are drawn
DRAWN = 1.25  # times what a step takes, as from a larger data set, whose half-empty last sequence is left out
WHOLE: tuple[tuple[Window | None, int], ...] = ((None, 1),)
Sequences = tuple[tuple[int, ...], ...]


class PackedBatch(Struct, frozen=True):
    """Hold how documents fill a global batch.

    `sequences`: the slowest replica's, each with its documents' lengths in order. `documents`: how many documents of
    each length a sequence of that replica has in the mean; `all_documents`: a sequence of the whole batch. `filled`:
    tokens of documents ÷ all tokens of the batch. `imbalance`: query-key pairs of the slowest replica ÷ the mean
    replica's.
    """

    sequences: Sequences
    documents: tuple[tuple[int, float], ...]
    all_documents: tuple[tuple[int, float], ...]
    filled: float
    imbalance: float


@lru_cache(maxsize=256)
def pack(
    packing: Packing, seq_len: int, number: int, dp: int, windows: tuple[tuple[Window | None, int], ...] = WHOLE
) -> PackedBatch:
    """`number` sequences of `seq_len` tokens, dealt to `dp` replicas. `windows`: as `windows_of` has them."""
    if packing.lengths:
        alike = _counted((packing.lengths,))
        return PackedBatch((packing.lengths,), alike, alike, sum(packing.lengths) / seq_len, 1.0)
    sequences = _drawn(packing, seq_len, number)
    pairs = [sum(_pairs(length, windows or WHOLE) for length in lengths) for lengths in sequences]
    replicas = [sum(pairs[i::dp]) for i in range(dp)]
    slowest = replicas.index(max(replicas))
    filled = sum(map(sum, sequences)) / (number * seq_len)
    own, imbalance = tuple(sequences[slowest::dp]), max(replicas) * dp / sum(replicas)
    return PackedBatch(own, _counted(own), _counted(tuple(sequences)), filled, imbalance)


def _pairs(length: int, windows: tuple[tuple[Window | None, int], ...]) -> float:
    """Query-key pairs of a document in all layers; half of a square where no window hides any."""
    return sum(
        layers * (length**2 / 2 if x is None or x.tokens >= length else x.pairs(length, length))
        for x, layers in windows
    )


def _counted(sequences: Sequences) -> tuple[tuple[int, float], ...]:
    found = Counter(length for lengths in sequences for length in lengths)
    return tuple((length, n / len(sequences)) for length, n in sorted(found.items()))


def _drawn(packing: Packing, seq_len: int, number: int) -> list[tuple[int, ...]]:
    """`number` sequences, in an order drawn too."""
    draw = np.random.default_rng(packing.seed)
    assert packing.mean_seq_len is not None
    sigma, longest = packing.lognormal_sigma, min(seq_len, packing.max_seq_len or seq_len)
    least = min(packing.min_seq_len, longest)
    lengths: list[int] = []
    tokens, needed = 0, DRAWN * number * seq_len
    while (short := needed - tokens) > 0:
        more = max(1, round(short / packing.mean_seq_len))
        drawn = draw.lognormal(math.log(packing.mean_seq_len) - sigma**2 / 2, sigma, more)
        found = np.clip(np.rint(drawn), least, longest).astype(int).tolist()
        lengths += found
        tokens += sum(found)
    packed = best_fit(lengths, seq_len) if packing.strategy == "bfd" else wrapped(lengths, seq_len)
    packed = packed[:-1] if len(packed) > number else packed
    draw.shuffle(packed)
    return packed[:number]


def expected_tokens(packing: Packing, seq_len: int) -> float:
    """Tokens of a drawn document in the mean, once its length is cut off at both ends.

    With Φ the normal distribution, least a, longest b, median e^μ: a·Φ(α) + mean·(Φ(β − σ) − Φ(α − σ)) + b·(1 − Φ(β)),
    α = (ln a − μ)/σ, β = (ln b − μ)/σ.
    """
    mean, sigma = packing.mean_seq_len, packing.lognormal_sigma
    assert mean is not None
    longest = min(seq_len, packing.max_seq_len or seq_len)
    least = min(packing.min_seq_len, longest)
    if sigma == 0.0:
        return float(min(max(mean, least), longest))
    median = math.log(mean) - sigma**2 / 2
    low, high = ((math.log(end) - median) / sigma for end in (least, longest))
    below = [math.erfc(-x / math.sqrt(2)) / 2 for x in (low, low - sigma, high - sigma)]
    return least * below[0] + mean * (below[2] - below[1]) + longest * math.erfc(high / math.sqrt(2)) / 2


def best_fit(lengths: Sequence[int], seq_len: int) -> list[tuple[int, ...]]:
    """Longest first, each into the fullest sequence that has room.

    >>> best_fit([3, 9, 4, 6, 5, 1], 10)
    [(9, 1), (6, 4), (5, 3)]
    """
    room: list[tuple[int, int]] = []  # of each sequence, with its number
    found: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(room, (length, 0))
        if at == len(room):
            found.append([])
            left, number = seq_len, len(found) - 1
        else:
            left, number = room.pop(at)
        found[number].append(length)
        if left > length:
            insort(room, (left - length, number))
    return [tuple(x) for x in found]


def wrapped(lengths: Sequence[int], seq_len: int) -> list[tuple[int, ...]]:
    """Documents one behind the other: one that reaches a sequence's end is cut, and goes on in the next sequence.

    >>> wrapped([3, 9, 4, 6], 10)
    [(3, 7), (2, 4, 4), (2,)]
    """
    found: list[list[int]] = [[]]
    room = seq_len
    for length in lengths:
        while length >= room:
            if room:
                found[-1].append(room)
            length, room = length - room, seq_len
            found.append([])
        if length:
            found[-1].append(length)
            room -= length
    return [tuple(x) for x in found if x]


def pairs_between(lengths: Sequence[int], queries: tuple[int, int], keys: tuple[int, int]) -> float:
    """Causal pairs of the queries at places [a, b) with keys at [c, d), within documents; half of a square on the
    diagonal, as everywhere.

    >>> [pairs_between([6, 2], *x) for x in (((0, 8), (0, 8)), ((4, 8), (4, 8)), ((4, 8), (0, 4)), ((0, 4), (4, 8)))]
    [20.0, 4.0, 8.0, 0.0]
    """
    total = 0.0
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        begin = end - length
        a, b = max(begin, queries[0]), min(end, queries[1])
        c, d = max(begin, keys[0]), min(end, keys[1])
        if a < b and c < d:
            # pieces are the same or lie apart, so a query sees all of these keys or, of its own, those before it
            total += (b - a) ** 2 / 2 if (a, b) == (c, d) else float((b - a) * (d - c)) if d <= a else 0.0
    return total


def queries_between(lengths: Sequence[int], queries: tuple[int, int], keys: tuple[int, int]) -> list[int]:
    """Return the queries of each document with keys at places [c, d) and queries at [a, b), not before them.

    >>> [queries_between([6, 2], *x) for x in (((0, 8), (0, 8)), ((4, 8), (4, 8)), ((4, 8), (0, 4)))]
    [[6, 2], [2, 2], [2]]
    """
    found = []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        a, b = max(end - length, queries[0]), min(end, queries[1])
        if a < b and end - length < keys[1]:
            found.append(b - a)
    return found
