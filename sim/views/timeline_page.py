"""The standalone page of one simulated step: headline, losses, timeline, memory, ranks, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.timeline import Timeline
from sim.views.losses import largest_losses, memory_limit_bytes, parts_of_step
from sim.views.page import card, escape, legend, marked, page, swatch, table, view_data, zoom_controls
from sim.views.palette import MEMORY, style_of
from sim.views.units import count, n_bytes, percent, ranks_text, rate, seconds

if TYPE_CHECKING:
    from sim.memory import MemoryCurve

Result = Mapping[str, Any]

MEMORY_POINTS = 200_000  # of all curves together
RANK_BARS = {"compute": "#0072b2", "communication": "#d55e00", "bubble": "#aab4bf", "other": "#e6eaee"}


def timeline_page(result: Result, timeline: Timeline, memory: Sequence[MemoryCurve],
                  critical: Sequence[int] = ()) -> str:
    """HTML of a page that opens without network: `sim-result/1`, its timeline and its memory over time.

    `critical` are the indices of the spans on the critical path, which the page can outline.
    """
    from sim.views.figures import memory_figure, timeline_figure
    from sim.views.rows import tracks_of

    chart, layout = timeline_figure([timeline], tracks_of(timeline), critical)
    limit = memory_limit_bytes(result)
    plots = {"timeline": chart}
    data = view_data([timeline], layout, timeline.step_time_s / 4)
    if memory:
        curves = [_curve(c, timeline.step_time_s, MEMORY_POINTS // len(memory)) for c in memory]
        plots["memory"] = memory_figure(chart.x_range, limit, curves[_worst(memory)])
        data |= {"limit_bytes": limit, "memory": curves}
    title = str(result.get("scenario", {}).get("name") or "simulated step")
    body = "\n".join((
        _header(title, result), _cards(result), _warnings(result), _losses(result, timeline),
        _plots(timeline, memory, bool(len(critical))), _ranks(result), _tables(result), _provenance(result),
    ))
    return page(f"{title} · simulated step", body, plots, data)


def _header(title: str, result: Result) -> str:
    return f'<header><h1>{escape(title)}</h1><p class="sub">{escape(layout_line(result))}</p></header>'


def layout_line(result: Result) -> str:
    """The scenario in one line: model, layout, batch, cluster."""
    scenario = result.get("scenario", {})
    layout, training = scenario.get("parallelism") or {}, scenario.get("training") or {}
    model, cluster = scenario.get("model") or {}, scenario.get("cluster") or {}
    words = []
    if isinstance(model, Mapping) and model.get("layers"):
        words.append(f"{model['layers']} layers of {model.get('hidden')}")
    degrees = [f"{k} {layout[k]}" for k in ("tp", "cp", "pp", "dp", "ep") if int(layout.get(k) or 1) > 1]
    words += degrees or ["one device"]
    if int(layout.get("pp") or 1) > 1:
        words.append(str(layout.get("schedule")))
    if layout.get("zero"):
        words.append(f"ZeRO-{layout['zero']}")
    if training:
        words.append(f"batch {training.get('global_batch_size')} × {count(training.get('seq_len', 0))} tokens "
                     f"in micro-batches of {training.get('micro_batch_size')}")
        words.append(str(training.get("precision")))
    gpu = cluster.get("gpu") if isinstance(cluster, Mapping) else None
    if isinstance(gpu, Mapping) and gpu.get("name"):
        words.append(f"{gpu['name']}, {cluster.get('gpus_per_node')} to a node")
    return " · ".join(words)


def _cards(result: Result) -> str:
    cards = []
    if result.get("step_time_s"):
        low, high = result.get("step_time_interval_s") or (None, None)
        within = f"90 %: {seconds(low)} – {seconds(high)}" if low is not None and high is not None else ""
        cards.append(card("Step time", seconds(result["step_time_s"]), within))
        cards.append(card("Tokens/s per GPU", count(result.get("tokens_per_s_per_gpu", 0)),
                          f"{count(result.get('tokens_per_s', 0))} in all"))
        cards.append(card("MFU", percent(result.get("mfu") or 0.0),
                          f"HFU {percent(result.get('hfu') or 0.0)}, "
                          f"{rate(result.get('model_flops_per_s_per_gpu') or 0.0, 'FLOP/s')}"))
        cards.append(card("Pipeline bubble", percent(result.get("bubble_fraction") or 0.0),
                          f"of the step; idle ÷ busy {result.get('bubble_ratio') or 0.0:.3f}"))
        cards.append(card("Exposed communication", seconds(result.get("exposed_comm_s") or 0.0),
                          f"{percent((result.get('exposed_comm_s') or 0.0) / result['step_time_s'])} of the step"))
    for key, name in (("request_latency_s", "Request latency"), ("time_to_first_token_s", "Time to first token"),
                      ("time_per_output_token_s", "Time per output token")):
        if key in result:
            spread = result[key]
            cards.append(card(name, seconds(spread["p50"]),
                              f"median; p90 {seconds(spread['p90'])}, p99 {seconds(spread['p99'])}"))
    if "output_tokens_per_s" in result:
        cards.append(card("Output tokens/s", count(result["output_tokens_per_s"])))
    if result.get("peak_memory_bytes"):
        fits, limit = result.get("fits_in_memory", True), memory_limit_bytes(result)
        of = f" of {n_bytes(limit)}" if limit else ""
        cards.append(card("Peak memory", n_bytes(result["peak_memory_bytes"]),
                          ("✓ fits" if fits else "✗ does not fit") + of, "good" if fits else "bad"))
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _warnings(result: Result) -> str:
    items = "".join(f"<li>{escape(w)}</li>" for w in result.get("warnings") or ())
    return f'<div class="warnings" role="note"><b>Note</b><ul>{items}</ul></div>' if items else ""


def _losses(result: Result, timeline: Timeline) -> str:
    parts = parts_of_step(result, timeline)
    step = float(result.get("step_time_s") or 0.0)
    if not parts:
        return ""
    bar = "".join(f'<span style="flex:{p.seconds / step:.5f};background:{p.colour};color:'
                  f'{"#fff" if p.key == "useful" else "#1b2733"}" title="{escape(p.label)}: {seconds(p.seconds)}">'
                  f"{percent(p.seconds / step) if p.seconds > 0.06 * step else ''}</span>" for p in parts)
    keys = "".join(f"<li>{swatch(p.colour)}{p.label} <b>{seconds(p.seconds)}</b></li>" for p in parts)
    items = "".join(
        f'<li style="border-color:{p.colour}"><strong>{i}. {p.label}: {seconds(p.seconds)}, '
        f"{percent(p.seconds / step)} of the step</strong><p>{marked(remedy)}</p></li>"
        for i, (p, remedy) in enumerate(largest_losses(result, timeline), 1))
    return (f'<section id="losses"><h2>Where the step goes</h2><div class="parts" role="img" aria-label="Parts of '
            f'the step">{bar}</div><ul class="keys">{keys}</ul><ol class="losses">{items}</ol></section>')


def _plots(timeline: Timeline, memory: Sequence[MemoryCurve], critical: bool) -> str:
    toggle = ('<label><input type="checkbox" id="critical"> Outline the critical path</label>' if critical else "")
    many = len(timeline) > 20_000
    merged = (f'<p class="hint">{count(len(timeline))} spans: in the wide view those shorter than a pixel are '
              "drawn together, as the kind that fills most of it; zoom in to a quarter of the step to see each."
              "</p>" if many else "")
    lower = ""
    if memory:
        names = {c.rank: ranks_text(c.ranks) for c in timeline.classes}
        peaks, worst = [float(_total(c).max(initial=0.0)) for c in memory], _worst(memory)
        options = "".join(f'<option value="{i}"{" selected" if i == worst else ""}>'
                          f"{escape(names.get(c.rank, f'rank {c.rank}'))}, peak {n_bytes(peaks[i])}</option>"
                          for i, c in enumerate(memory))
        keys = "".join(f"<li>{swatch(s.fill)}{s.label}</li>" for s in reversed(MEMORY.values()))
        lower = (f'<div class="bar memory-bar"><label>Memory of <select id="rank">{options}</select></label>'
                 f'<ul class="keys">{keys}</ul><p class="hint" id="memory-note"></p></div>'
                 '<div class="plot" data-plot="memory"></div>')
    return (f'<section><h2>Timeline</h2><div class="bar">{legend(timeline.kinds)}{toggle}</div>'
            f'<div class="bar">{zoom_controls()}</div>{merged}<div id="plots" tabindex="0" role="group" '
            'aria-label="Timeline and memory; arrow keys move, plus and minus zoom">'
            f'<div class="plot" data-plot="timeline"></div>{lower}</div></section>')


def rank_seconds(entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """Busy, exposed communication and bubble seconds of an entry of a result's `ranks`."""
    def first(*keys: str) -> float:
        return float(next((entry[k] for k in keys if k in entry), 0.0))
    return first("busy_s", "compute_s"), first("exposed_comm_s"), first("bubble_s")


