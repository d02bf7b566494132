"""Serving that takes long says how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sim.commands.serving_progress import Progress, progress
from sim.core import long_runs
from sim.core.errors import InputError
from sim.core.executors import tracked
from sim.inputs.scenario import parse_scenario
from sim.serve.requests import Request
from sim.serve.scheduling.sequences import Sequence
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import serving


def test_a_line_counts_requests_and_tokens() -> None:
    shown = Progress()
    assert "still preparing" in shown.line()
    ended = Sequence(Request(0.0, 60, 40), 0, computed=100, finish_s=1.0)
    begun = Sequence(Request(0.0, 150, 150), 1, computed=100)
    shown.watch([ended, begun])
    assert "1 of 2 requests have ended, 50.0% of 400 tokens are computed" in shown.line()
    begun.finish_s = 2.0
    assert "all requests are served" in shown.line()


def test_lines_come_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(long_runs, "FIRST_S", 1e-4)
    with progress() as shown:
        simulate_serving(serving(), watch=shown.watch)
        time.sleep(0.05)
    assert "note: all requests are served" in capsys.readouterr().err
    time.sleep(0.01)
    assert not capsys.readouterr().err


def test_a_table_of_simulations_says_how_many_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_runs, "FIRST_S", 1e-3)

    def slow() -> Iterator[int]:
        yield 1
        time.sleep(0.05)
        yield 2

    assert list(tracked(slow(), "layouts", 2)) == [1, 2]
    assert "note: layouts: 1 of 2 after 0 s" in capsys.readouterr().err


def test_a_rate_has_a_least() -> None:
    """Requests of 1e-300 a second would come later than a clock of floating-point seconds tells apart."""
    requests = {"prompt_len": 1, "output_len": 1, "count": 2, "rate_per_s": 1e-300}
    with pytest.raises(InputError, match=r"rate_per_s: found 1e-300; must be at least 1e-06"):
        parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": requests}})
