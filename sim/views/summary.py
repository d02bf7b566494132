"""The summary that a command prints: headline, where the step goes, memory, ranks, certainty, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sim.core.units import billions, count, counted, n_bytes, percent, ranks_text, seconds
from sim.results.certainty import is_shipped
from sim.results.evidence import nearest
from sim.results.losses import idle_parts, teacher_s
from sim.results.records import Engine, tightest
from sim.results.result import StepResult
from sim.views.advice_rows import ADVICE_HEAD, advice_rows
from sim.views.headline import Number, evidence_line, headline
from sim.views.palette import memory_styles
from sim.views.scenario_words import layout_line
from sim.views.terminal import Cell, Column, Span, Terminal, TextRow, TextTable, plain_table
from topology.presets import GPUS

if TYPE_CHECKING:
    from sim.rl.records import RlResult
    from sim.serve.results.records import ServingResult
    from sim.studies.advice import Tried
    from sim.studies.goodput import Goodput

RANKS_SHOWN = 12
NAME_WIDTH = 22  # of classes of ranks; longer ones are cut
WAITING_SHOWN = 0.01  # of the step
SHARES = {  # of all priced seconds, by the source of the price
    "measured": "from measured points",
    "interpolated": "interpolated between points",
    "roofline": "from the roofline",
    "topology": "from formulas of the network",
    "host": "from the engine's record of host times",
}
APART = 0.005  # of the peak: the sum of categories above it by less is not explained
BAR = (("compute", "blue", "█"), ("communication", "yellow", "▓"), ("bubble", "grey", "░"))


def print_summary(
    result: StepResult | ServingResult,
    terminal: Terminal,
    weeks: Goodput | None = None,
    more: Sequence[Number] = (),
    advice: Sequence[Tried] = (),
) -> None:
    """Print a result for a person; about 35 lines for 8 ranks. `more` follows the headline; `advice` are changes that
    were tried and help."""
    terminal.print(result.scenario.name, "bold")
    terminal.print(layout_line(result.scenario), "dim")
    tables = [numbers_table([*headline(result), *more])]
    if isinstance(result, StepResult):
        tables.append(_ranks(result, terminal.width))
        if result.blame:  # of each fault: how much shorter the step is without
            step_s = result.step_time_s or 1.0
            lost = ((row.cause, seconds(row.lost_s), percent(row.lost_s / step_s)) for row in result.blame)
            tables.append(plain_table(("faults", "lost", "of the step"), lost))
        tables += [_waiting(result)] if result.waiting else []
        tables += [_phases(result)] if result.training_run and len(result.training_run.batch_schedule) > 1 else []
    tables.append(_memory(result, max(12, min(36, terminal.width - 40))))
    if advice:
        tables.append(_advice(advice, result.fits_in_memory))
    if weeks is not None:
        tables.append(_goodput(weeks))
    for table in tables:
        terminal.print()
        terminal.print_table(table)
    if weeks is None and result.scenario.faults is not None and result.scenario.faults.failures is not None:
        terminal.print()
        terminal.print("faults.failures slows no single step; --days 30 simulates 30 days of failures and checkpoints")
    terminal.print()
    print_provenance(result, terminal, _evidence(result))


def numbers_table(numbers: Sequence[Number]) -> TextTable:
    """Headline numbers, one a line."""
    columns = (Column(style="dim"), Column(style="bold"), Column(wraps=True))
    rows = [TextRow((n.name, n.value, n.note), "bold red" if n.mood == "bad" else "") for n in numbers]
    return TextTable(columns, rows, gap=2)


def _ranks(result: StepResult, terminal_width: int) -> TextTable:
    """A bar per class of ranks; of many, the first and last ones. Waiting beside a bubble has a column where it is a
    percent of the step, and so has a teacher's turn, so that a row adds up to the step."""
    step = result.step_time_s or 1.0
    turn_s = teacher_s(result)
    idle = [dict(idle_parts(result, row)) for row in result.ranks]
    first, *other = idle[0] if idle else ("bubble",)
    shown = [name for name in other if any(parts[name] > WAITING_SHOWN * step for parts in idle)]
    teacher = ("teacher",) if turn_s > WAITING_SHOWN * step else ()
    names = ("computing", "exposed", first, *("waiting" for _ in shown), *teacher)
    more = len(names) > 3
    columns = (
        Column(most=NAME_WIDTH),
        *(Column(name, right=True) for name in names),
        Column(f"█ computing ▓ exposed ░ {first}", wraps=True),  # its head may take two lines, numbers may not be cut
    )
    width = min(36, max(9, terminal_width - 73) if more else max(12, terminal_width - 62))  # characters of the bars
    table: list[TextRow] = []
    for row, parts in zip(result.ranks, idle, strict=True):
        numbers = (row.compute_s, row.exposed_comm_s, *(parts[k] for k in (first, *shown)), *(turn_s for _ in teacher))
        lengths = row.compute_s, row.exposed_comm_s, parts[first]
        table.append(TextRow((ranks_text(row.ranks), *(seconds(s) for s in numbers), _bar(lengths, step, width))))
    slowest = max(range(len(table)), key=lambda i: result.ranks[i].compute_s, default=0)
    return TextTable(columns, _shortened(table, slowest))


