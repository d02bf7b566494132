"""Memory that no order of actions avoids: what a stage holds of a micro-batch."""

from __future__ import annotations

from sim.results.memory import on_device
from sim.search.mesh_prices import BlockSort


def stage_bytes(blocks: list[BlockSort], offload: bool) -> tuple[float, float, float]:
    """What a stage keeps of a micro-batch, and what running its forward and its backward takes beyond that at the most.

    Block by block: those after it are not there yet, or not any more. Offloaded activations are not kept, and of them
    its own and those of the block before it are there.
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
    # The caller adds the whole of `saved`, so what is beyond it counts from there. A block's peak in the middle of a
    # stage comes with less saved, and is smaller by the blocks that have not run yet.
    now = -total
    forward = backward = 0.0
    for block, size in zip(blocks, saved, strict=True):
        now += size
        forward = max(forward, now + block.block.forward_peak_bytes)
        backward = max(backward, now + block.block.backward_peak_bytes)
    return total, forward, backward
