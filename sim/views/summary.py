"""The summary that a command prints: headline, where the step goes, memory, ranks, certainty, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.shipped import shipped_profiles
from sim.results.evidence import nearest
from sim.results.result import RankRow, StepResult
from sim.views.advice_rows import ADVICE_HEAD, advice_rows
from sim.views.headline import Number, evidence_line, headline, layout_line
from sim.views.palette import memory_styles
from sim.views.units import count, n_bytes, percent, ranks_text, seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sim.rl.records import RlResult
    from sim.serve.records import ServingResult
    from sim.studies.advice import Tried
    from sim.studies.goodput import Goodput

RANKS_SHOWN = 12
NAME_WIDTH = 22  # of classes of ranks; longer ones are cut
SHARES = {  # of all priced seconds, by the source of the price
    "measured": "from measured points",
    "interpolated": "interpolated between points",
    "roofline": "from the roofline",
    "topology": "from formulas of the network",
}
BAR = (("compute", "blue", "█"), ("communication", "yellow", "▓"), ("bubble", "bright_black", "░"))


def print_summary(
    result: StepResult | ServingResult,
    console: Console,
    weeks: Goodput | None = None,
    more: Sequence[Number] = (),
    advice: Sequence[Tried] = (),
) -> None:
    """Print a result for a person; about 35 lines for 8 ranks. `console` knows colour and width, `more` follows the
    headline; `advice` are changes that were tried and help."""
    from rich.text import Text

    console.print(Text(result.scenario.name, style="bold"), highlight=False)
    console.print(Text(layout_line(result.scenario), style="dim"), highlight=False)
    tables = [numbers_table([*headline(result), *more])]
    if isinstance(result, StepResult):
        tables.append(_ranks(result, max(12, min(36, console.width - 62))))
        tables += [_blame(result)] if result.blame else []
        tables += [_waiting(result)] if result.waiting else []
    tables.append(_memory(result, max(12, min(36, console.width - 40))))
    if advice:
        tables.append(_advice(advice, result.fits_in_memory))
    if weeks is not None:
        tables.append(_goodput(weeks))
    for table in tables:
        console.print()
        console.print(table, highlight=False)
    console.print()
    for line in (*_evidence(result), *provenance_lines(result), *warning_lines(result)):
        console.print(line, highlight=False)


def plain_table(*columns: str) -> Table:
    """A table without a frame; its columns stand right, but for the first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_header=any(columns), show_edge=False, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def numbers_table(numbers: Sequence[Number]) -> Table:
    """Headline numbers, one a line."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for number in numbers:
        table.add_row(number.name, number.value, number.note, style="bold red" if number.mood == "bad" else "")
    return table


def _ranks(result: StepResult, width: int) -> Table:
    """A bar per class of ranks; of many, the first and last ones."""
    step = result.step_time_s or 1.0
    table = plain_table("", "computing", "exposed", "bubble", "█ computing ▓ exposed ░ bubble")
    table.columns[4].justify = "left"
    table.columns[4].no_wrap = False  # its head may take two lines, numbers may not be cut
    table.columns[0].max_width = NAME_WIDTH
    rows = result.ranks
    head = RANKS_SHOWN if len(rows) <= RANKS_SHOWN else RANKS_SHOWN // 2
    for i, row in enumerate(rows):
        if head <= i < len(rows) - (RANKS_SHOWN - head):
            if i == head:
                table.add_row(f"… {len(rows) - RANKS_SHOWN} more", "", "", "", "")
            continue
        lengths = _lengths(row)
        table.add_row(ranks_text(row.ranks), *(seconds(s) for s in lengths), _bar(lengths, step, width))
    return table


def _lengths(row: RankRow) -> tuple[float, float, float]:
    """Seconds in the order of `BAR`."""
    return row.compute_s, row.exposed_comm_s, row.bubble_s


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


def _memory(result: StepResult | ServingResult, width: int) -> Table:
    """The fullest class of ranks by category, against its device's memory."""
    cluster = result.scenario.cluster
    worst = max(result.memory, key=lambda row: row.peak / cluster.gpu_of(row.rank).memory_bytes)
    whole = cluster.gpu_of(worst.rank).memory_bytes
    table = plain_table(f"memory of {ranks_text(worst.ranks)}", "", f"█ share of {n_bytes(whole)}")
    table.columns[2].justify = "left"
    names = {category: style.label for category, style in memory_styles(result.scenario).items()}
    for category, label in {**names, "peak": "Peak"}.items():
        size: float = getattr(worst, category)
        length = round(min(1.0, size / whole) * width)
        style = "red" if category == "peak" and size > whole else "cyan"
        table.add_row(label, n_bytes(size), _solid(length, style))
    return table