def _shortened(table: Sequence[TextRow], kept: int) -> list[TextRow]:
    """Keep the first and last of many rows and row number `kept`, such as a straggler's; others become "… n more"."""
    half, most = RANKS_SHOWN // 2, len(table)
    if most <= RANKS_SHOWN:
        return list(table)
    out, last = list[TextRow](), -1
    for i in sorted({*range(half), kept, *range(most - half, most)}):
        if left := i - last - 1:
            out.append(TextRow((f"… {left} more", *("" for _ in table[i].cells[1:]))))
        out.append(table[i])
        last = i
    return out


def _bar(lengths: tuple[float, float, float], step: float, width: int) -> Cell:
    """Lengths in the order of `BAR`, as a bar of characters; ends are rounded, not lengths, so that it is never longer
    than the step."""
    bar, at, reached = list[Span](), 0, 0.0
    for length, (_, colour, character) in zip(lengths, BAR, strict=True):
        reached += length
        end = min(width, round(reached / step * width))
        bar.append(Span(character * (end - at), colour))
        at = end
    return tuple(bar)


def _memory(result: StepResult | ServingResult, width: int) -> TextTable:
    """The fullest class of ranks by category, against what fits on its device."""
    worst = tightest(result.memory)
    whole = worst.limit
    rows: list[TextRow] = []
    names = {category: style.label for category, style in memory_styles(result.scenario).items()}
    for category, label in {**names, "peak": "Peak", "reserved": "Reserved"}.items():
        size: float = getattr(worst, category)
        length = round(min(1.0, size / whole) * width)
        style = "red" if category in ("peak", "reserved") and size > whole else "cyan"
        rows.append(TextRow((label, n_bytes(size), (Span("█" * length, style),))))
    apart = sum(getattr(worst, category) for category in names) > (1 + APART) * worst.peak
    said = f"memory of {ranks_text(worst.ranks)}{', each at its maximum' if apart else ''}"
    heads = Column(said, wraps=True), Column(right=True), Column(f"█ share of {n_bytes(whole)}")
    return TextTable(heads, rows)


