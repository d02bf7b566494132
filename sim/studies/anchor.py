"""One measured step of a user's own as an anchor: how far off the simulation is there, and what follows for a change.

A simulation and a run differ for reasons that most changes of layout or cluster keep: kernels, host, input pipeline.
The changed step is therefore simulated too and scaled by measured ÷ simulated of the step that was measured. Scaling
removes a common factor and nothing else: it is wrong where the change moves time out of the part that was off.
"""

from __future__ import annotations

from sim.results.records import Record
from sim.results.result import StepResult


class Anchor(Record, frozen=True):
    """A measured step beside its simulation. `anchored_step_time_s`: the simulated step of the changed scenario times
    measured ÷ simulated; without a change, the measured time itself."""

    measured_s: float
    simulated_s: float
    error: float  # simulated ÷ measured − 1
    inside_interval: bool  # the measured time lies in the simulation's 90 % interval
    anchored_step_time_s: float
    anchored_tokens_per_s: float


def anchor(measured_s: float, as_measured: StepResult, changed: StepResult) -> Anchor:
    """`as_measured`: the simulation of what ran; `changed`: of what is asked for."""
    low, high = as_measured.step_time_interval_s
    simulated_s, inside = as_measured.step_time_s, low <= measured_s <= high
    ratio = measured_s / simulated_s
    scaled = measured_s * (changed.step_time_s / simulated_s), changed.tokens_per_s / ratio  # 1 where nothing changed
    return Anchor(measured_s, simulated_s, 1 / ratio - 1, inside, *scaled)
