"""Sizes of an iteration whose prices are kept; between them prices are linear."""

from __future__ import annotations

from bisect import bisect_right

EXACT_TOKENS = 64  # every number of tokens up to here has a price of its own


def sizes_around(tokens: int) -> tuple[int, int, float]:
    """The kept sizes below and above a number of tokens, and how far it is between them.

    >>> sizes_around(50), sizes_around(1000), sizes_around(1024)
    ((50, 50, 0.0), (992, 1024, 0.25), (1024, 1024, 0.0))
    """
    if tokens <= EXACT_TOKENS:
        return tokens, tokens, 0.0
    step = 1 << (tokens.bit_length() - 5)  # sixteen in an octave
    low = tokens // step * step
    return (low, low, 0.0) if low == tokens else (low, low + step, (tokens - low) / step)


LENGTHS = tuple(sorted({round(2 ** (i / 4)) for i in range(4 * 40)}))
CHUNKS = (0, *sorted({round(2 ** (i / 2)) for i in range(2 * 40)}))  # of prompts, and what is cached before them


def below(lengths: tuple[int, ...], length: float) -> int:
    """The number of the longest of `LENGTHS` or `CHUNKS` that is no longer than this one; 0 where all are longer."""
    return bisect_right(lengths, length, 1) - 1


def chunks_around(length: float) -> tuple[int, int, float]:
    """The lengths of `CHUNKS` below and above, and how far it is between them.

    >>> chunks_around(64), chunks_around(70)
    ((64, 91, 0.0), (64, 91, 0.2222222222222222))
    """
    at = below(CHUNKS, length)
    low, high = CHUNKS[at : at + 2]
    return low, high, (length - low) / (high - low)


def prefill_parts(prefills: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int, float]]:
    """Attention of prompt chunks, which are one kernel however their lengths differ (vLLM: flash_attn_varlen_func):
    each takes its part of what as many equal chunks take as have the iteration's prompt tokens, a number between two
    kept ones. For each kind of chunk and kept number: its tokens, those cached before them, the number and the part.

    >>> prefill_parts(((32, 32, 2), (64, 96, 1)))
    [(32, 0, 4, 0.5), (64, 32, 2, 0.5)]
    """
    if len(prefills) == 1 and prefills[0][2] == 1:  # as in most iterations
        q, kv, _ = prefills[0]
        return [(q, kv - q, 1, 1.0)]
    tokens = sum([q * alike for q, _, alike in prefills])
    out = []
    for q, kv, alike in prefills:
        equal = tokens / q
        low, high, share = chunks_around(equal)
        out.append((q, kv - q, low, alike * (1.0 - share) / equal))
        if share:
            out.append((q, kv - q, high, alike * share / equal))
    return out
