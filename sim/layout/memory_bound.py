"""Memory that no order of actions avoids: what a stage holds of a micro-batch, and how many a schedule starts with."""

from __future__ import annotations

import numpy as np

from sim.layout.grid_prices import Sort
from sim.layout.pipeline_bound import Floats
from sim.memory import on_device


def stage_bytes(blocks: list[Sort], offload: bool) -> tuple[float, float, float]:
    """What a stage keeps of a micro-batch, and what running its forward and its backward takes beyond that at the most.

    Block by block: those after it are not there yet, or not any more. Offloaded activations are not kept, and of them
    its own and those of the block before it are there.
    """
    saved = [b.saved_bytes for b in blocks]
    if offload:
        present = list(zip(on_device(saved), (b.block for b in blocks), strict=True))
        return (
            0.0,
            max((size + b.forward_peak_bytes for size, b in present), default=0.0),
            max((size + b.backward_peak_bytes for size, b in present), default=0.0),
        )
    total = sum(saved)
    now = -total
    forward = backward = 0.0
    for block, size in zip(blocks, saved, strict=True):
        now += size
        forward = max(forward, now + block.block.forward_peak_bytes)
        backward = max(backward, now + block.block.backward_peak_bytes)
    return total, forward, backward


def forwards_first(schedule: str, p: int, v: int, m: int) -> Floats:
    """By stage: forwards that a rank runs before its first backward, where the schedule's definition tells; else 1."""
    r = np.arange(p)
    if p == 1 or schedule in ("naive", "zb_search"):
        return np.ones(p * v)
    if schedule == "gpipe":
        return np.full(p, float(m))
    if schedule in ("1f1b", "zb_h1"):
        return np.minimum(m, p - r).astype(float)
    if schedule == "zb_h2":
        return np.minimum(m, 2 * (p - r) - 1).astype(float)
    if schedule == "interleaved_1f1b":
        n = np.minimum(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1)
        rounds, rest = np.divmod(n, p * v)
        counts = [rounds * p + np.clip(rest - c * p, 0, p) for c in range(v)]
        return np.concatenate(counts).astype(float)
    if schedule == "zb_v":
        return np.concatenate([np.minimum(m, 2 * p - 1 - r), np.minimum(m, r[::-1] + 1)]).astype(float)
    half = p // 2 if schedule == "dualpipe" else p
    local = np.minimum(r, p - 1 - r) if schedule == "dualpipe" else r
    near, far = 2 * (half - 1 - local) + local + 1, local + 1
    if schedule == "dualpipe":
        down = np.where(r < half, near, far)
        return np.concatenate([down, down]).astype(float)  # stage p + i is on rank p − 1 − i, which mirrors rank i
    return np.concatenate([near, far[::-1]]).astype(float)


def searched_forwards(memory: float, m: int, forward_s: Floats, input_grad_s: Floats, waits_s: float) -> float:
    """Forwards that rank 0 runs before its first backward in all lists that `zb_search` chooses from, at the least.

    The handcrafted ones begin with as many as its limit and p allow. Its greedy ones go on with forwards until they
    know when a backward will come: not before one forward of every rank and the input gradients of ranks 2 and up.
    Seconds are the least of each rank; rank 0's forward takes up to `waits_s` more. Where that may be too long, 1.
    """
    count = min(len(forward_s), int(memory * len(forward_s) + 1e-9))
    known_s = float(forward_s.sum() + input_grad_s[2:].sum())
    early = (count - 1) * (float(forward_s[0]) + waits_s) < known_s * (1 - 1e-9)
    return float(min(m, count)) if early else 1.0
