"""How fast the simulator is, measured on this machine: `python -m benchmarks` from the repository's root."""