def _solid(length: int, style: str) -> Text:
    from rich.text import Text

    return Text("█" * length, style=style)


def _blame(result: StepResult) -> Table:
    """Cost of each fault: how much shorter the step is without."""
    table = plain_table("faults", "lost", "of the step")
    step = result.step_time_s or 1.0
    for row in result.blame:
        table.add_row(row.cause, seconds(row.lost_s), percent(row.lost_s / step))
    return table


def _waiting(result: StepResult) -> Table:
    """Who stands still for whom, longest first."""
    table = plain_table("ranks", "wait for", "time")
    table.columns[0].max_width = table.columns[1].max_width = NAME_WIDTH
    for row in result.waiting[: RANKS_SHOWN // 2]:
        table.add_row(ranks_text(row.ranks), ranks_text(row.awaited), seconds(row.seconds))
    return table


def _advice(tried: Sequence[Tried], fits: bool) -> Table:
    """The changes that were tried and help, with the step and the memory that each gives."""
    table = plain_table("faster with --set" if fits else "fits with --set", *(name.lower() for name in ADVICE_HEAD[1:]))
    table.columns[0].no_wrap = False
    for row in advice_rows(tried):
        table.add_row(*row)
    return table


def _goodput(found: Goodput) -> Table:
    """Weeks of training: the useful part of the time, the lost time by cause, and the best checkpoint interval."""
    useful, parts, best, said = found.effective_training_time, found.parts, found.optimum, found.published
    table = plain_table(f"{found.days:g} days, {count(found.gpus)} GPUs", "mean", f"{count(found.runs)} simulated runs")
    table.columns[2].justify = "left"
    spread = f"{percent(useful.p5)} to {percent(useful.p95)} in 90 % of the runs"
    table.add_row("effective training", percent(useful.mean), spread)
    if "effective_training_time" in said:
        table.add_row("  published", percent(said["effective_training_time"]), "from the scenario")
    at_hand = "if a spare node is always available" if parts.waiting else ""
    table.add_row("  closed form", percent(found.closed_form), at_hand)
    for words, part in (
        ("  lost work", parts.lost),
        ("  checkpoints", parts.checkpoint),
        ("  restarts", parts.restart),
        ("  waiting for nodes", parts.waiting),
    ):
        table.add_row(words, percent(part), "")
    table.add_row("failures", f"{found.failures.mean:.0f}", f"every {seconds(found.mtbf_s)}")
    if "failures" in said:
        table.add_row("  published", count(said["failures"]), "from the scenario")
    table.add_row("checkpoint interval", seconds(found.checkpoint_interval_s), "")
    table.add_row("  optimal interval (Young)", seconds(best.young_s), "")
    table.add_row("  optimal interval (Daly)", seconds(best.daly_s), f"{percent(best.closed_form)} by closed form")
    for point in found.curve:
        forms = f"effective {percent(point.useful.mean)}, by closed form {percent(point.closed_form)}"
        table.add_row("  if it were", seconds(point.interval_s), forms)
    table.add_row("simulated by", f"{found.engine['path']} engine", "")
    return table


def _evidence(result: StepResult | ServingResult) -> list[Text]:
    """The source of the interval, and published measurements of similar steps."""
    from rich.text import Text

    if not isinstance(result, StepResult):
        return []
    lines = [f"90 % interval: from the simulator's {result.interval_from}"] if result.interval_from else []
    lines += [f"similar published step: {evidence_line(row)}" for row in nearest(result.scenario, 2)]
    return [Text(line, style="dim") for line in lines]


def provenance_lines(result: StepResult | ServingResult | RlResult) -> list[Text]:
    """The sources of the operators' seconds, and how long the simulation took."""
    from rich.text import Text

    source, engine = result.provenance, result.engine
    shares = ", ".join(f"{percent(v)} {SHARES.get(k, k)}" for k, v in source.shares.items() if v)
    kind = "shipped profile" if source.profile in shipped_profiles() else "profile"
    named = f"{source.profile} ({kind}{', ' * bool(source.date)}{source.date})"
    further = "".join(f", {profile} on {gpu}" for gpu, profile in (source.of_other_gpus or {}).items())
    lines = (
        f"prices: {named}{further}" + (f": {shares}" if shares else ""),
        f"simulated {count(engine.tasks)} tasks in {seconds(engine.wall_s)} with the {engine.path} engine",
    )
    return [Text(line, style="dim") for line in lines]


def warning_lines(result: StepResult | ServingResult | RlResult) -> list[Text]:
    """A result's warnings."""
    from rich.text import Text

    return [Text(f"warning: {w}", style="yellow") for w in result.warnings]
