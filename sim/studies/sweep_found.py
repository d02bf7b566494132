"""What a sweep found, as records (format sim-sweep/1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.results.records import Record
from sim.studies.sweep_metrics import FIRST, GPUS, METRICS, NUMBERS, RATE, STEP, Metric, Workload


class SweepRow(Record, frozen=True):
    """A step, or a serving workload, with some keys changed.

    `figures`: by the keys of `NUMBERS`; empty where the row cannot be simulated, and `refused` says why. `memory`:
    bytes of the fullest rank by category, each at its maximum.
    `not_measured`: what to say where the GPU's kernels were not measured.
    """

    values: Mapping[str, Any]
    figures: Mapping[str, float]
    gpus: int = 0
    fits_in_memory: bool = False
    refused: str = ""
    not_measured: str = ""
    memory: Mapping[str, float] = {}

    def number(self, metric: Metric) -> float:
        """The row's value of a metric."""
        return self.gpus if metric is GPUS else self.figures[metric.key]

    @property
    def lost_share(self) -> float:
        """The part of a step that is lost to faults."""
        return self.figures["lost_s"] / self.figures["step_time_s"]


class SweepResult(Record, frozen=True, kw_only=True):
    """Rows of a sweep, in the order of the values.

    `vary`: each key with its values; `linked`: keys that change together; `metric`: the key by which rows compare.
    `left`: of a sweep that Ctrl-C ended, the number of combinations that were not simulated.
    """

    format: str = "sim-sweep/1"
    name: str
    workload: Workload
    vary: Mapping[str, Sequence[Any]]
    linked: tuple[tuple[str, ...], ...]
    metric: str
    rows: tuple[SweepRow, ...]
    wall_s: float
    cores: int
    left: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys and values as plain data. The figures stand in their row; those of a refused row are null."""
        return super().to_json() | {"rows": [_flat(row, NUMBERS[self.workload]) for row in self.rows]}

    @property
    def not_measured(self) -> str:
        """Which of the compared clusters' GPUs were not measured; nothing where clusters are not compared."""
        key = next((key for key in self.vary if key.partition(".")[0] == "cluster"), None)
        found = {} if key is None else {str(r.values[key]): r.not_measured for r in self.rows if r.not_measured}
        return "; ".join(f"{name} {said}" for name, said in found.items())

    @property
    def done(self) -> list[SweepRow]:
        """Rows that could be simulated."""
        return [row for row in self.rows if not row.refused]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that all rows have, behind the number of GPUs where rows differ in it."""
        differ = len({row.gpus for row in self.done}) > 1
        known = (m for m in METRICS[self.workload] if all(m.key in row.figures for row in self.done))
        return (*([GPUS] if differ else []), *known)

    @property
    def compared(self) -> Metric:
        """The metric by which rows are compared."""
        return next(m for m in self.metrics if m.key == self.metric)

    @property
    def about_faults(self) -> bool:
        """Tell whether faults are varied, or cost any of the steps something."""
        if self.workload != "training":
            return False
        return any(key.startswith("faults") for key in self.vary) or any(row.figures["lost_s"] for row in self.done)


def _flat(row: SweepRow, keys: Sequence[str]) -> dict[str, Any]:
    whole = row.to_json()
    whole |= dict.fromkeys((*keys, "gpus", "fits_in_memory")) if row.refused else row.figures
    return {key: value for key, value in whole.items() if key != "figures"}


def default_metric(workload: Workload, rows: Sequence[SweepRow]) -> Metric:
    """Return the figure by which rows are compared if nobody names one: steps by their time, or by tokens a second and
    GPU where the tokens of a step and GPU differ from row to row; serving by the time to the first token."""
    if workload == "serving":
        return FIRST
    work = [row.number(STEP) * row.number(RATE) for row in rows if not row.refused]
    return RATE if max(work) > min(work) * (1 + 1e-9) else STEP
