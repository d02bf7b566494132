"""Compute the bytes that a stage's blocks keep of a micro-batch, and what they need while they run."""

from __future__ import annotations

from sim.results.memory_changes import on_device
from sim.search.mesh_prices import BlockSort


def stage_bytes(blocks: list[BlockSort], offload: bool) -> tuple[float, float, float]:
    """Return the bytes that a stage keeps of a micro-batch, and the bytes of its forward and backward beyond these.

    A block runs while the blocks after it hold nothing of the micro-batch: their forward has not run, or their backward
    has. Offloaded activations are not kept; while a block runs, only its own and those of the block before are present.
    """
    saved = [b.saved_bytes for b in blocks]
    # A block's activations leave for the host while the next block runs, so a micro-batch keeps nothing on the device.
    if offload:
        present = list(zip(on_device(saved), (b.block for b in blocks), strict=True))
        return (
            0.0,
            max((size + b.forward_peak_bytes for size, b in present), default=0.0),
            max((size + b.backward_peak_bytes for size, b in present), default=0.0),
        )
    total = sum(saved)
    # The caller adds all saved bytes, so a peak counts from that sum. A block in the middle of a stage runs while the
    # blocks after it have saved nothing, so its peak is smaller by their bytes.
    now = -total
    forward = backward = 0.0
    for block, size in zip(blocks, saved, strict=True):
        now += size
        forward = max(forward, now + block.block.forward_peak_bytes)
        backward = max(backward, now + block.block.backward_peak_bytes)
    return total, forward, backward
