"""Clocks that a thread waits for a number of the GPU's memory.

What a load from memory and one from the first cache take on an H100 (arXiv 2402.13499, latencies); each fetch from
memory brings 64 bytes.
"""

LOAD_CLOCKS, CACHED_CLOCKS, FETCHED_BYTES = 479.0, 41.0, 64
