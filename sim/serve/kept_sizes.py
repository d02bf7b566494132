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


def length_below(length: float) -> int:
    """The longest kept length that is no longer than this one."""
    return LENGTHS[bisect_right(LENGTHS, length, 1) - 1]


def around(length: float) -> tuple[tuple[int, float], ...]:
    """The lengths of `CHUNKS` below and above, each with its share; one length where it is met exactly."""
    above = bisect_right(CHUNKS, length, 1)
    low = CHUNKS[above - 1]
    if low == length:
        return ((low, 1.0),)
    high = CHUNKS[above]
    share = (length - low) / (high - low)
    return (low, 1.0 - share), (high, share)
