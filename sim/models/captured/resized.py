"""Images resized with the channels first: kernels whose threads go through all images' channels, one after another.

A thread has a place of the result and loops over images and channels (aten/src/ATen/native/cuda: UpSampleLinear1d.cu,
UpSampleBilinear2d.cu, UpSampleTrilinear3d.cu; of the gradients all but the bilinear one). So few places leave
multiprocessors idle, however many channels there are. In the machine code of torch 2.14 for Hopper (cuobjdump -sass
libtorch_cuda.so) the loads of a channel wait for the result of the one before, which is stored first. The operator
before has just written the input, so that one that fits in the second cache is loaded from there. No such kernel was
measured.

Left out: bicubic interpolation forward, which has a second kernel, antialiasing, and gradients in 16 bits, whose sums
(bicubic and linear) compare and swap, and so wait, too.
"""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator
from sim.models.captured.layout import NARROW, has_channels_last
from sim.models.torch_kernels.latencies import CACHE_BYTES, LOAD_CLOCKS, SECOND_CACHE_CLOCKS
from sim.models.torch_kernels.layer_norm_clocks import MULTIPROCESSORS, Clocks

# Threads of a multiprocessor: as many blocks as its 65,536 registers leave room for (cuobjdump -res-usage). Blocks have
# 512 threads of 40 registers (linear), 1,024 of 56 and 64, 512 of 104, and 256 of 128 (of 64 in fp32).
_THREADS = {
    "aten.upsample_linear1d": 1536,
    "aten.upsample_linear1d_backward": 1536,
    "aten.upsample_bilinear2d": 1024,
    "aten.upsample_bicubic2d_backward": 1024,
    "aten.upsample_trilinear3d": 512,
    "aten.upsample_trilinear3d_backward": 512,
}
_FP32_THREADS = {"aten.upsample_trilinear3d_backward": 1024}
RESIZED = tuple(_THREADS)
BY_ELEMENT = ("aten.upsample_bilinear2d",)  # with the channels last each result has a thread


def resized_clocks(op: CapturedOperator) -> Clocks:
    """Return the clocks of the threads' loops; a gradient's go through the places of the result's gradient.

    >>> from sim.inputs.program_file import Tensor
    >>> x, y = Tensor("bf16", (8, 512, 16, 16), ()), Tensor("bf16", (8, 512, 64, 64), ())
    >>> op = CapturedOperator("aten.upsample_bilinear2d", "forward", "", (x,), (y,), 1, False)
    >>> round(resized_clocks(op).alone / 1.98e3)  # microseconds on an H200
    544
    """
    large = op.inputs[0] if op.name.endswith("_backward") else op.outputs[0]
    if op.name in BY_ELEMENT and has_channels_last(op.inputs[0]):
        return Clocks()
    images, channels, *places = large.shape
    threads = _THREADS[op.name] if large.dtype in NARROW else (_THREADS | _FP32_THREADS)[op.name]
    turns = math.ceil(math.prod(places) / (MULTIPROCESSORS * threads))
    load = SECOND_CACHE_CLOCKS if op.inputs[0].bytes <= CACHE_BYTES else LOAD_CLOCKS
    return Clocks(0.0, turns * images * channels * load)
