"""What a step shows: memory, metrics, what faults cost, and the result as plain data."""
