"""A small serving engine that really runs: paged KV cache, prefixes in host memory, continuous batching, greedy
decoding."""
