"""DualPipe: micro-batches from both ends of the pipeline at once, forward and backward overlapped.

Rank r holds parts r and p−1−r of the model: two copies of it, so 2p schedule stages in two chains; stages
0..p−1 carry micro-batches 0..m/2−1 down the ranks, stages p..2p−1 carry m/2..m−1 up. p and m even, m ≥ 2p.
Bubble (p/2−1)(F&B + B − 3W), F&B an overlapped pair and B a full backward. In flight: at most p + 1 stages.
Source: DeepSeek-V3 technical report (arXiv 2412.19437, section 3.2.1, fig. 5, table 2), and the order of
phases of github.com/deepseek-ai/DualPipe. Left out: how an overlapped pair shares the GPU's SMs, which is
its cost.
"""

from __future__ import annotations

from sim.core.actions import Entry, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import ListWriter

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def dualpipe(p: int, m: int) -> Schedule:
    """Half of the micro-batches go down the ranks, half go up."""
    down, up = tuple(range(p)), tuple(range(p, 2 * p))
    ranks = []
    for r in range(p):
        near, far = (r, 2 * p - 1 - r) if r < p // 2 else (2 * p - 1 - r, r)
        writer = ListWriter(dict.fromkeys(up, m // 2))
        ranks.append(tuple(two_ended(writer, p // 2, m // 2, min(r, p - 1 - r), near, far)))
    rank_of_stage = (*range(p), *reversed(range(p)))
    return Schedule("dualpipe", m, rank_of_stage, (*range(p), *range(p)), (down, up), tuple(ranks))


def two_ended(w: ListWriter, n: int, m: int, r: int, near: int, far: int) -> list[Entry]:
    """The list of the r-th of n ranks from an end of the pipeline to its middle (or to the bottom of a V).

    `near` is the stage whose micro-batches come from that end, `far` the one they or others come back on;
    m micro-batches run on each.
    """
    w.repeat(2 * (n - 1 - r), (near, F))
    w.repeat(r + 1, (near, F), (far, F))
    for _ in range(n - 1 - r):
        w.repeat(1, (far, I))
        w.weights(1)
        w.repeat(1, (far, F))
    for i in range(m - 2 * n + r + 1):
        if i == 0 and r == n - 1:  # nothing could hide yet: apart, the bubble is smaller
            w.repeat(1, (near, F), (far, B))
        else:
            w.overlap(near, far)
        w.overlap(far, near)
    for _ in range(n - 1 - r):
        w.repeat(1, (far, B))
        w.overlap(far, near)
    # Of the last 2(r+1) backwards the second half leave their weight gradients for the wait at the end.
    for i in range(2 * (r + 1)):
        w.repeat(1, (near if i % 2 else far, B if i < r + 1 else I))
    for _ in range(n - 1 - r):
        w.weights(1)
        w.repeat(1, (near, I))
    w.weights(r + 1)
    return w.entries


FORM = ScheduleForm(
    "dualpipe",
    dualpipe,
    ranks_multiple=2,
    micro_batches_multiple=lambda p: 2,
    fewest_micro_batches=lambda p: 2 * p,
)
