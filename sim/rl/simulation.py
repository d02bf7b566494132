"""One step of reinforcement learning of a language model (GRPO), from scenario to result.

It is made of the other workloads as they are. `sim.serve` writes all answers, asked for at once, so that the longest
ones' tail shows; the forward programs of a training step give log-probabilities of policy and reference;
`sim.simulation` is one update over the answers' real lengths; the topology carries new weights to the engine. Phases
are those of NeMo-RL, verl and OpenRLHF. Not priced: advantages (a mean and a deviation for each prompt's answers,
computed by the host), the way of tokens between host processes, Ray's and the trainers' own bookkeeping.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sim.core.timeline import Timeline
from sim.core.units import counted
from sim.inputs.called import check_called
from sim.inputs.rl_config import RewardModel
from sim.inputs.scenario import Overrides, Scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.rl.answers import draw_answers, requests_of
from sim.rl.batches import make_batch
from sim.rl.critic import train_critic
from sim.rl.forward import policy_forward, reward_forward
from sim.rl.memory import held_beside_engine, training_states
from sim.rl.parts import engine_scenario, update_scenario
from sim.rl.records import RlResult
from sim.rl.result import make_rl_result
from sim.rl.step import RlStep
from sim.rl.timeline import make_rl_timeline
from sim.rl.transfer import weight_transfer
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

if TYPE_CHECKING:
    from sim.core.engines import Engine
    from sim.results.memory import MemoryCurve


def simulate_rl(
    scenario: Scenario, profile: Profile | None = None, *, engine: Engine = "auto", overrides: Overrides = ()
) -> RlSimulation:
    """Simulate one step of the scenario's `rl` section. `overrides`: of keys of the scenario.

    `profile` takes the place of the one that `scenario.calibration` names; `engine` as in `simulate` and
    `simulate_serving`.

    Raises:
        InputError: without that section, or where the schedule cannot run as many micro-batches as answers make.
    """
    check_called(scenario, profile, engine)
    scenario = scenario.with_overrides(overrides) if overrides else scenario
    begin, rl = time.perf_counter(), scenario.rl
    if rl is None:
        raise scenario.error(("rl",), "is missing")
    prices = profile or load_profile(scenario.calibration)
    answers = draw_answers(rl, scenario.for_training.seq_len)
    batch = make_batch(scenario, rl, answers)
    update = simulate(update_scenario(scenario, batch), prices, engine=engine)
    states = training_states(update.outcome)
    critic = train_critic(scenario, rl, batch, prices, engine)
    served = simulate_serving(
        engine_scenario(scenario, rl, answers),
        prices,
        requests_of(answers, rl),
        engine=engine,
        held_bytes=held_beside_engine(rl, states, None if critic is None else critic.states),
    )
    reward = reward_forward(scenario, rl.reward, batch, prices) if isinstance(rl.reward, RewardModel) else None
    forward = policy_forward(update, batch.updates * batch.micro_batches)
    transfer = weight_transfer(rl, update.pricing, max(served.capacity.weight_bytes))
    wall_s = time.perf_counter() - begin
    return RlSimulation(
        scenario, rl, prices, answers, batch, update, served, states, forward, reward, critic, transfer, wall_s
    )


class RlSimulation(RlStep, frozen=True, eq=False, dict=True):
    """One simulated step: `update` and `served` are its parts, `outcome` its numbers."""

    @cached_property
    def outcome(self) -> RlResult:
        """The numbers."""
        return make_rl_result(self)

    @cached_property
    def result(self) -> dict[str, Any]:
        """`outcome` as plain data, in the form of `sim.run --json`."""
        return self.outcome.to_json()

    @cached_property
    def timeline(self) -> Timeline:
        """A row for each phase of each pool."""
        return make_rl_timeline(self)

    @property
    def memory(self) -> list[MemoryCurve]:
        """None over time: `outcome.pools` has each turn's peak."""
        return []

    def __repr__(self) -> str:
        return f"RlSimulation({self.scenario.name}: {self.step_time_s:.6g} s on {counted(self.scenario.ranks, 'GPU')})"