def _waiting(result: StepResult) -> TextTable:
    """Who stands still for whom, longest first."""
    columns = (
        Column("ranks", most=NAME_WIDTH),
        Column("wait for", right=True, most=NAME_WIDTH),
        Column("time", right=True),
    )
    shown = result.waiting[: RANKS_SHOWN // 2]
    return TextTable(
        columns, [TextRow((ranks_text(r.ranks), ranks_text(r.awaited), seconds(r.seconds))) for r in shown]
    )


def _phases(result: StepResult) -> TextTable:
    """The phases of a training whose batch grows."""
    assert result.training_run is not None
    seq_len = result.scenario.for_training.seq_len
    rows = (
        (
            f"{billions(phase.from_tokens)} to {billions(phase.to_tokens)}",
            count(phase.global_batch_size),
            count(phase.global_batch_size * seq_len),
            count(phase.steps),
            seconds(phase.step_time_s),
            f"{phase.days:,.1f}",
        )
        for phase in result.training_run.batch_schedule
    )
    return plain_table(("training tokens", "sequences a step", "tokens a step", "steps", "step", "days"), rows)


def _advice(tried: Sequence[Tried], fits: bool) -> TextTable:
    """The changes that were tried and help, with the step and the memory that each gives."""
    first = Column("faster with --set" if fits else "fits with --set", wraps=True, indents=True)
    others = (Column(name.lower(), right=True) for name in ADVICE_HEAD[1:])
    return TextTable((first, *others), [TextRow(row) for row in advice_rows(tried)], gap=2)


def _goodput(found: Goodput) -> TextTable:
    """Weeks of training with failures."""
    head, rows = goodput_rows(found)
    columns = (Column(head[0]), Column(head[1], right=True), Column(head[2], wraps=True))
    return TextTable(columns, [TextRow(row) for row in rows])


def goodput_rows(found: Goodput) -> tuple[tuple[str, str, str], list[tuple[str, str, str]]]:
    """A head, and rows: the useful part of the time, the lost time by cause, and the best checkpoint interval."""
    useful, parts, best, said = found.effective_training_time, found.parts, found.optimum, found.published
    head = (f"{found.days:g} days, {counted(found.gpus, 'GPU')}", "mean", f"{count(found.runs)} simulated runs")
    spread = f"{percent(useful.p5)} to {percent(useful.p95)} in 90 % of the runs"
    rows = [("effective training", percent(useful.mean), spread)]
    if "effective_training_time" in said:
        rows.append(("  published", percent(said["effective_training_time"]), "from the scenario"))
    at_hand = "if a spare node is always available" if parts.waiting else ""
    rows.append(("  closed form", percent(found.closed_form), at_hand))
    for words, part in (
        ("  lost work", parts.lost),
        ("  checkpoints", parts.checkpoint),
        ("  restarts", parts.restart),
        ("  waiting for nodes", parts.waiting),
    ):
        rows.append((words, percent(part), ""))
    rows.append(("failures", _mean_count(found.failures.mean), f"every {seconds(found.mtbf_s)}"))
    if "failures" in said:
        rows.append(("  published", count(said["failures"]), "from the scenario"))
    rows.append(("checkpoint interval", seconds(found.checkpoint_interval_s), ""))
    rows.append(("  optimal interval (Young)", seconds(best.young_s), ""))
    rows.append(("  optimal interval (Daly)", seconds(best.daly_s), f"{percent(best.closed_form)} by closed form"))
    rows.append(("effective training if", "", ""))
    for point in found.curve:
        forms = f"{percent(point.closed_form)} by closed form"
        rows.append((f"  every {seconds(point.interval_s)}", percent(point.useful.mean), forms))
    rows.append(("simulated by", f"{found.engine['path']} engine", ""))
    return head, rows


def _mean_count(mean: float) -> str:
    """Whole ones where there are many.

    >>> _mean_count(0.215), _mean_count(468.2)
    ('0.215', '468')
    """
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def _evidence(result: StepResult | ServingResult) -> list[str]:
    """The source of the interval, and published measurements of similar steps."""
    lines = [f"90 % interval: from the simulator's {result.interval_from}"] if result.interval_from else []
    if not isinstance(result, StepResult):
        return lines
    return lines + [f"similar published step: {evidence_line(row)}" for row in nearest(result.scenario, 2)]


def simulated_words(engine: Engine) -> str:
    """Say how much was simulated, and what equal ranks and whole actions stand for.

    >>> simulated_words(Engine(tasks=106, stands_for=1_234_567, simulated_ranks=1, wall_s=0.1, path="simpy"))
    '106 tasks on 1 rank, which stand for 1,234,567 operators and communications on all ranks,'
    """
    tasks = counted(engine.tasks, "task")
    if engine.stands_for is None or engine.simulated_ranks is None:
        return tasks
    of_all = f"which stand for {counted(engine.stands_for, 'operator')} and communications on all ranks"
    return f"{tasks} on {counted(engine.simulated_ranks, 'rank')}, {of_all},"


def print_provenance(
    result: StepResult | ServingResult | RlResult, terminal: Terminal, before: Iterable[str] = ()
) -> None:
    """Print the lines below a summary: the lines `before`, the sources of the operators' seconds, how long the
    simulation took, and warnings."""
    source, engine = result.provenance, result.engine
    shares = ", ".join(f"{percent(v)} {SHARES.get(k, k)}" for k, v in source.shares.items() if v)
    kind = "shipped profile" if is_shipped(result.scenario, source.profile) else "profile"
    named = f"{source.profile} ({kind}{', ' * bool(source.date)}{source.date})"
    gpu = result.scenario.cluster.gpu
    if source.profile in GPUS and source.profile not in (gpu.name, gpu.variant_of):
        named += f", scaled to {gpu.name}"
    further = "".join(f", {profile} on {gpu}" for gpu, profile in (source.of_other_gpus or {}).items())
    for line in (
        *before,
        f"operator times: {named}{further}" + (f": {shares}" if shares else ""),
        f"simulated {simulated_words(engine)} in {seconds(engine.wall_s)} with the {engine.path} engine",
    ):
        terminal.print(line, "dim")
    for warning in result.warnings:
        terminal.print(f"warning: {warning}", "yellow")