def _ranks(result: Result) -> str:
    step = float(result.get("step_time_s") or 0.0)
    if not step or not result.get("ranks"):
        return ""
    rows = []
    for entry in result["ranks"]:
        busy, comm, bubble = rank_seconds(entry)
        lengths = {"compute": busy, "communication": comm, "bubble": bubble,
                   "other": max(step - busy - comm - bubble, 0.0)}
        bar = "".join(f'<span style="flex:{max(s, 0) / step:.5f};background:{RANK_BARS[k]}"></span>'
                      for k, s in lengths.items())
        rows.append((escape(ranks_text(entry.get("ranks", entry.get("rank", "?")))),
                     f'<div class="rankbar">{bar}</div>', seconds(busy), seconds(comm), seconds(bubble),
                     percent(busy / step)))
    body = table(("", "share of the step", "computing", "exposed communication", "bubble", "busy"), rows, 2)
    keys = "".join(f"<li>{swatch(RANK_BARS[k])}{n}</li>" for k, n in (
        ("compute", "computing"), ("communication", "exposed communication"), ("bubble", "bubble"),
        ("other", "other waiting")))
    return (f'<section id="ranks"><h2>Rank by rank</h2><ul class="keys">{keys}</ul>'
            f'<div class="scroll" tabindex="0" role="group" aria-label="Rank by rank">{body}</div></section>')


