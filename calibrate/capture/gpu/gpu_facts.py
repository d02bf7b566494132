"""Holds what torch is told of the GPU that a capture stands for: an H100's properties."""

from __future__ import annotations

from types import SimpleNamespace

CAPABILITY = (9, 0)
MEMORY_BYTES = 80 * 2**30
# Names are those of `torch.cuda.get_device_properties`. An H200 differs in its memory alone.
PROPERTIES = SimpleNamespace(
    name="GPU",
    total_memory=MEMORY_BYTES,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    shared_memory_per_block_optin=227 * 1024,
    gcnArchName="",  # of AMD's GPUs
)
