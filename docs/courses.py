"""`python -m docs.courses`: write docs/courses.md, the courses row by row, from docs/courses.yaml.

The courses' numbers stand in that file; ours come out of each row's own command.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from docs.command_line import parser

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "courses.yaml", ROOT / "docs" / "courses.md"
SECONDS = 300
UNITS = {
    "GB": (1e-9, " GB"),
    "TB": (1e-12, " TB"),
    "%": (100.0, " %"),
    "x": (1.0, " ×"),
    "ms": (1e3, " ms"),
    "": (1.0, ""),
}
HEAD = "| | item | numbers | scenario | command | test | |"
RULE = "|---|---|---|---|---|---|---|"
INTRO = """# The courses, row by row

Five lecture decks are what this project set out to show: tensor, sequence and context parallelism (000), data
parallelism and ZeRO (001), pipelines, kernels and inference (002), one GPU (003), model efficiency (004). Each row has
an item of theirs with its place (deck:lines; "card" is the project's own description), a scenario, a command that shows
the item, and a test that checks it. Where a course states a number, ours stands beside it, from the result of that
command. {full} of {rows} rows are full. A note (*) under the table says what a partial row lacks, or why ours differs.

`python -m docs.courses` writes this page from `docs/courses.yaml`. Tests run every command, look up every scenario and
test, and compare every number.
"""


class CourseRow(NamedTuple):
    """One item of the courses."""

    n: int
    item: str
    deck: str
    status: str
    scenario: str
    run: str
    test: str
    figures: Sequence[Mapping[str, Any]] = ()
    note: str = ""


def sections() -> list[tuple[str, str, list[CourseRow]]]:
    """Letter, title and rows of each section."""
    data = yaml.safe_load(DATA.read_text("utf-8"))
    return [(s["letter"], s["title"], [CourseRow(**row) for row in s["rows"]]) for s in data["sections"]]


def rows() -> Iterator[CourseRow]:
    """All rows."""
    for *_, mine in sections():
        yield from mine


def commands(row: CourseRow) -> set[str]:
    """A row's command, and those that some of its numbers have for themselves."""
    return {row.run, *(f["run"] for f in row.figures if "run" in f)}


def with_figures() -> set[str]:
    """Commands whose JSON some row takes a number from."""
    return {f.get("run", row.run) for row in rows() for f in row.figures}


def as_process(words: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    """`python -m` with these words, in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


def run(command: str, start: Callable[[Sequence[str], str], subprocess.CompletedProcess[str]] = as_process) -> Any:
    """Run a row's command in a folder of its own; its JSON where a row takes numbers from it, else None.

    Raises:
        AssertionError: if the command does not end with 0; the message has its standard error.
    """
    name, *arguments = shlex.split(command)
    module = ["sim"] if name == "stepsim" else []
    arguments = arguments if module else arguments[1:]  # python -m MODULE
    wanted = command in with_figures()
    words = [*module, *arguments, *(["--json", "-"] if wanted else [])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scenarios").symlink_to(ROOT / "scenarios", target_is_directory=True)
        done = start(words, folder)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return json.loads(done.stdout) if wanted else None


def value(found: Any, ours: Mapping[str, Sequence[str]]) -> float:
    """A number of a result: `sum` of its places, `ratio` of the second to the first, `fall` from first to second."""
    ((how, places),) = ours.items()
    numbers = [float(_at(found, place)) for place in places]
    if how == "sum":
        return sum(numbers)
    first, second = numbers
    return second / first if how == "ratio" else 1 - second / first


def _at(found: Any, place: str) -> Any:
    for key in place.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def shown(row: CourseRow, results: Mapping[str, Any]) -> str:
    """The courses' numbers of a row and ours; `results`: JSON by command."""
    out = []
    for figure in row.figures:
        scale, unit = UNITS[figure["unit"]]
        number = value(results[figure.get("run", row.run)], figure["ours"]) * scale
        text = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
        out.append(f"{figure['what']}: {figure['course']}, ours {text}{unit}")
    return "; ".join(out)


def line(row: CourseRow, results: Mapping[str, Any]) -> str:
    """A row of the page's table."""
    test = row.test.partition("::")
    name = f"{row.item} ({row.deck})"
    status = row.status + "*" * bool(row.note)
    run = "<br>".join(f"`{c}`" for c in (row.run, *sorted(commands(row) - {row.run})))
    cells = (str(row.n), name, shown(row, results), f"`{row.scenario}`", run, f"`{test[2]}`, `{test[0]}`", status)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(results: Mapping[str, Any]) -> str:
    """The whole page; `results`: the JSON of the commands of rows with figures."""
    every = list(rows())
    full = sum(row.status == "full" for row in every)
    out = [INTRO.format(rows=len(every), full=full)]
    for letter, title, mine in sections():
        out += [f"## {letter}. {title}\n", HEAD, RULE]
        out += [line(row, results) for row in mine]
        out += ["", *(f"- **{row.n}**\\*: {row.note}" for row in mine if row.note), ""]
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    parser("docs.courses", __doc__).parse_args()
    PAGE.write_text(page({command: run(command) for command in sorted(with_figures())}), "utf-8")


if __name__ == "__main__":
    main()
