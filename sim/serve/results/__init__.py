"""What a served workload shows: latencies, rates, memory, timeline, intervals."""
