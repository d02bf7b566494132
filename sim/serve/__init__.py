"""A serving workload: arrivals, continuous batching, KV cache, prices of iterations, results."""
