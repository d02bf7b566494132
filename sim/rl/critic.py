"""PPO's critic: a model of the policy's sizes that values every token of the answers, trained beside the policy.

Schulman et al. 2017 (arXiv 1707.06347). It has the policy's layout and micro-batches, and its head gives one number a
token.
"""

from __future__ import annotations

from msgspec import Struct

from sim.core.engines import Engine
from sim.inputs.rl_config import Rl
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.rl.batches import Batch
from sim.rl.forward import Forward, policy_forward
from sim.rl.memory import TrainingStates, training_states
from sim.rl.parts import critic_scenario
from sim.simulation import Simulation, simulate


class Critic(Struct, frozen=True, eq=False):
    """Hold one `update` of the critic, its `forward` over all answers, and its states between turns."""

    update: Simulation
    forward: Forward
    states: TrainingStates

    @property
    def peak_bytes(self) -> float:
        """The critic's memory alone while it is updated, on the fullest GPU."""
        return self.update.outcome.peak_memory_bytes


def train_critic(scenario: Scenario, rl: Rl, batch: Batch, prices: Profile, engine: Engine) -> Critic | None:
    """The critic's parts of a step; None without one."""
    if rl.critic == "none":
        return None
    update = simulate(critic_scenario(scenario, batch), prices, engine=engine)
    forward = policy_forward(update, batch.updates * batch.micro_batches)
    return Critic(update, forward, training_states(update.outcome))
