"""A step of reinforcement learning that has been simulated: its parts, and when each of them runs."""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from sim.inputs.rl_config import Rl
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.prices.rank_prices import LINK_UNCERTAINTY
from sim.results.metrics import interval
from sim.rl.answers import Answers
from sim.rl.batches import Batch
from sim.rl.critic import Critic
from sim.rl.forward import Forward
from sim.rl.memory import TrainingStates
from sim.rl.phases import place
from sim.rl.records import Phase, Pool, WeightTransfer
from sim.rl.records import PhaseKind as K
from sim.serve.results.result import ServingSimulation
from sim.simulation import Simulation


class RlStep(Struct, frozen=True, eq=False, dict=True):
    """One step of reinforcement learning. `update`: one of its training steps; `served`: the engine that answers."""

    scenario: Scenario
    rl: Rl
    profile: Profile
    answers: Answers
    batch: Batch
    update: Simulation
    served: ServingSimulation
    states: TrainingStates
    forward: Forward  # of the policy, once over all answers
    reward: Forward | None
    critic: Critic | None
    transfer: WeightTransfer
    wall_s: float

    @property
    def updates(self) -> int:
        """Training steps of the policy, and of its critic: each epoch trains on every answer once."""
        return self.batch.updates * self.rl.epochs

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Parts of the step, each at its place."""
        return place([part for part in self._parts() if part.seconds > 0], self.rl.steps_off)

    def _parts(self) -> list[Phase]:
        """Return the step's parts in the order in which one answer goes through them; parts may take no time."""
        rl, copy, engine_bytes = self.rl, self._host_copy_s, max(self.served.capacity.weight_bytes)
        sleeps = copy(engine_bytes) if rl.colocated and rl.sleep_level == 1 else 0.0
        moved = copy(self._moved_bytes) if rl.colocated and rl.offload_training else 0.0
        swaps = 3 * copy(self.states.parameters) if rl.reference == "host" else 0.0
        again = self.forward.seconds if rl.reference != "none" else 0.0
        own = self.forward.seconds if rl.log_probs == "trainer" else 0.0
        update_s, (low, high) = self.update.outcome.step_time_s, self.update.outcome.step_time_interval_s
        n = self.updates
        return [
            Phase("generation", K.GENERATION, "generation", self.served.end_s, self.served.outcome.duration_interval_s),
            Phase("rule reward", K.REWARD, "generation", rl.reward_s, (rl.reward_s, rl.reward_s)),
            _over_links("engine sleeps", "generation", sleeps),
            _over_links("training states to GPU", "training", moved),
            *self._scoring(),
            _forwards("policy log-probabilities", K.LOGPROBS, self.forward, own),
            _over_links("reference swapped in and out", "training", swaps),
            _forwards("reference log-probabilities", K.REFERENCE, self.forward, again),
            *self._critics_turns(),
            Phase("training", K.TRAINING, "training", n * update_s, (n * low, n * high)),
            _over_links("training states to host", "training", moved),
            _over_links("engine wakes", "training", sleeps),
            _over_links("weight transfer", "both", self.transfer.seconds, K.WEIGHTS),
        ]

    def _scoring(self) -> list[Phase]:
        """Return the phases of scoring by a reward model, whose weights come from the host."""
        if self.reward is None:
            return []
        copied = _over_links("reward model to GPU", "training", self._host_copy_s(self.reward.weight_bytes))
        return [copied, _forwards("reward", K.REWARD, self.reward)]

    def _critics_turns(self) -> list[Phase]:
        """The critic's values of all answers and its updates, and what its states take to come and go for both
        (verl, trainer/ppo/ray_trainer.py: `_compute_values` and `_update_critic`, before the policy's update)."""
        if self.critic is None:
            return []
        states, (low, high) = self.critic.states, self.critic.update.outcome.step_time_interval_s
        n, both_ways = self.updates, 2 * (states.parameters + self._moved(states))
        copied = both_ways if self.rl.critic == "host" else 0.0
        update_s = self.critic.update.outcome.step_time_s
        return [
            _over_links("critic swapped in and out", "training", self._host_copy_s(copied)),
            _forwards("values", K.VALUES, self.critic.forward),
            Phase("critic training", K.CRITIC, "training", n * update_s, (n * low, n * high)),
        ]

    @property
    def _moved_bytes(self) -> float:
        """Between GPU and host, of the training states: those that are not in host memory between steps anyway."""
        return self._moved(self.states)

    def _moved(self, states: TrainingStates) -> float:
        return states.parameters if self.update.scenario.for_training.optimizer_offload else states.moved

    def _host_copy_s(self, size_bytes: float) -> float:
        """All GPUs of a node copy at the same time, each over its own link."""
        return self.update.pricing.network.host_copy(size_bytes) if size_bytes > 0 else 0.0

    @cached_property
    def step_time_s(self) -> float:
        """End of the last phase."""
        return max(phase.start_s + phase.seconds for phase in self.phases)


def _forwards(name: str, kind: K, forward: Forward, seconds: float | None = None) -> Phase:
    spent = forward.seconds if seconds is None else seconds
    return Phase(name, kind, "training", spent, interval(spent, forward.shares))


def _over_links(name: str, pool: Pool, seconds: float, kind: K = K.HOST_COPY) -> Phase:
    """Copies and messages, which are priced by closed forms on links."""
    likely = interval(seconds, {("links", "topology", LINK_UNCERTAINTY): seconds})
    return Phase(name, kind, pool, seconds, likely)
