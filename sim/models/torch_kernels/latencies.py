"""Clocks that a thread waits for a number of the GPU's memory.

What a load from memory, one from the second cache and one from the first take on an H100 (arXiv 2402.13499, latencies);
each fetch from memory brings 64 bytes.
"""

LOAD_CLOCKS, SECOND_CACHE_CLOCKS, CACHED_CLOCKS, FETCHED_BYTES = 479.0, 263.0, 41.0, 64
# Of an H100's or H200's second cache, and of a multiprocessor's first (NVIDIA H100 architecture, white paper).
CACHE_BYTES, FIRST_CACHE_BYTES = 50 * 2**20, 256 * 2**10
