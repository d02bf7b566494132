"""The summary that a command prints: headline, where the step goes, memory, ranks, certainty, warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.views.headline import headline, layout_line, memory_limit_bytes, rank_seconds, shares_of
from sim.views.palette import memory_styles
from sim.views.units import count, n_bytes, percent, ranks_text, seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Result = Mapping[str, Any]

RANKS_SHOWN = 12
NAME_WIDTH = 22  # of classes of ranks; longer ones are cut
BAR = (("compute", "blue", "█"), ("communication", "yellow", "▓"), ("bubble", "bright_black", "░"))


def print_summary(result: Result, console: Console) -> None:
    """Print `sim-result/1` for a person; about 35 lines for 8 ranks. `console` knows colour and width."""
    from rich.text import Text

    console.print(Text(str(result.get("scenario", {}).get("name") or "simulated step"), style="bold"), highlight=False)
    console.print(Text(layout_line(result), style="dim"), highlight=False)
    console.print()
    console.print(_headline(result), highlight=False)
    if result.get("ranks"):
        console.print()
        console.print(_ranks(result, max(12, min(36, console.width - 62))), highlight=False)
    if result.get("memory"):
        console.print()
        console.print(_memory(result, max(12, min(36, console.width - 40))), highlight=False)
    if result.get("blame"):
        console.print()
        console.print(_blame(result), highlight=False)
    if result.get("waiting"):
        console.print()
        console.print(_waiting(result), highlight=False)
    if result.get("goodput"):
        console.print()
        console.print(_goodput(result["goodput"]), highlight=False)
    console.print()
    for line in (*_provenance(result), *_warnings(result)):
        console.print(line, highlight=False)


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_header=any(columns), show_edge=False, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _headline(result: Result) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for number in headline(result):
        table.add_row(number.name, number.value, number.note, style="bold red" if number.mood == "bad" else "")
    return table


def _ranks(result: Result, width: int) -> Table:
    """A bar per class of ranks; of many, the first and last ones."""
    step = float(result.get("step_time_s") or 0.0) or 1.0
    table = _table("", "computing", "exposed", "bubble", "█ computing ▓ exposed ░ bubble")
    table.columns[4].justify = "left"
    table.columns[4].no_wrap = False  # its head may take two lines, numbers may not be cut
    table.columns[0].max_width = NAME_WIDTH
    entries = list(result["ranks"])
    head = RANKS_SHOWN if len(entries) <= RANKS_SHOWN else RANKS_SHOWN // 2
    for i, entry in enumerate(entries):
        if head <= i < len(entries) - (RANKS_SHOWN - head):
            if i == head:
                table.add_row(f"… {len(entries) - RANKS_SHOWN} more", "", "", "", "")
            continue
        lengths = rank_seconds(entry)
        table.add_row(
            ranks_text(entry.get("ranks", entry.get("rank", "?"))),
            *(seconds(s) for s in lengths),
            _bar(lengths, step, width),
        )
    return table


def _bar(lengths: tuple[float, float, float], step: float, width: int) -> Text:
    """A bar of characters; ends are rounded, not lengths, so that it is never longer than the step."""
    from rich.text import Text

    bar, at, reached = Text(), 0, 0.0
    for length, (_, colour, character) in zip(lengths, BAR, strict=True):
        reached += length
        end = min(width, round(reached / step * width))
        bar.append(character * (end - at), style=colour)
        at = end
    return bar


def _memory(result: Result, width: int) -> Table:
    """The fullest class of ranks by category, against the device's memory."""
    worst = max(result["memory"], key=lambda e: float(e.get("peak", 0.0)))
    whole = memory_limit_bytes(result) or float(worst.get("peak", 0.0)) or 1.0
    name = ranks_text(worst.get("ranks", worst.get("rank", "?")))
    table = _table(f"memory of {name}", "", f"█ share of {n_bytes(whole)}")
    table.columns[2].justify = "left"
    names = {category: style.label for category, style in memory_styles(result).items()}
    for category, label in {**names, "peak": "Peak"}.items():
        size = float(worst.get(category, 0.0))
        length = round(min(1.0, size / whole) * width)
        style = "red" if category == "peak" and size > whole else "cyan"
        table.add_row(label, n_bytes(size), _solid(length, style))
    return table


