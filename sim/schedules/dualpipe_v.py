"""DualPipeV: DualPipe cut in half, one copy of the model as a V of 2p stages on p ranks.

Rank r holds stages r and 2p−1−r; m ≥ 2p. Bubble (p−1)(F&B + B − 3W) in times of its half-size stages.
In flight: at most 2p + 1 half-size stages.
Source: "cut-in-half" (Sea AI Lab) as in github.com/deepseek-ai/DualPipe and torch's ScheduleDualPipeV.
"""

from __future__ import annotations

from sim.core.actions import Schedule
from sim.schedules.dualpipe import two_ended
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import ListWriter, v_shaped


def dualpipe_v(p: int, m: int) -> Schedule:
    """Half of DualPipe's ranks for 2p ranks; what came from the other end comes back up the V."""
    return v_shaped("dualpipe_v", p, m, (two_ended(ListWriter(), p, m, r, r, 2 * p - 1 - r) for r in range(p)))


FORM = ScheduleForm("dualpipe_v", dualpipe_v, fewest_micro_batches=lambda p: 2 * p)
