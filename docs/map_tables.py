"""`python -m docs.map_tables`: search the default map of `sim.map`, and print the two tables of docs/map.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.command_line import parser
from sim.commands.layout_options import parse_gpus
from sim.commands.map import BASE, GPUS, MEASURED, MODELS, ONLY, parse_list, run_map
from sim.commands.options import Narrowing, Study
from sim.inputs.shipped import scenarios_folder
from sim.validation.best_measured import MeasuredBest, best_measured
from sim.validation.experiment_map import MapResult
from sim.views.map_page import cell_words, run_cells


def cell_table(result: MapResult) -> str:
    """The fastest layout of each cell as Markdown: a model a row, a number of GPUs a column."""
    words = {(cell.model, cell.gpus): "<br>".join(cell_words(cell)) for cell in result.cells}
    head = ["MFU, memory, layout", *[f"{n} GPUs" for n in result.gpus]]
    rows = [[model, *[words[model, n] for n in result.gpus]] for model in result.models]
    return _table([head, ["---"] * len(head), *rows])


def run_table(runs: Sequence[MeasuredBest]) -> str:
    """The measured runs and their simulation as Markdown, without the columns of MFU."""
    head = ["model", "GPUs", "layout", "tokens/s/GPU measured", "simulated", "error"]
    rows = [[str(cell) for cell in run_cells(row)[: len(head)]] for row in runs]
    return _table([head, ["---"] * len(head), *rows])


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print both tables."""
    parser("docs.map_tables", __doc__).parse_args()
    folder = scenarios_folder()
    found = run_map(folder / BASE, parse_list(MODELS), parse_gpus(GPUS), Narrowing(ONLY), Study())
    print(f"{cell_table(found)}\n\n{run_table(best_measured(folder / MEASURED).rows)}")


if __name__ == "__main__":
    main()
