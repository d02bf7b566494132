"""A measured run's file: what `calibrate.measure` writes about a real execution of a scenario, read and checked."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.core.errors import InputError
from sim.core.timeline import ACTION_KINDS
from sim.inputs.file_kinds import SCENARIO, kind_of, other_format, read_data, refuse_other_kind
from sim.inputs.parallelism import MAX_RANKS
from sim.inputs.shipped import shipped_scenarios

FORMAT = "measured-run/1"
MOST_VARYING = 100_000  # actions that jitter is taken from
QUIET_CORES = 0.25  # a run is noisy where others than its ranks kept more cores busy
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Cores = Annotated[float, Field(ge=0, le=1e6)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
StepTime = Annotated[float, Field(gt=0, le=1e9)]


class _Record(BaseModel):
    """Keys beyond those named are left alone: other tools may add their own."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class MeasuredAction(_Record):
    """One thing a rank did. Stage and micro-batch are -1 where they have no meaning."""

    rank: int = Field(ge=0, le=MAX_RANKS)
    kind: str = Field(min_length=1, max_length=40)
    stage: int = Field(default=-1, ge=-1, le=1_000_000)
    micro_batch: int = Field(default=-1, ge=-1, le=100_000_000)
    start_s: Seconds
    end_s: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> MeasuredAction:
        if self.end_s < self.start_s:
            raise ValueError(f"end_s {self.end_s} is before start_s {self.start_s}")
        return self


class MeasuredMemory(_Record):
    """One rank's memory: peak of allocated bytes, the most that was saved for backward at once, and what was allocated
    over the first steps, as (steps done with their fractions, bytes)."""

    rank: int = Field(ge=0, le=MAX_RANKS)
    allocated_peak_bytes: Bytes
    saved_for_backward_bytes: Bytes | None = None
    over_steps: tuple[tuple[Seconds, Bytes], ...] = Field(default=(), max_length=1_000_000)


class MeasuredOperator(_Record):
    """An operator's seconds in one phase of a step: forward, backward or optimizer."""

    operator: str = Field(min_length=1, max_length=200)
    phase: str = Field(min_length=1, max_length=40)
    seconds: Seconds
    count: int = Field(default=1, ge=0, le=1_000_000_000)


class TorchBeside(_Record):
    """Steps of torch's own implementation and of the bundled one, taken in turns."""

    what: str = Field(min_length=1, max_length=200)
    step_times_s: tuple[StepTime, ...] = Field(min_length=1, max_length=1_000_000)
    bundled_step_times_s: tuple[StepTime, ...] = Field(min_length=1, max_length=1_000_000)


class MeasuredRun(_Record):
    """A file of format `measured-run/1`. `actions` are of one representative step, from its start.

    `foreign_cores`: what others than the ranks kept busy during each step, `calibration_foreign_cores` during each
    calibration between them. `warnings`: what the ranks warned of.
    """

    format: Literal["measured-run/1"]
    scenario: dict[str, Any]
    environment: dict[str, Any] = Field(default_factory=dict)
    step_times_s: tuple[StepTime, ...] = Field(min_length=1, max_length=1_000_000)
    foreign_cores: tuple[Cores, ...] = Field(default=(), max_length=1_000_000)
    calibration_foreign_cores: tuple[Cores, ...] = Field(default=(), max_length=1_000_000)
    warnings: tuple[Annotated[str, Field(max_length=2000)], ...] = Field(default=(), max_length=1000)
    actions: tuple[MeasuredAction, ...] = Field(default=(), max_length=10_000_000)
    memory: tuple[MeasuredMemory, ...] = ()
    operators: tuple[MeasuredOperator, ...] = Field(default=(), max_length=100_000)
    losses: tuple[float, ...] = ()
    torch: TorchBeside | None = None
    schedule: tuple[tuple[Annotated[str, Field(max_length=80)], ...], ...] | None = None
    profile: dict[str, Any] | None = None

    @property
    def step_time_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_s)

    @property
    def noise(self) -> float:
        """Median absolute deviation of the steps, divided by their median."""
        middle = self.step_time_s
        return statistics.median(abs(t - middle) for t in self.step_times_s) / middle

    @property
    def others_cores(self) -> float | None:
        """The most cores that others kept busy in any step or calibration that counts; None where nobody looked."""
        return max((*self.foreign_cores, *self.calibration_foreign_cores), default=None)

    @property
    def quiet(self) -> bool:
        """Tell whether others left the machine alone, as far as is known."""
        return (self.others_cores or 0.0) <= QUIET_CORES


def load_measured(path: str | Path) -> MeasuredRun:
    """Read a measured run.

    Raises:
        InputError: naming file, key, what was found and what is allowed.
    """
    if not Path(path).exists() and str(path) in shipped_scenarios():
        wanted = "is a shipped scenario; a measured run is wanted (`stepsim calibrate measure` writes one)"
        raise InputError(f"{path}: {wanted}; for two scenarios there is `stepsim diff A B`")
    data = read_data(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        scenario = kind_of(data) == SCENARIO
        wanted = "a measured run is wanted" + "; for two scenarios there is `stepsim diff A B`" * scenario
        refuse_other_kind(path, data, wanted, own="measured-run")
        raise other_format(path, data, FORMAT)
    try:
        return MeasuredRun.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "file"
        raise InputError(f"{path}: {key}: {first['msg']}; found {str(first['input'])[:60]}") from None


def factors(run: MeasuredRun, where: str) -> tuple[float, ...]:
    """Return how computations varied: each one's time over the mean of its like (rank, kind, stage, and which piece of
    its micro-batch, where communication cuts it); their mean is 1.

    Raises:
        InputError: where no computation was recorded twice.
    """
    alike: dict[tuple[int, str, int, int], list[float]] = {}
    pieces: dict[tuple[int, str, int, int], int] = {}
    for a in run.actions[:MOST_VARYING]:
        if a.kind in ACTION_KINDS and a.end_s > a.start_s:
            whole = (a.rank, a.kind, a.stage, a.micro_batch)
            piece = pieces[whole] = pieces.get(whole, -1) + 1
            alike.setdefault((*whole[:3], piece), []).append(a.end_s - a.start_s)
    found = [s / statistics.fmean(times) for times in alike.values() if len(times) > 1 for s in times]
    if not found:
        raise InputError(f"{where}: actions: hold no computation of one rank and stage twice, so none varies")
    return tuple(found)
