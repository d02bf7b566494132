"""The cost of a result in energy and, if the price of a GPU hour is given, in money.

Money is GPU hours times the price. Energy counts GPUs alone, at their power limit, which large steps come close to.
Hosts, switches and cooling are left out.
"""

from __future__ import annotations

from sim.core.units import HOUR_S
from sim.results.records import Record
from sim.results.result import StepResult
from sim.rl.records import RlResult
from sim.serve.results.records import ServingResult

TRILLION, MILLION = 1e12, 1e6


class TokenCost(Record, frozen=True):
    """GPU hours, their price, and the energy that the GPUs take at their power limit."""

    tokens: float
    gpu_hours: float
    price: float  # in the currency of the price of a GPU hour
    energy_kwh: float


class Spending(Record, frozen=True):
    """Costs at one price of a GPU hour: of a trillion tokens in training, or a million tokens written in serving; of
    the whole training where `training.tokens` gives its length; of one step and of a million answers in reinforcement
    learning, where `tokens` are those of prompts and answers."""

    price_per_gpu_hour: float
    trillion_tokens: TokenCost | None = None
    million_output_tokens: TokenCost | None = None
    whole_training: TokenCost | None = None
    rl_step: TokenCost | None = None
    million_answers: TokenCost | None = None


def gpu_hours_of(tokens: float, tokens_per_s_per_gpu: float) -> float:
    """GPU hours for `tokens` tokens; 0 where none is computed."""
    return tokens / tokens_per_s_per_gpu / HOUR_S if tokens_per_s_per_gpu else 0.0


def token_cost(tokens: float, gpu_hours: float, watts: float, price_per_gpu_hour: float) -> TokenCost:
    """The cost of tokens; `watts`: mean power of a GPU."""
    return TokenCost(tokens, gpu_hours, gpu_hours * price_per_gpu_hour, gpu_hours * watts / 1e3)


def spending(
    result: StepResult | ServingResult | RlResult, price_per_gpu_hour: float, useful_share: float = 1.0
) -> Spending:
    """The costs of a result; `price_per_gpu_hour` in any currency. `useful_share`: part of the whole training's time
    that failures and checkpoints leave (`Goodput.effective_training_time`)."""
    watts = result.scenario.cluster.mean_over(result.scenario.gpus, lambda gpu: gpu.power_limit_w)

    def cost(tokens: float, gpu_hours: float) -> TokenCost:
        return token_cost(tokens, gpu_hours, watts, price_per_gpu_hour)

    if isinstance(result, ServingResult):
        hours = gpu_hours_of(MILLION, result.output_tokens_per_s_per_gpu)
        return Spending(price_per_gpu_hour, million_output_tokens=cost(MILLION, hours))
    if isinstance(result, RlResult):
        step = result.step_time_s * result.scenario.ranks / HOUR_S
        steps = MILLION / result.generation.answers
        answers = cost(steps * result.tokens, steps * step)
        return Spending(price_per_gpu_hour, rl_step=cost(result.tokens, step), million_answers=answers)
    run, hours = result.training_run, gpu_hours_of(TRILLION, result.tokens_per_s_per_gpu)
    whole = None if run is None or useful_share <= 0 else cost(run.tokens, run.gpu_hours / useful_share)
    return Spending(price_per_gpu_hour, trillion_tokens=cost(TRILLION, hours), whole_training=whole)
