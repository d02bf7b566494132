"""A small real serving engine: paged KV cache, prefixes in host memory, continuous batching, greedy decoding."""
