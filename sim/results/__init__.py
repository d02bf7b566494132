"""Results of a step: memory, metrics, the cost of faults, and all of them as plain data."""
