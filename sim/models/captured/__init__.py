"""Captured programs: the operators that a run recorded, as kernels, bytes and memory of a model."""
