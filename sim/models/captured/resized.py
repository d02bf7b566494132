"""Images resized with the channels first: kernels whose threads go through all images' channels, one after another.

A thread has a place of the result and loops over images and channels (aten/src/ATen/native/cuda: UpSampleLinear1d.cu,
UpSampleBilinear2d.cu, UpSampleTrilinear3d.cu; of the gradients all but the bilinear one). So few places leave
multiprocessors idle, however many channels there are. In the machine code of torch 2.14 for Hopper (cuobjdump -sass
libtorch_cuda.so) the loads of a channel wait for the result of the one before, which is stored first. The registers of
such a kernel leave room for one block of a multiprocessor. No such kernel was measured.

Left out: bicubic interpolation forward, which has a second kernel, and antialiasing.
"""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator
from sim.models.captured.layout import has_channels_last
from sim.models.torch_kernels.latencies import LOAD_CLOCKS
from sim.models.torch_kernels.layer_norm_clocks import MULTIPROCESSORS, Clocks

_BLOCK_THREADS = {  # of one thread block
    "aten.upsample_linear1d": 512,
    "aten.upsample_linear1d_backward": 512,
    "aten.upsample_bilinear2d": 1024,
    "aten.upsample_bicubic2d_backward": 1024,
    "aten.upsample_trilinear3d": 512,
    "aten.upsample_trilinear3d_backward": 512,
}
RESIZED = tuple(_BLOCK_THREADS)
BY_ELEMENT = ("aten.upsample_bilinear2d",)  # with the channels last each result has a thread


def resized_clocks(op: CapturedOperator) -> Clocks:
    """Return the clocks of the threads' loops; a gradient's go through the places of the result's gradient.

    >>> from sim.inputs.program_file import Tensor
    >>> x, y = Tensor("bf16", (8, 512, 16, 16), ()), Tensor("bf16", (8, 512, 64, 64), ())
    >>> op = CapturedOperator("aten.upsample_bilinear2d", "forward", "", (x,), (y,), 1, False)
    >>> round(resized_clocks(op).alone / 1.98e3)  # microseconds on an H200
    991
    """
    large = op.inputs[0] if op.name.endswith("_backward") else op.outputs[0]
    if op.name in BY_ELEMENT and has_channels_last(op.inputs[0]):
        return Clocks()
    images, channels, *places = large.shape
    turns = math.ceil(math.prod(places) / (MULTIPROCESSORS * _BLOCK_THREADS[op.name]))
    return Clocks(0.0, turns * images * channels * LOAD_CLOCKS)
