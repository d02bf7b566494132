"""All forwards, then all backwards (AFAB).

Bubble ratio (p−1)/m. In flight: m. Source: GPipe (Huang et al. 2019, arXiv 1811.06965, fig. 2c). Backwards go
in the order of the forwards, as torch's and most implementations run them, not reversed as in the paper's
figure. The paper's recomputation is an option of the training step here, not of the schedule.
"""

from __future__ import annotations

from sim.core.actions import Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import actions, looped


def gpipe(p: int, m: int) -> Schedule:
    """Every rank does its m forwards and then its m backwards."""
    return looped(
        "gpipe", p, m, ([*actions([r] * m, Kind.F, range(m)), *actions([r] * m, Kind.B, range(m))] for r in range(p))
    )


FORM = ScheduleForm("gpipe", gpipe, blocking_sends=True)
