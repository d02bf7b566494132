"""The standalone page of a sweep: a metric over one key, a line for each choice of the others, and all in a table."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.core.json_values import is_number
from sim.core.units import as_written, count, counted, percent, seconds
from sim.inputs.overrides import nested
from sim.studies.sweep_found import SweepResult, SweepRow
from sim.studies.sweep_metrics import MEMORY, STEP, Metric
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import INK
from sim.views.scatter import SERIES, explained, scatter_plot

_COLOURS = (*SERIES, INK)
MOST_LINES = 12  # of other keys' choices, those with the slowest steps
MOST_TICKS = 12  # values that each have a label on the axis
LOG_FROM = 8  # the largest value over the smallest, from where on the axis is logarithmic
_TIP = "<div><b>@words</b></div><div>@said</div>"
_LOST = "<div>@lost lost to faults</div>"


def incomplete_words(result: SweepResult) -> str:
    """Return that Ctrl-C ended the sweep, and how many combinations are missing."""
    return f"INCOMPLETE, ended by Ctrl-C: {counted(result.left or 0, 'combination')} not simulated"


def sweep_page(result: SweepResult) -> str:
    """HTML of `sim-sweep/1` that opens without network."""
    title = f"Sweep: {result.name}"
    kind = "steps" if result.workload == "training" else "workloads"
    what = f"{count(len(result.rows))} {kind} over {', '.join(result.vary)}"
    what += f"; {result.not_measured}" * bool(result.not_measured)
    if result.left is not None:
        what += f"; {incomplete_words(result)}"
    faults = result.about_faults
    return still_page(
        "sweep.html",
        title,
        {"sweep": _figure(result)},
        what=what,
        headline=_headline(result),
        faults=faults,
        metric=result.compared.name,
        keys=list(result.vary),
        columns=[*(m.name for m in result.metrics), *(["without faults", "lost"] if faults else [])],
        rows=[(row, () if row.refused else _cells(row, result, faults), _copies(row)) for row in result.rows],
    )


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key by its shortest end that no other has.

    >>> short_keys(["parallelism.pp", "faults.stragglers.0.rank", "faults.stragglers.1.rank"])
    {'parallelism.pp': 'pp', 'faults.stragglers.0.rank': '0.rank', 'faults.stragglers.1.rank': '1.rank'}
    """
    names = list(keys)
    out = {}
    for key in names:
        ends = [key.split(".", i)[-1] for i in range(key.count("."), -1, -1)]
        out[key] = next(end for end in ends if sum(f".{k}".endswith(f".{end}") for k in names) == 1)
    return out


def metric_words(row: SweepRow, metric: Metric) -> str:
    """A metric of a row in words; memory is marked where it is more than the GPU has."""
    return metric.unit.write(row.number(metric)) + " ✗" * (metric is MEMORY and not row.fits_in_memory)


def words(values: Mapping[str, Any]) -> str:
    """Keys by their last parts with their values.

    >>> words({"faults.stragglers.0.rank": 3, "faults.jitter.sigma": 0.1})
    'stragglers.0.rank 3, jitter.sigma 0.1'
    """
    return ", ".join(f"{k.partition('.')[2] or k} {as_written(v)}" for k, v in values.items())


def lost_words(row: SweepRow) -> str:
    """Seconds lost to faults, and which part of the step that is."""
    return f"{seconds(row.figures['lost_s'])} ({percent(row.lost_share)})"


def _headline(result: SweepResult) -> list[Number]:
    metric, done = result.compared, result.done
    fitting = [r for r in done if r.fits_in_memory]
    choose, other = (max, min) if metric.more_is_better else (min, max)
    best = choose(fitting or done, key=lambda r: r.number(metric))
    worst = other(done, key=lambda r: r.number(metric))
    left = len(result.rows) - len(done)
    good, bad = ("Fastest step", "Slowest step") if metric is STEP else (f"Best {metric.name}", f"Worst {metric.name}")
    numbers = [
        Number(f"{good} that fits", metric_words(best, metric), words(best.values), "good")
        if fitting
        else Number(good, metric_words(best, metric), f"{words(best.values)}; none fits", "bad"),
        Number(bad, metric_words(worst, metric), words(worst.values)),
        Number("Simulated", count(len(done)), f"{count(left)} cannot be simulated" if left else ""),
    ]
    if result.about_faults:
        most = max(done, key=lambda r: r.lost_share)
        numbers.insert(2, Number("Most lost to faults", lost_words(most), words(most.values)))
    return numbers