def _solid(length: int, style: str) -> Text:
    from rich.text import Text

    return Text("█" * length, style=style)


def _blame(result: Result) -> Table:
    """What each fault costs the step: how much shorter it is without."""
    table = _table("faults", "lost", "of the step")
    step = float(result.get("step_time_s") or 0.0) or 1.0
    for row in result["blame"]:
        table.add_row(str(row["cause"]), seconds(row["lost_s"]), percent(row["lost_s"] / step))
    return table


def _waiting(result: Result) -> Table:
    """Who stands still for whom, longest first."""
    table = _table("ranks", "wait for", "")
    table.columns[0].max_width = table.columns[1].max_width = NAME_WIDTH
    for row in result["waiting"][: RANKS_SHOWN // 2]:
        table.add_row(ranks_text(row["ranks"]), ranks_text(row["for"]), seconds(row["seconds"]))
    return table


def _goodput(found: Mapping[str, Any]) -> Table:
    """Weeks of training: what part of the time is useful, where the rest goes, and the best interval of checkpoints."""
    useful, parts, best = found["effective_training_time"], found["parts"], found["optimum"]
    table = _table(f"{found['days']:g} days, {count(found['gpus'])} GPUs", "", f"of {count(found['runs'])} runs")
    table.columns[2].justify = "left"
    table.add_row("effective training", percent(useful["mean"]), f"{percent(useful['p5'])} to {percent(useful['p95'])}")
    said = found.get("published") or {}
    if "effective_training_time" in said:
        table.add_row("  published", percent(said["effective_training_time"]), "as the scenario says")
    at_hand = "with a node always at hand" if parts["waiting"] else ""
    table.add_row("  closed form", percent(found["closed_form"]), at_hand)
    for name, words in (("lost", "  computed in vain"), ("checkpoint", "  checkpoints"), ("restart", "  restarts"),
                        ("waiting", "  waiting for nodes")):  # fmt: skip
        table.add_row(words, percent(parts[name]), "")
    table.add_row("failures", f"{found['failures']['mean']:.0f}", f"every {seconds(found['mtbf_s'])}")
    if "failures" in said:
        table.add_row("  published", count(said["failures"]), "as the scenario says")
    table.add_row("checkpoint after", seconds(found["checkpoint_interval_s"]), "")
    table.add_row("  best by Young", seconds(best["young_s"]), "")
    table.add_row("  best by Daly", seconds(best["daly_s"]), f"{percent(best['closed_form'])} by closed form")
    for point in found["curve"]:
        forms = f"{percent(point['mean'])}, closed form {percent(point['closed_form'])}"
        table.add_row("  after", seconds(point["interval_s"]), forms)
    return table


def _provenance(result: Result) -> list[Text]:
    from rich.text import Text

    source, engine = result.get("provenance") or {}, result.get("engine") or {}
    lines = []
    if source:
        shares = ", ".join(f"{percent(v)} {k}" for k, v in shares_of(source).items() if v)
        lines.append(
            f"costs from profile {source.get('profile', '?')} ({source.get('date') or 'undated'})"
            + (f": {shares}" if shares else "")
        )
    if engine:
        lines.append(
            f"{count(engine.get('tasks', 0))} tasks, {engine.get('path', '')} engine, "
            f"{seconds(float(engine.get('wall_s', 0.0)))}"
        )
    return [Text(line, style="dim") for line in lines]


def _warnings(result: Result) -> list[Text]:
    from rich.text import Text

    return [Text(f"warning: {w}", style="yellow") for w in result.get("warnings") or ()]
