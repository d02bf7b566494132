"""What the explorer draws of a step: its operators where they are few, and rows in which something runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.events import DocumentReady

from sim.simulation import Simulation
from sim.views.explore_app import Explorer, open_explorer
from sim.views.explore_panel import INSIDE_LAYERS, attempt
from sim.views.rows import NEXT_TO_NOTHING, used_spans

MESH = Path(__file__).parents[3] / "scenarios" / "mesh_llama8b.yaml"


def drawn(*chosen: str) -> tuple[Simulation, set[str]]:
    """The step, and the streams of its rows."""
    found = attempt(MESH, list(chosen)).simulation
    assert isinstance(found, Simulation)
    timeline = found.timeline
    kept = used_spans(timeline, () if found.expanded else INSIDE_LAYERS)
    return found, {timeline.streams[s] for s in timeline.stream[kept]}


def test_messages_inside_layers_are_drawn_throughout_or_not_at_all() -> None:
    """Where gathers of parameters hinder the first forward, a step has its operators without being expanded."""
    eager = "training.framework=eager"  # messages of its pipeline take next to nothing of the step
    step, streams = drawn(eager)
    assert step.expanded
    assert streams == {"compute", "tp", "cp", "dp"}
    timeline = step.timeline
    tp = timeline.stream == timeline.streams.index("tp")
    # In both halves of the step, on both stages.
    assert len(np.unique(timeline.class_index[tp & (timeline.start_s > step.step_time_s / 2)])) == 2
    long, streams = drawn(eager, "training.global_batch_size=256")
    assert not long.expanded
    assert "tp" in long.timeline.streams
    assert streams == {"compute", "dp"}


def test_rows_in_which_next_to_nothing_runs_are_left_out() -> None:
    timeline = drawn()[0].timeline
    left = np.setdiff1d(np.arange(len(timeline)), used_spans(timeline))
    assert {timeline.streams[s] for s in timeline.stream[left]} >= {"shard", "model"}
    assert (timeline.end_s - timeline.start_s)[left].max() < NEXT_TO_NOTHING * timeline.step_time_s
    assert len(timeline.only(left)) == len(left) > 0


def test_a_page_that_cannot_be_drawn_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_self: Explorer) -> None:
        raise ValueError("no such <colour>")

    monkeypatch.setattr(Explorer, "show", fails)
    document = Document()
    open_explorer(document, MESH)
    document.callbacks.trigger_event(DocumentReady())
    assert "ValueError: no such <colour>" in capsys.readouterr().err
    said: Any = document.roots[0]
    assert len(document.roots) == 1
    assert said.name == "failed"
    assert "could not be drawn: ValueError: no such &lt;colour&gt;" in said.text
