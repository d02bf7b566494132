"""Rows and lanes keep every span apart."""

from __future__ import annotations

import pytest
import synthetic

from sim.core.timeline import Detail, RankClass, Span, from_spans
from sim.views.rows import TALLEST, lanes_of, lay_out, tracks_of


def test_a_row_for_each_stream_that_exists() -> None:
    timeline = synthetic.one_f_one_b(p=4)
    layout = lay_out([timeline], tracks_of(timeline))
    assert [r.stream for r in layout.rows[:4]] == ["compute", "dp", "send", "recv"]
    assert [b[0] for b in layout.bands] == ["ranks 0–7", "ranks 8–15", "ranks 16–23", "ranks 24–31"]
    for i in range(len(timeline)):
        row = layout.rows[layout.row_of[0][i]]
        assert row.stream == timeline.streams[timeline.stream[i]]


def test_messages_of_both_directions_share_a_row() -> None:
    detail = Detail("x")
    spans = [Span(0, s, k, 0, 0, 0.0, 1.0, detail) for s, k in (("send_f", "SEND_F"), ("send_b", "SEND_B"))]
    timeline = from_spans(spans, [RankClass(0, (0,), 0)])
    layout = lay_out([timeline], tracks_of(timeline))
    assert [r.stream for r in layout.rows] == ["send"]
    lane, lanes = lanes_of(layout.row_of[0], timeline.start_s, timeline.end_s)
    assert lane.tolist() == [0, 1]
    assert lanes.tolist() == [2, 2]


def test_many_rows_shrink_to_the_room() -> None:
    few = synthetic.one_f_one_b(p=4, m=4)
    many = synthetic.one_f_one_b(p=32, m=4)
    assert lay_out([few], tracks_of(few), room=900).height < 900
    assert lay_out([many], tracks_of(many), room=900).height == pytest.approx(0.45 * 32 * 77)
    most = synthetic.one_f_one_b(p=300, m=2)
    assert lay_out([most], tracks_of(most)).height == pytest.approx(TALLEST)