def _figure(result: SweepResult) -> Any:
    from bokeh.models import ColumnDataSource

    metric = result.compared
    faults, scale = result.about_faults and metric is STEP, metric.unit.axis_scale
    key = max(result.vary, key=lambda k: len(result.vary[k]))
    axis = metric.name + metric.unit.axis
    names = [as_written(v) for v in result.vary[key]]
    numbers = all(is_number(v) for v in result.vary[key])
    plot = scatter_plot("sweep", key, axis, 460, **_x_axis(result.vary[key], names, numbers))
    if numbers and len(set(names)) <= MOST_TICKS:
        plot.xaxis.ticker = sorted(set(result.vary[key]))
        plot.xaxis.major_label_overrides = {v: f"{v:,}" for v in result.vary[key]}
    dots: list[Any] = []
    for i, (name, rows) in enumerate(_lines(result, key)):
        source = ColumnDataSource(_columns(rows, key, numbers, result, scale))
        colour = _COLOURS[i % len(_COLOURS)]
        shown: dict[str, Any] = {"source": source, "color": colour, "legend_label": name or metric.name}
        if faults:
            plot.line("x", "healthy", line_dash="dashed", line_alpha=0.6, **shown)
        if len(set(source.data["x"])) == len(rows):  # linked keys may have several rows at one place
            plot.line("x", "y", line_width=2, **shown)
        dots.append(plot.scatter("x", "y", size=8, fill_alpha="fits", **shown))
    return explained(plot, dots, _TIP + _LOST * result.about_faults)


def _x_axis(values: Sequence[Any], names: Sequence[str], numbers: bool) -> dict[str, Any]:
    """Return the kind of axis: categories, or numbers; sizes that grow by a factor stand equally far apart."""
    if not numbers:
        return {"x_range": list(dict.fromkeys(names))}
    return {"x_axis_type": "log"} if min(values) > 0 and max(values) >= LOG_FROM * min(values) else {}


def _lines(result: SweepResult, key: str) -> list[tuple[str, list[SweepRow]]]:
    """Rows by the choice of all keys but one and those linked with it; of many the choices with the most."""
    together = next((set(keys) for keys in result.linked if key in keys), {key})
    lines: dict[str, list[SweepRow]] = {}
    for row in result.done:
        others = {k: v for k, v in row.values.items() if k not in together}
        lines.setdefault(words(others), []).append(row)
    most = sorted(lines, key=lambda name: -max(r.number(result.compared) for r in lines[name]))[:MOST_LINES]
    return [(name, rows) for name, rows in lines.items() if name in most]


def _columns(
    rows: Sequence[SweepRow], key: str, numbers: bool, result: SweepResult, scale: float
) -> dict[str, list[Any]]:
    ordered = sorted(rows, key=lambda r: r.values[key]) if numbers else rows
    faults, metric = result.about_faults, result.compared
    figures: dict[str, list[Any]] = {
        "x": [r.values[key] if numbers else as_written(r.values[key]) for r in ordered],
        "y": [r.number(metric) / scale for r in ordered],
        "fits": [float(r.fits_in_memory) for r in ordered],
        "words": [words(r.values) for r in ordered],
        "said": [", ".join(f"{m.name} {metric_words(r, m)}" for m in result.metrics) for r in ordered],
    }
    if faults:
        figures["healthy"] = [r.figures["healthy_s"] for r in ordered]
        figures["lost"] = [lost_words(r) for r in ordered]
    return figures


def _cells(row: SweepRow, result: SweepResult, faults: bool) -> list[tuple[float, str]]:
    """Return the value and the text of each number of a row."""
    more = ("healthy_s", "lost_s") if faults else ()
    return [
        *((row.number(m), metric_words(row, m)) for m in result.metrics),
        *((row.figures[k], seconds(row.figures[k])) for k in more),
    ]


def _copies(row: SweepRow) -> list[tuple[str, str]]:
    """A row's keys, as options of any command and as a scenario file's text."""
    options = " ".join(f"--set {shlex.quote(f'{key}={as_written(value)}')}" for key, value in row.values.items())
    return [("--set", options), ("YAML", nested_yaml(row.values))]


def nested_yaml(values: Mapping[str, Any]) -> str:
    """Keys with dots as the sections of a scenario file; parts that are numbers are places in lists.

    >>> print(nested_yaml({"parallelism.tp": 2, "cluster": "dgx-b200", "faults.stragglers.0.rank": 3}), end="")
    parallelism:
      tp: 2
    cluster: dgx-b200
    faults:
      stragglers:
      - rank: 3
    """
    import yaml

    text: str = yaml.safe_dump(_lists(nested(values)), sort_keys=False)
    return text


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(x) for key, x in value.items()}
    return list(inner.values()) if inner and all(key.isdigit() for key in inner) else inner
