"""Torch's kernels that more than bytes bound: how many clocks or passes each needs."""
