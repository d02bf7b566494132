"""Optimizers: one record for each, and the kernels of a step."""
