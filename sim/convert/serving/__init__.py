"""Command lines of serving engines and of their benchmarks."""