def _tables(result: Result) -> str:
    halves = []
    if result.get("memory"):
        rows = [(escape(ranks_text(e.get("ranks", "?"))), *(n_bytes(e.get(c, 0.0)) for c in MEMORY),
                 f"<b>{n_bytes(e.get('peak', 0.0))}</b>") for e in result["memory"]]
        body = table(("", *(s.label for s in MEMORY.values()), "Peak"), rows)
        halves.append(f'<section id="memory-table"><h2>Memory, each at its maximum</h2><div class="scroll" '
                      f'tabindex="0" role="group" aria-label="Memory">{body}</div></section>')
    path = {k: float(v) for k, v in (result.get("critical_path") or {}).items() if v}
    if path:
        whole = sum(path.values())
        rows = [(swatch(style_of(k).fill) + escape(style_of(k).label), seconds(v), percent(v / whole))
                for k, v in sorted(path.items(), key=lambda item: -item[1])]
        halves.append(f'<section id="critical-path"><h2>On the critical path</h2>'
                      f'{table(("", "seconds", "share"), rows)}</section>')
    return f'<div class="columns">{"".join(halves)}</div>'


def _provenance(result: Result) -> str:
    source, engine = result.get("provenance") or {}, result.get("engine") or {}
    shares = ", ".join(f"{percent(v)} {escape(k)}" for k, v in shares_of(source).items() if v)
    hardware = source.get("hardware")
    words = [f"Profile <b>{escape(source.get('profile', 'none'))}</b>" if source else "",
             escape(source.get("date") or ""), escape(hardware) if hardware else "",
             f"costs: {shares}" if shares else "",
             f"{count(engine.get('tasks', 0))} tasks, {count(engine.get('events', 0))} events in "
             f"{seconds(engine.get('wall_s', 0.0))} ({escape(engine.get('path', ''))})" if engine else ""]
    scenario = escape(json.dumps(result.get("scenario", {}), indent=2, ensure_ascii=False))
    return ("<details><summary>The scenario, every default written out</summary>"
            f"<pre>{scenario}</pre></details><footer>{' · '.join(w for w in words if w)}</footer>")


def shares_of(provenance: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the step's time by source of cost, wherever in `provenance` they stand."""
    shares = provenance.get("shares", provenance)
    return {k: float(v) for k, v in shares.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _worst(memory: Sequence[MemoryCurve]) -> int:
    return max(range(len(memory)), key=lambda i: float(_total(memory[i]).max(initial=0.0)))


def _total(curve: MemoryCurve) -> Any:
    return sum((np.asarray(getattr(curve, c), dtype=np.float64) for c in MEMORY), np.zeros(len(curve.time_s)))


def _curve(curve: MemoryCurve, end_s: float, points: int) -> dict[str, list[float]]:
    """A curve as page.js draws it; of too many points those are kept where the total is highest."""
    time = np.asarray(curve.time_s, dtype=np.float64)
    keep = np.arange(len(time))
    points = max(points, 400)
    if len(time) > points:
        total = _total(curve)
        edges = np.linspace(0, len(time), points // 2 + 1).astype(np.int64)
        highest = [a + int(total[a:b].argmax()) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]
        keep = np.unique(np.concatenate([edges[:-1], highest, [len(time) - 1]]))
    columns = {c: np.asarray(getattr(curve, c), dtype=np.float64)[keep].round() for c in MEMORY}
    out = {c: [*values.tolist(), float(values[-1]) if len(values) else 0.0] for c, values in columns.items()}
    return {"time": [*time[keep].tolist(), max(end_s, float(time[-1]) if len(time) else 0.0)], **out}
