"""A simulated step beside a measured one, as records (format sim-compare/1)."""

from __future__ import annotations

from typing import Any, Self

from sim.results.records import Record


class Pair(Record, frozen=True, kw_only=True):
    """A figure of both sides. `error`: simulated ÷ measured − 1, None where nothing was measured."""

    simulated: float
    measured: float
    error: float | None

    @classmethod
    def of(cls, simulated: float, measured: float, **more: Any) -> Self:
        """Two figures with their error."""
        error = simulated / measured - 1 if measured > 0 else None
        return cls(simulated=simulated, measured=measured, error=error, **more)

    @property
    def sides(self) -> tuple[bool, bool]:
        """Tell which sides have the figure."""
        return True, True


class ActionPair(Pair, frozen=True, kw_only=True):
    """Mean seconds of one action of a kind, and how many actions of it each side has.

    `whole`: the sides cut what a step communicates into other numbers of messages; the seconds are those of all.
    """

    simulated_count: int
    measured_count: int
    whole: bool = False

    @property
    def sides(self) -> tuple[bool, bool]:
        """Tell which sides have such an action."""
        return self.simulated_count > 0, self.measured_count > 0


class OperatorPair(Pair, frozen=True, kw_only=True):
    """Seconds of an operator in a phase of the step."""

    operator: str
    phase: str


class RankPair(Record, frozen=True):
    """A rank's seconds in F, B and W, and the end of the last of them."""

    rank: int
    compute_s: Pair
    pipeline_end_s: Pair


class MemoryPair(Record, frozen=True):
    """A rank's peak, and what it keeps for the backward where that was measured."""

    rank: int
    peak_bytes: Pair
    saved_for_backward_bytes: Pair | None = None


class MemoryOverSteps(Record, frozen=True):
    """A rank's memory over its first steps: each step's peak, and curves as (steps done, bytes)."""

    rank: int
    peaks: tuple[Pair, ...]
    simulated: tuple[tuple[float, float], ...]
    measured: tuple[tuple[float, float], ...]


class Steps(Record, frozen=True):
    """The timed steps of a run."""

    count: int
    min_s: float
    max_s: float


class Ends(Record, frozen=True):
    """How far the ends of the same actions lie apart, as fractions of the measured step."""

    mean: float
    max: float


class TorchPair(Record, frozen=True):
    """Torch's own implementation, and the bundled one in turns with it, each beside the simulation: median steps."""

    what: str
    step_time_s: Pair
    bundled_step_time_s: Pair


class Comparison(Record, frozen=True, kw_only=True):
    """A simulated step beside a measured one.

    `actions`: by kind; of communications, without waiting for other ranks. `replay`: the recorded step's own durations,
    put through the simulator, against its own length; it tells an error of schedule or rendezvous (large here too)
    from an error of cost (small here). `others_cores`: how many cores other processes kept busy, None where nobody
    looked. `cancelled`: which parts' errors make the step's look smaller.
    """

    format: str = "sim-compare/1"
    scenario: str
    profile: str
    step_time_s: Pair
    step_time_interval_s: tuple[float, float]
    noise: float
    quiet: bool
    others_cores: float | None
    warnings: tuple[str, ...]
    steps: Steps
    actions: dict[str, ActionPair]
    cancelled: str | None = None
    replay: Pair | None
    action_ends: Ends
    ranks: tuple[RankPair, ...]
    memory: tuple[MemoryPair, ...]
    memory_over_steps: tuple[MemoryOverSteps, ...]
    operators: tuple[OperatorPair, ...] | None = None
    torch: TorchPair | None = None
    tolerance: float
    within_tolerance: bool
