"""What can be said of the pages without a browser."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import synthetic
from msgspec.structs import replace

from sim.core.timeline import Detail, RankClass, Span, from_spans
from sim.results.memory import MemoryCurve
from sim.studies.compared import Pair
from sim.views.compare_page import compare_page, paired_tracks
from sim.views.curves import curve_columns
from sim.views.figures import timeline_figure
from sim.views.palette import style_of
from sim.views.rows import tracks_of
from sim.views.timeline_page import timeline_page


def test_the_page_names_no_outside_address() -> None:
    timeline = synthetic.one_f_one_b(p=2, m=2)
    curves = synthetic.memory_curves(timeline)
    html = timeline_page(synthetic.result_of(timeline, curves), timeline, curves)
    assert not re.search(r'(src|href)="https?://', html)
    assert "cdn.jsdelivr.net" not in html  # where the library gets MathJax
    assert len(html) < 2_500_000


def test_a_name_cannot_break_out_of_the_page() -> None:
    evil = '</script><img src="http://x" onerror=alert(1)>'
    timeline = synthetic.one_f_one_b(p=2, m=2, name=evil)
    result = synthetic.result_of(timeline, [], name=evil, warnings=(evil,))
    assert evil not in timeline_page(result, timeline, [])


def test_memory_over_several_steps_widens_the_axis() -> None:
    timeline = synthetic.one_f_one_b(p=2, m=2)
    curves = synthetic.memory_curves(timeline)
    longer = [replace(c, time_s=c.time_s * 4) for c in curves]
    html = timeline_page(synthetic.result_of(timeline, curves), timeline, longer)
    end = float(re.search(r'"end_s":([\d.]+)', html).group(1))  # type: ignore[union-attr]
    assert end > timeline.step_time_s * 1.5


def test_long_curves_keep_their_peak() -> None:
    n = 100_000
    level = np.random.default_rng(0).random(n)
    curve = MemoryCurve(0, np.arange(n) * 1e-5, level * 0, level * 0, level * 0, level * 1e9, level * 0)
    kept = curve_columns(curve, 1.0, 1000)
    assert len(kept["time"]) < 1100
    assert max(kept["activations"]) == round(level.max() * 1e9)


def test_bars_too_narrow_for_an_edge_keep_their_colour() -> None:
    ends = [0.5, *np.linspace(0.501, 1.0, 500).tolist()]
    spans = [Span(0, "compute", "F", 0, i, a, b, Detail("f")) for i, (a, b) in enumerate(pairwise([0.0, *ends]))]
    timeline = from_spans(spans, [RankClass(0, (0,), 0)])
    chart, _ = timeline_figure([timeline], tracks_of(timeline))
    (bars,) = (r for r in chart.renderers if r.name == "exact:F")
    assert bars.data_source.data["edge"] == ["#ffffff"] + 500 * [style_of("F").fill]


def test_a_timeline_of_nothing_still_makes_a_page() -> None:
    empty = from_spans([], [])
    assert "simulated step" in timeline_page(synthetic.result_of(empty, []), empty, [])


def test_comparison_draws_a_class_of_ranks_once_above_its_measured_ranks() -> None:
    simulated = synthetic.one_f_one_b(p=2, m=2, copies=2)
    measured = synthetic.one_f_one_b(p=4, m=2, copies=1)
    tracks = paired_tracks(simulated, measured)
    assert [(t.label, t.timeline, t.class_index) for t in tracks] == [
        ("ranks 0, 1 simulated", 0, 0),
        ("rank 0 measured", 1, 0),
        ("rank 1 measured", 1, 1),
        ("ranks 2, 3 simulated", 0, 1),
        ("rank 2 measured", 1, 2),
        ("rank 3 measured", 1, 3),
    ]


def test_comparison_shows_errors_with_sign_and_missing_sides() -> None:
    simulated, measured = (synthetic.one_f_one_b(p=2, m=2, copies=1, scale=s) for s in (1.0, 1.1))
    result = synthetic.comparison_of(Pair.of(0.8, 1.0), actions={"F": 3, "W": 0}, name="<b>x</b>")
    html = compare_page(result, simulated, measured)
    assert "−20.0 %" in html
    assert "out of tolerance of 10.0 %" in html
    assert "<b>x</b>" not in html
    assert not re.search(r'(src|href)="https?://', html)
