"""What a found layout's training takes: days of its tokens, and the cost of its GPU hours."""

from __future__ import annotations

from msgspec.structs import replace

from sim.results.training_run import training_run
from sim.search.found import BestLayout
from sim.studies.spending import TRILLION, gpu_hours_of


def with_costs(row: BestLayout, price_per_gpu_hour: float | None) -> BestLayout:
    """Return a layout with its whole training, if the scenario has `training.tokens` at one batch size, and with its
    costs, if a price is given."""
    rate, training = row.tokens_per_s_per_gpu, row.scenario.for_training
    # A layout that suits one batch size need not suit the others of a schedule of batch sizes.
    run = None if training.batch_schedule else training_run(row.scenario, lambda _: row.step_time_s)
    row = replace(row, training_run=run)
    if price_per_gpu_hour is None or not rate:
        return row
    return replace(
        row,
        cost_per_trillion_tokens=gpu_hours_of(TRILLION, rate) * price_per_gpu_hour,
        training_cost=None if run is None else run.gpu_hours * price_per_gpu_hour,
    )
