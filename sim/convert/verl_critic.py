"""verl's critic of PPO, which is simulated with the policy's sizes, layout and batches (trainer/config/critic)."""

from __future__ import annotations

from typing import Any

from sim.convert.named_models import named_model
from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

CRITIC, ACTOR = "critic", "actor_rollout_ref.actor"
PATH, MINI_BATCH = f"{CRITIC}.model.path", f"{CRITIC}.ppo_mini_batch_size"
# Where its sections stand, those of earlier releases behind, and where the policy's do.
SECTIONS = {
    f"{CRITIC}.fsdp.": f"{ACTOR}.fsdp_config.",
    f"{CRITIC}.model.fsdp_config.": f"{ACTOR}.fsdp_config.",
    f"{CRITIC}.model.": "actor_rollout_ref.model.",
    f"{CRITIC}.": f"{ACTOR}.",
}
STATES = ("fsdp", "model.fsdp_config", "megatron")
DEGREES = (
    "ulysses_sequence_parallel_size",
    *(f"megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")),
)
OTHERS = "the critic: simulated with the policy's layout, micro-batches and optimizer"


def critic_of(s: Settings, model: str) -> dict[str, str]:
    """The key `critic` of `rl`: where its states are between its turns. `model`: the policy's.

    Raises:
        InputError: for a critic of other sizes or mini-batches than the policy's.
    """
    _require_sizes(s, model)
    mini_batch = s.whole(MINI_BATCH)
    if mini_batch is not None and mini_batch != s.size(f"{ACTOR}.ppo_mini_batch_size", 256):
        problem = f"found {mini_batch}; a critic is simulated with the policy's (ppo_mini_batch_size of the actor)"
        raise InputError(f"{s.place(MINI_BATCH)}: {problem}")
    away = [s.flag(f"{CRITIC}.{part}.{what}_offload") for part in STATES for what in ("param", "optimizer", "grad")]
    s.taken |= {key for key in of_critic(s) if s.values[key] == s.values.get(_of_policy(key))}
    s.notes.append("; ".join([OTHERS, *_degrees(s)]))
    return {"critic": "host" if any(away) else "gpu"}


def note_critic(s: Settings) -> None:
    """Name a critic that is asked for beside an estimator that does without one."""
    if s.flag(f"{CRITIC}.enable"):
        s.notes.append(f"{CRITIC}.enable: a critic beside this estimator is not simulated")


def of_critic(s: Settings) -> set[str]:
    """The names of the critic's settings."""
    return {name for name in s.values if name.startswith(f"{CRITIC}.")}


def _degrees(s: Settings) -> list[str]:
    """The critic's degrees that differ from the policy's; each is 1 where the command does not say it."""
    pairs = ((f"{CRITIC}.{degree}", f"{ACTOR}.{degree}") for degree in DEGREES)
    degrees = ((own, s.whole(own) or 1, s.whole(policy) or 1) for own, policy in pairs)
    s.taken |= {f"{CRITIC}.{degree}" for degree in DEGREES}
    return [f"{own}: {size} in verl, {policys} here" for own, size, policys in degrees if size != policys]


def _require_sizes(s: Settings, model: str) -> None:
    """Refuse a critic of another model than the policy's."""
    path: Any = s.take(PATH)
    policy = s.values.get("actor_rollout_ref.model.path")
    if path is None or path == policy:
        return
    named = named_model(s.file, s.place(PATH), str(path), s.notes)
    if load_model(named) != load_model(model):
        problem = f"found {show(path)}; a critic is simulated with the policy's sizes, {show(policy)}"
        raise InputError(f"{s.place(PATH)}: {problem}")


def _of_policy(key: str) -> str:
    """The policy's key that a critic's corresponds to."""
    return next(policy + key.removeprefix(own) for own, policy in SECTIONS.items() if key.startswith(own))
