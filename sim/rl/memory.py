"""Peak memory of each pool's GPUs, turn by turn: writing answers, training on them, weights on their way."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from sim.inputs.rl_config import Rl
from sim.ranks.plan import Plan
from sim.results.records import MemoryRow
from sim.results.result import StepResult
from sim.rl.forward import Forward
from sim.rl.transfer import buffer_bytes
from sim.serve.results.result import ServingSimulation


class TrainingStates(Struct, frozen=True):
    """Bytes on the fullest training rank between its turns. `moved`: of them, what is copied to the host and back where
    the engine takes the GPU's memory; gradients are dropped."""

    parameters: float
    lasting: float
    moved: float


def training_states(trained: StepResult) -> TrainingStates:
    """Return what the trainer keeps; states that are in host memory between steps anyway are no part of it."""
    row = max(trained.memory, key=lambda row: row.lasting)
    return TrainingStates(row.parameters, row.lasting, row.parameters + row.optimizer)


def held_beside_engine(rl: Rl, states: TrainingStates, critic: TrainingStates | None = None) -> float:
    """Bytes of the trainer on the engine's GPUs while it writes. `critic`: the critic's states."""
    if not rl.colocated:
        return 0.0
    own = 0.0 if rl.offload_training else states.lasting
    return _reference_bytes(rl, states) + own + _critic_bytes(rl, critic)


def _critic_bytes(rl: Rl, critic: TrainingStates | None) -> float:
    """Return the bytes of the critic between its turns if it stays on the GPU."""
    return 0.0 if critic is None or rl.critic != "gpu" else critic.lasting


def _reference_bytes(rl: Rl, states: TrainingStates) -> float:
    """Return the bytes of the reference policy if it stays on the GPU, cut as the policy is."""
    return states.parameters if rl.reference == "gpu" else 0.0


def engine_bytes(served: ServingSimulation) -> float:
    """Weights and the whole cache, which engines allocate at once, on the fullest of an engine's ranks."""
    c, block = served.capacity, served.scenario.for_serving.kv_cache.block_tokens
    stages = zip(c.weight_bytes, c.token_bytes, strict=True)
    return max(weights + c.blocks * block * each for weights, each in stages)


def peaks(
    rl: Rl,
    plan: Plan,
    trained: StepResult,
    states: TrainingStates,
    served: ServingSimulation,
    reward: Forward | None,
    critic: TrainingStates | None = None,
    critic_peak: float = 0.0,
) -> dict[str, Mapping[str, float]]:
    """Return by pool the bytes on the fullest GPU in every turn. `critic`, `critic_peak`: the critic's states, and what
    it needs while it trains, when states that go to the host for the engine are there, too."""
    engine: MemoryRow = max(served.outcome.memory, key=lambda row: row.peak)
    reference = _reference_bytes(rl, states) + _critic_bytes(rl, critic)
    asleep = engine_bytes(served) if rl.colocated and rl.sleep_level == 0 else 0.0
    training = {"training": trained.peak_memory_bytes + reference + asleep}
    if reward is not None:
        training["reward"] = states.lasting + reference + asleep + reward.weight_bytes + reward.buffer_bytes
    if critic is not None:
        policy = 0.0 if rl.colocated and rl.offload_training else states.lasting
        training["critic training"] = critic_peak + policy + _reference_bytes(rl, states) + asleep
    bucket = buffer_bytes(plan)
    writing = engine.peak + held_beside_engine(rl, states, critic)
    if not rl.colocated:
        weights = states.lasting + reference + bucket
        return {
            "training": {**training, "weights": weights},
            "generation": {"generation": writing, "weights": engine.parameters + bucket},
        }
    kept = states.parameters if rl.offload_training else states.lasting
    weights = kept + reference + bucket + (asleep or engine.parameters)
    return {"colocated": {"generation": writing, **training, "weights": weights}}
