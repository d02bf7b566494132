"""Clocks of torch's kernels over lists of tensors (aten/src/ATen/native/cuda/Foreach*.cu), for an element of a list.

With elements of 16 bits these outlast the bytes. Two lists of 0.5 and 1.4 billion elements on an H200
(`adamw foreach` and `clipped` in scenarios/measured/gpu_kernels/h200.json).
"""

FUNCTION_CLOCKS = 0.35  # products, sums, quotients, roots
NORM_CLOCKS = 0.21
