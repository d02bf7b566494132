"""Differences between two results, as tables for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.core.json_values import is_number
from sim.core.units import as_written, change_percent, n_bytes, plain, seconds
from sim.inputs.units import unit_of
from sim.results.figures import figure_of, statistic_of
from sim.views.palette import style_of
from sim.views.part_names import named_part
from sim.views.terminal import PIPED_WIDTH, TextTable, plain_table, standard_output

if TYPE_CHECKING:
    from sim.views.headline import Number

OPERATORS_SHOWN = 15  # in a terminal, those that change most
PARTS = (
    ("Memory of the fullest rank", "memory_bytes", n_bytes),
    ("Critical path", "critical_path_s", seconds),
    ("Collectives and messages of a rank, the most, summed", "buffer_bytes", n_bytes),
    ("Parts of the model, first class of ranks", "parts_s", seconds),
    ("Operators of the first class of ranks", "operators_s", seconds),
)
NAMES: dict[str, Callable[[str], str]] = {  # of a table's rows, where they are not the keys themselves
    "critical_path_s": lambda kind: style_of(kind).label,
    "parts_s": named_part,
}
OF_THE_VERDICT = ("beside", "uncertainty", "least_odds")  # of a row of memory: no category of it
CARDS = (
    *("step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_s"),
    *("request_latency_s.p50", "time_to_first_token_s.p50", "output_tokens_per_s"),
)
PROGRAM = ("model", "training.seq_len", "training.global_batch_size", "training.recompute", "inference.requests")
SOURCE = ".source"  # of a cluster's or GPU's figures: text that changes nothing


class Cell(NamedTuple):
    """A value as it is sorted and as it is shown."""

    value: float | str
    shown: str


class Rows(NamedTuple):
    """A table: its rows are (name, A, B, change)."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    printed: int | None = None  # rows of it in the terminal; None: all


def tables(found: Mapping[str, Any]) -> list[Rows]:
    """All tables of `sim.studies.difference.difference` that have rows; operators that change most come first."""
    keys = [
        tuple(Cell(text, text) for text in (key, key_words(key, v["a"]), key_words(key, v["b"])))
        for key, v in found["keys"].items()
        if not key.endswith(SOURCE)
    ]
    head = ("", "A", "B") if other_programs(found) else ("", "A", "B", "change")
    out = [Rows("Keys", ("key", "A", "B"), keys)]
    times = [_row(named_figure(k), v, *map(figure_of(k).show, (v["a"], v["b"]))) for k, v in found["times"].items()]
    out.append(Rows("Result", head, times))
    for title, part, shown in PARTS:
        pairs = [(name, pair) for name, pair in found[part].items() if name not in OF_THE_VERDICT]
        if part == "operators_s":
            pairs.sort(key=lambda item: -abs(item[1]["b"] - item[1]["a"]))
        named = NAMES.get(part, str)
        rows = [_row(named(name), v, shown(v["a"]), shown(v["b"])) for name, v in pairs]
        most = OPERATORS_SHOWN if part == "operators_s" else None
        out.append(Rows(title, head, rows, most))
    return [table._replace(rows=[row[: len(table.head)] for row in table.rows]) for table in out if table.rows]


def other_programs(found: Mapping[str, Any]) -> str:
    """A line for two programs that compute different things, of which neither saves anything; empty for one program.

    >>> other_programs({"keys": {"model.layers": 1, "model.vocab": 1, "training.seq_len": 1, "parallelism.tp": 1}})
    'A and B are different programs: model, seq_len. The tables stand side by side, without a change.'
    """
    keys = [key for key in PROGRAM for differing in found["keys"] if f"{differing}.".startswith(f"{key}.")]
    words = ", ".join(key.rpartition(".")[2] for key in dict.fromkeys(keys))
    return words and f"A and B are different programs: {words}. The tables stand side by side, without a change."


