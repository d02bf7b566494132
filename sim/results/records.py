"""Records that results are made of, and their one form as JSON.

A result is a frozen struct: producers build it, views read its attributes, and only `Record.to_json` turns it into
plain data. `StepResult` (`sim.results.result`) and `ServingResult` (`sim.serve.results.records`) are made of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from msgspec import Struct
from pydantic import BaseModel

from sim.inputs.scenario import Scenario
from sim.results.fit import EVEN, RESERVED_UNCERTAINTY, Fit, judge

PLAIN = frozenset({float, int, str, bool, type(None)})  # most values are of these


class Record(Struct, frozen=True):
    """A frozen result that prints as a JSON object with a key for each field, in the order of the fields.

    `inlined`: the fields whose own keys stand in their place. `field(name=...)` gives a field a key that cannot be a
    name in Python. A field whose default is None has no key while it is None.
    """

    inlined: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Keys and values as plain data."""
        out: dict[str, Any] = {}
        for name, key, optional in _keys(type(self)):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if name in self.inlined:
                out |= value.to_json()
            else:
                out[key] = value if type(value) in PLAIN else _plain(value)
        return out


@cache
def _keys(record: type[Record]) -> tuple[tuple[str, str, bool], ...]:
    """For each field its name, its key, and whether its default is None."""
    defaults = record.__struct_defaults__
    required = len(record.__struct_fields__) - len(defaults)
    optional = [*[False] * required, *[default is None for default in defaults]]
    return tuple(zip(record.__struct_fields__, record.__struct_encode_fields__, optional, strict=True))


def _plain(value: Any) -> Any:
    """Numbers, text, lists and dicts; tuples become lists."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, (BaseModel, Scenario)):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: _plain(v) for k, v in value._asdict().items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


class MemoryRow(Record, frozen=True, kw_only=True):
    """Bytes on a class of equal ranks: each category at its maximum, and the peak of their sum.

    `reserved`: what the allocator holds for it, while serving what the engine holds from its start, the whole cache
    included; `limit`: what that may be to fit; `beside`: what CUDA and NCCL take of the GPU's nominal memory;
    `uncertainty`: of `reserved`, 0 where an engine takes what it finds; `least_odds`: see `sim.results.fit`.
    """

    ranks: str
    rank: int  # the lowest
    count: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # while serving, the key-value cache
    kv_cache: float | None = None  # serving only
    buffers: float
    peak: float
    reserved: float
    limit: float
    beside: float
    uncertainty: float = RESERVED_UNCERTAINTY
    least_odds: float = EVEN
    teacher: float | None = None  # of `parameters`, where a teacher is on the same rank

    @property
    def fit(self) -> Fit:
        """The verdict on these ranks' memory."""
        return judge(self.reserved, self.limit, self.uncertainty, self.least_odds)

    @property
    def lasting(self) -> float:
        """Bytes of parameters, gradients and optimizer; activations and buffers come and go."""
        return self.parameters + self.gradients + self.optimizer


def tightest(memory: Sequence[MemoryRow]) -> MemoryRow:
    """The ranks that come nearest to what fits on their GPUs."""
    return max(memory, key=lambda row: row.reserved / row.limit)


class Provenance(Record, frozen=True):
    """Origin of a result's prices: the profile, and the share of all priced seconds by kind of source.

    `priced_by_bytes`: of a captured program alone, launches a micro-batch of operators that nobody knows.
    `of_other_gpus`: of a cluster with several kinds of GPUs, the profiles of the less usual ones, by the GPU's name.
    `kernels`: of a served model, by operator and format, the measured kernels that priced it: what the engine calls
    them, its release, the GPU.
    """

    profile: str
    source: str
    date: str
    hardware: Mapping[str, str | int | float | bool]
    shares: Mapping[str, float]
    priced_by_bytes: Mapping[str, int] | None = None
    of_other_gpus: Mapping[str, str] | None = None
    kernels: Mapping[str, str] | None = None


class Engine(Record, frozen=True, kw_only=True):
    """Size of the simulation itself, and the seconds from the plan to the metrics.

    `stands_for`: the operators and communications of all ranks that its tasks are; equal ranks share a task, and so do
    the operators of an action.
    """

    tasks: int
    stands_for: int | None = None
    events: int | None = None
    wall_s: float
    path: str  # simpy or static
    links_shared: bool | None = None
    simulated_ranks: int | None = None
