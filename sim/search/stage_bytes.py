"""Compute the bytes that a stage's blocks keep of a micro-batch, and what they need while they run."""

from __future__ import annotations

from sim.inputs.training_config import ActivationOffload
from sim.programs.host_copies import host_copies, kept_on_device, on_device
from sim.search.mesh_prices import PricedBlock


def stage_bytes(blocks: list[PricedBlock], offload: ActivationOffload | bool) -> tuple[float, float, float]:
    """Return the bytes that a stage keeps of a micro-batch, and the bytes of its forward and backward beyond these.

    A block runs while the blocks after it hold nothing of the micro-batch: their forward has not run, or their backward
    has. Offloaded activations are not kept.
    """
    saved = [b.saved_bytes for b in blocks]
    if offload:
        copies = host_copies([b.block for b in blocks], offload)
        kept = kept_on_device(saved, copies)
        present = list(zip(on_device(saved, copies), (b.block for b in blocks), strict=True))
        return (
            kept,
            max((size + b.forward_peak_bytes for size, b in present), default=kept) - kept,
            max((size + b.backward_peak_bytes for size, b in present), default=kept) - kept,
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
