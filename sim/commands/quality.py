"""`python -m sim.quality`: a table of models' scores joined with simulated throughput and memory into Pareto plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.command import Command
from sim.commands.files_named import FILE
from sim.commands.options import SCENARIO, Report, report_options

if TYPE_CHECKING:
    from sim.studies.quality import QualityResult


@click.command("quality", cls=Command)
@click.argument("scenario", type=SCENARIO, metavar="[SCENARIO]", required=False)
@click.option(
    "--scores",
    type=FILE,
    metavar="FILE.csv",
    help="columns model and score, optional: set and source; by default published MMLU scores",
)
@report_options
def main(scenario: Path | None, scores: Path | None, report: Report) -> None:
    """Simulate serving for every model of a table of scores, as SCENARIO (default: quality_serving) describes it."""
    from sim.inputs.shipped import scenarios_folder
    from sim.studies.quality import QualityResult, quality, read_scores
    from sim.views.quality_page import quality_page

    path = scenario or scenarios_folder() / "quality_serving.yaml"
    table = scores or scenarios_folder() / "quality_mmlu.csv"
    models = quality(path, read_scores(table), report.overrides)
    result = QualityResult(name=path.stem, scores=table.name, models=models)
    report.show(result, quality_page, print_quality)


def print_quality(result: QualityResult) -> None:
    """A table, best score first; a mark where no other model is better in both."""
    from sim.views.quality_page import HEAD, cells
    from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

    terminal = standard_output(PIPED_WIDTH)
    terminal.print(f"{result.name} with the scores of {result.scores}; ✓ where no other model is better in both")
    best_first = sorted(result.models, key=lambda row: -row.score)
    terminal.print_table(plain_table(HEAD, (cells(row) for row in best_first), gap=2))
