"""Kernels of torch that take longer than their bytes: the clocks or the passes that each needs."""