def print_difference(found: Mapping[str, Any]) -> None:
    """Tables a person can read, on standard output."""
    terminal = standard_output(PIPED_WIDTH)
    name_a, name_b = found["names"]
    terminal.print(f"A: {name_a}\nB: {name_b}")
    if not found["keys"]:
        terminal.print("The scenarios are equal.")
    if found["follow"]:
        terminal.print(f"These differ because of the keys below: {', '.join(found['follow'])}")
    if said := other_programs(found):
        terminal.print(said)
    for table in tables(found):
        terminal.print()
        terminal.print_table(_printed(table))
    for line in misfits(found):
        terminal.print(line, "bold red")


def difference_page(found: Mapping[str, Any]) -> str:
    """HTML of a page that opens without network."""
    from sim.views.page import still_page

    name_a, name_b = found["names"]
    other = other_programs(found)
    cards = [_card(name, pair, not other) for name in CARDS if (pair := found["times"].get(name)) is not None]
    return still_page(
        "difference.html",
        f"{name_b} against {name_a}",
        {},
        line=f"A: {name_a} · B: {name_b}" + (f" · {other}" if other else "" if found["keys"] else " · they are equal"),
        headline=cards,
        warnings=misfits(found),
        tables=tables(found),
    )


def misfits(found: Mapping[str, Any]) -> list[str]:
    """A line for each side that does not fit in memory."""
    fits = found["fits_in_memory"]
    return [f"{side.upper()} does not fit in memory." for side in ("a", "b") if not fits[side]]


def _row(name: str, pair: Mapping[str, Any], a: str, b: str) -> tuple[Cell, ...]:
    change = pair["change"]
    return Cell(name, name), Cell(pair["a"], a), Cell(pair["b"], b), Cell(change or 0.0, _change(pair))


def _printed(table: Rows) -> TextTable:
    first, *others = table.head
    rows = table.rows[: table.printed]
    left = [a.value != b.value for _, a, b, *_ in table.rows[len(rows) :]]
    counts = ((sum(left), "smaller changes"), (len(left) - sum(left), "without change"))
    said = ", ".join(f"{number} {words}" for number, words in counts if number)
    more = [(f"and {said}", *("" for _ in others))] if said else []
    shown = (tuple(cell.shown for cell in row) for row in rows)
    return plain_table((first or table.title.lower(), *others), [*shown, *more], gap=2)


def named_figure(key: str) -> str:
    """A figure's name, with the statistic of a latency.

    >>> named_figure("step_time_s"), named_figure("request_latency_s.p50"), named_figure("request_latency_s.p99")
    ('Step time', 'Request latency, median', 'Request latency, p99')
    """
    statistic = statistic_of(key)
    return figure_of(key).name + (f", {'median' if statistic == 'p50' else statistic}" if statistic else "")


def key_words(key: str, value: Any) -> str:
    """A key's value; with its unit where the key's name has one.

    >>> key_words("cluster.gpu.memory_bytes", 85899345920.0), key_words("cluster.gpu.peak_flops_per_s.bf16", 9.894e14)
    ('80.00 GiB', '989.4 TFLOP/s')
    >>> key_words("training.framework", "eager"), key_words("parallelism.tp", 8), key_words("model.vocab", None)
    ('eager', '8', '-')
    """
    if value is None:
        return "-"
    if not is_number(value):
        return as_written(value)
    last, *above = key.split(".")[::-1]
    unit = unit_of(last) or (unit_of(above[0]) if above else None)  # a peak for each dtype has the unit of all
    return plain(value) if unit is None else unit.write(value)


def _card(name: str, pair: Mapping[str, Any], with_change: bool) -> Number:
    from sim.views.headline import Number

    figure = figure_of(name)
    change = f", {_change(pair) or 'equal'}" if with_change else ""
    return Number(named_figure(name), figure.show(pair["b"]), f"A {figure.show(pair['a'])}{change}")


def _change(pair: Mapping[str, Any]) -> str:
    if pair["change"] is None:
        return "new"
    if pair["b"] == 0 != pair["a"]:
        return "gone"
    return "" if pair["change"] == 0 else change_percent(pair["change"])
