"""Least seconds of torch's kernels whose instructions take longer than their bytes.

torch reads and writes several neighbouring elements at once only if all operands lie in memory in one order and have
one dtype. Other kernels compute the place of each element (`OffsetCalculator`), or choose a cast for each operand of
each element (`LoadWithCast`, `StoreWithCast`; ATen/native/cuda/CUDALoops.cuh: gpu_kernel_impl). Instructions bound
them, not memory: they take as long on an H200 as on an H100. So a multiprocessor needs a number of clocks for an
element.

`tools/fit_unvectorized.py` fits `PLACE_CLOCKS` and `CAST_CLOCKS` to chains of operators in eager torch: those of Liger
0.6 on an H100 (liger_kernels.json) and those of `calibrate.run` on an H200 (scenarios/cuda/h200.json, 2026-11-20).
Constants of one half of these chains predict the other half with a mean error of 4 to 5 %.
"""

from __future__ import annotations

from sim.core.operator_kinds import PLACE_CLOCKS
from sim.core.program import DEPTHWISE, TORCH_SOFTMAX_UNALIGNED, Compute, SumShape
from sim.models.torch_kernels.latencies import LOAD_CLOCKS
from sim.models.torch_kernels.row_sums import shared_sum
from topology.spec import GpuSpec

CAST_CLOCKS = 0.34  # for an element of each operand, with the result, if dtypes differ
TRANSPOSE_CLOCKS = 1.7  # for an element whose neighbour lies in another row: the largest `permute` points of h200.json
# For an element of a concatenation of parts of tensors (Shape.cu: CatArrayBatchedCopy). Those of rotary embeddings in
# Llama's layers take 1.47 times the 0.70 clocks on an H100 (scenarios/measured/gpu_programs); NeoX's 1.7 times.
CAT_CLOCKS = 1.03
# For an element of a softmax over rows that do not start at multiples of 16 bytes: gpt-oss's 2,049 scores of 16 bits.
SOFTMAX_CLOCKS = 1.4
CLOCKS_OF = {"cat": CAT_CLOCKS, "transposed": TRANSPOSE_CLOCKS, TORCH_SOFTMAX_UNALIGNED: SOFTMAX_CLOCKS}  # by kernel
# Of torch's fused AdamW over 16 bits (parameters, gradients, moments): time ÷ time of as many bytes in fp32. 14 bytes
# take 5.06 ps on an H200 (scenarios/measured/gpu_kernels/h200.json) and 7.0 ps on an H100 (medians of 20 steps of
# Transformers models, scenarios/measured/gpu_programs); at fp32's speeds it would be 4.05 and 5.36 ps.
NARROW_OPTIMIZER, NARROW_OPTIMIZER_BYTES = 1.28, 16.0
# For a row that a warp adds in a loop: it waits for an index and then for the row. 2,048 rows of 2,880 or 5,760
# numbers take 2.1 ms on an H100 (gradients of gpt-oss's biases, scenarios/measured/gpu_programs).
ROW_IN_TURN_S = 1.03e-6
# torch's sum over the rows of a matrix, for each wave of the blocks that share rows, beside the bytes and the loads of
# the last block (ATen/native/cuda/Reduce.cuh: global_reduce): the median of the shapes of 2,048 to 16,384 rows on an
# H100 (biases' gradients of Transformers models, scenarios/measured/gpu_programs).
SUM_WAVE_S = 5.4e-6
# For a result of a sum over rows whose threads have results of their own, such as a token's experts: each thread
# computes its place and waits for a load. Sums over two to four rows take 1.44 clocks in two steps on an H100
# (gptoss_4l and t5_large in scenarios/measured/gpu_programs) and 1.2 to 1.4 in four on an H200 (gpu_programs_h200).
SUM_RESULT_CLOCKS = 1.3
# For a product of a depthwise convolution in torch's own kernel (cuda/DepthwiseConv2d.cu). On an H100 filters of four
# over 2,304 channels of 1,027 samples take 27.7 us forward and 42.9 us for both gradients (Mamba 2,
# scenarios/measured/gpu_programs). Square filters of 1, 3 and 5, whose loops are unrolled, were not measured.
DEPTHWISE_CLOCKS = 0.65
UNCERTAINTY = 0.1  # twice the mean error
SUMS_ROWS = "reduce_first"  # kernel of a sum over rows, with points of its own
MEASURED_APART = ("broadcast", "mixed", "transposed", "cat", "slice_backward")  # points of `calibrate.run`


def sm_clocks_per_s(gpu: GpuSpec) -> float:
    """Return the clocks of all multiprocessors in a second; 0 if the data sheet does not say them."""
    peak = gpu.peak_flops_per_s.get("bf16") or gpu.peak_flops_per_s.get("fp16", 0.0)
    return peak / gpu.sm_flops_per_clock if gpu.sm_flops_per_clock else 0.0


def sum_seconds(shape: SumShape, bytes_s: float, clocks_per_s: float, sm_count: int) -> float:
    """Return the seconds of a sum whose bytes take `bytes_s`.

    A thread's loads wait for each other, which few threads do not hide, and results take clocks. Where blocks share the
    numbers of a result, the last one starts when all others have ended.
    """
    shared = shared_sum(shape, sm_count)
    load_s = LOAD_CLOCKS * sm_count / clocks_per_s
    results_s = 0.0 if shape.neighbours else shape.columns * SUM_RESULT_CLOCKS / clocks_per_s
    seconds = max(bytes_s, shared.loads * load_s, results_s)
    return seconds + (shared.waves * SUM_WAVE_S + shared.turns * load_s if shared.parts > 1 else 0.0)


def optimizer_slowdown(op: Compute) -> float:
    """Return how much longer a fused optimizer over 16 bits takes than its bytes do in fp32; 1 for other kernels."""
    narrow = op.kind == "optimizer" and 0.0 < op.bytes <= NARROW_OPTIMIZER_BYTES * op.single_elements
    return NARROW_OPTIMIZER if narrow else 1.0


def least_seconds(op: Compute, clocks_per_s: float, sm_count: int) -> float:
    """Return the seconds that a kernel's instructions take at least; 0 where nothing is known of them."""
    if not clocks_per_s:
        return 0.0
    counted_s = (op.clocks + op.lone_clocks * sm_count) / clocks_per_s
    return max(counted_s, op.rows_in_turn * ROW_IN_TURN_S, _of_single_elements(op, clocks_per_s))


def _of_single_elements(op: Compute, clocks_per_s: float) -> float:
    if not op.single_elements or op.kind == "optimizer":
        return 0.0
    if op.kernel == DEPTHWISE:
        return op.single_elements * DEPTHWISE_CLOCKS / clocks_per_s
    clocks = CAST_CLOCKS * op.casts if op.casts else PLACE_CLOCKS
    clocks = max(clocks, CLOCKS_OF.get(op.kernel, 0.0), TRANSPOSE_CLOCKS if op.kind == "permute" else 0.0)
    return op.single_elements * clocks / clocks_per_s
