"""`python -m docs.courses`: write docs/courses.md, the lecture decks row by row, from sim/presets/courses.yaml.

The decks' numbers stand in that file; ours come out of each row's own command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from docs.command_line import parser
from sim.commands.course_rows import CourseRow, sections, shown

PAGE = Path(__file__).parent / "courses.md"
HEAD = "| | item | numbers | scenario | command | test | |"
RULE = "|---|---|---|---|---|---|---|"
INTRO = """# The courses, row by row

Five lecture decks are what this project set out to show: tensor, sequence and context parallelism (000), data
parallelism and ZeRO (001), pipelines, kernels and inference (002), one GPU (003), model efficiency (004). Each row has
an item of theirs with its place (deck:lines; "card" is the project's own description), a scenario, a command that shows
the item, and a test that checks it. Where a deck states a number or a formula that gives one, ours stands beside it,
from the result of that command. {full} of {rows} rows are full. A note (*) under the table says what a partial row
lacks, or why ours differs.

`stepsim courses` lists the rows, `stepsim courses ROW` runs the command of one. `python -m docs.courses` writes this
page. Tests run every command and compare every number.
"""
Shown = Callable[[CourseRow], Sequence[float | None]]


def line(row: CourseRow, numbers: Sequence[float | None]) -> str:
    """A row of the page's table."""
    test = row.test.partition("::")
    name = f"{row.statement} ({row.lines})"
    pairs = zip(row.figures, numbers, strict=True)
    said = "; ".join(f"{f.name}: {f.said:,.4g}, ours {'-' if n is None else f'{n:,.3g}'}" for f, n in pairs)
    status = row.status + "*" * bool(row.note)
    cells = (str(row.row), name, said, f"`{row.scenario}`", f"`{row.command}`", f"`{test[2]}`, `{test[0]}`", status)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(numbers: Shown) -> str:
    """The whole page; `numbers`: the figures of a row as they are shown."""
    every = [row for *_, mine in sections() for row in mine]
    full = sum(row.status == "full" for row in every)
    out = [INTRO.format(rows=len(every), full=full)]
    for letter, title, mine in sections():
        out += [f"## {letter}. {title}\n", HEAD, RULE]
        out += [line(row, numbers(row)) for row in mine]
        out += ["", *(f"- **{row.row}**\\*: {row.note}" for row in mine if row.note), ""]
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    parser("docs.courses", __doc__).parse_args()
    PAGE.write_text(page(shown), "utf-8")


if __name__ == "__main__":
    main()
