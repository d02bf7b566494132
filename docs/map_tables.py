"""`python -m docs.map_tables MAP.json`: print the tables of docs/map.md, from what `python -m sim.map --json` wrote."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.command_line import json_file
from sim.views.map_page import cell_words, run_cells


def cell_table(result: Mapping[str, Any]) -> str:
    """The fastest layout of each cell as Markdown: a model a row, a number of GPUs a column."""
    words = {(cell["model"], cell["gpus"]): "<br>".join(cell_words(cell)) for cell in result["cells"]}
    head = ["MFU, memory, layout", *[f"{n} GPUs" for n in result["gpus"]]]
    rows = [[model, *[words[model, n] for n in result["gpus"]]] for model in result["models"]]
    return _table([head, ["---"] * len(head), *rows])


def run_table(result: Mapping[str, Any]) -> str:
    """The measured runs and their simulation as Markdown, without the columns of MFU."""
    head = ["model", "GPUs", "layout", "tokens/s/GPU measured", "simulated", "error"]
    rows = [[str(cell) for cell in run_cells(row)[: len(head)]] for row in result["measured"]["rows"]]
    return _table([head, ["---"] * len(head), *rows])


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print both tables."""
    read = json_file("docs.map_tables", __doc__, "MAP.json", "sim-map/1")
    print(f"{cell_table(read)}\n\n{run_table(read)}")


if __name__ == "__main__":
    main()
