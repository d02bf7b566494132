"""Records print as JSON in one way, and a result that a record gains shows without any other code."""

from __future__ import annotations

from typing import ClassVar

from msgspec import field

from sim.inputs.scenario import load_scenario
from sim.results.records import Record
from sim.results.result import StepResult
from sim.simulation import simulate


class Inner(Record, frozen=True):
    low: float
    high: float


class Outer(Record, frozen=True, kw_only=True):
    inlined: ClassVar = ("between",)
    name: str
    between: Inner
    rows: tuple[Inner, ...]
    awaited: str = field(name="for")
    note: str | None = None


def test_keys_follow_the_fields() -> None:
    outer = Outer(name="x", between=Inner(1.0, 2.0), rows=(Inner(3.0, 4.0),), awaited="y")
    found = {"name": "x", "low": 1.0, "high": 2.0, "rows": [{"low": 3.0, "high": 4.0}], "for": "y"}
    assert outer.to_json() == found
    assert list(outer.to_json()) == list(found)


def test_a_field_that_a_record_gains_is_a_key() -> None:
    class Longer(StepResult, frozen=True, kw_only=True):
        joules: float

    step = simulate(load_scenario("scenarios/dp8.yaml"))
    longer = Longer(**{f: getattr(step.outcome, f) for f in StepResult.__struct_fields__}, joules=2.5)
    assert longer.to_json() == {**step.outcome.to_json(), "joules": 2.5}
