"""The `rl` section of a scenario: one step of reinforcement learning of a language model (GRPO).

`training` and `parallelism` describe how the policy trains, `rl` what it trains on and who writes that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from sim.core.dtypes import Precision
from sim.core.json_values import is_number
from sim.core.quantization import Quantization
from sim.inputs.input_source import UserInput
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import MAX_RANKS
from sim.inputs.serving_keys import Sampling
from sim.inputs.workloads import MAX_TOKENS, EngineName, KvCache

MAX_ANSWERS = 1_000_000  # of a step
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Lengths(UserInput):
    """Lengths in tokens, drawn from a log-normal distribution of this mean; `sigma` (of the logarithm) 0: all equal.

    `max`: longer ones are cut there, as an engine's limit on new tokens does, which lowers the mean. Null: for answers
    what the prompt leaves of seq_len; for prompts half of seq_len, or all of it but a token where sigma is 0.
    """

    mean: float = Field(ge=1, le=MAX_TOKENS)
    sigma: float = Field(default=0.0, ge=0, le=5)
    max: Tokens | None = Field(
        default=None, description="null: answers: what the prompt leaves of seq_len; prompts: half of it"
    )


def _lengths(value: Any) -> Any:
    if not (is_number(value) or isinstance(value, dict | Lengths)):
        raise ValueError("must be a number of tokens, or a mapping with mean, sigma and max")
    return {"mean": value} if is_number(value) else value


def _lengths_schema() -> WithJsonSchema:
    fields = {
        "mean": {"type": "number", "minimum": 1},
        "sigma": {"type": ["number", "null"], "minimum": 0, "maximum": 5, "default": 0.0},
        "max": {"type": ["integer", "null"], "minimum": 1, "default": None},
    }
    mapping = {"type": "object", "properties": fields, "required": ["mean"], "additionalProperties": False}
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1}, mapping]})


TokenLengths = Annotated[Lengths, BeforeValidator(_lengths), _lengths_schema()]


class RewardModel(UserInput):
    """A model that reads every answer and scores it, on the training GPUs, split over `tp` of them."""

    model: ModelConfig
    tp: int = Field(default=1, ge=1, le=MAX_RANKS)


def _reward(value: Any) -> Any:
    if not isinstance(value, (str, dict, RewardModel)) or (isinstance(value, str) and value != "rule"):
        raise ValueError("must be rule, or a mapping with model and tp")
    return value


def _reward_form(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<mapping>"


Reward = Annotated[
    Annotated[
        Annotated[Literal["rule"], Tag("<name>")] | Annotated[RewardModel, Tag("<mapping>")],
        Discriminator(_reward_form),
    ],
    BeforeValidator(_reward),
]


class Generation(UserInput):
    """The engine that writes the answers: `replicas` of the policy, each on tp·pp GPUs.

    Keys that are null are the engine's own defaults (`sim.variants.engines`); `replicas` null: as many as the training
    ranks make.
    """

    replicas: int | None = Field(default=None, ge=1, le=100_000, description="null: training ranks / (tp·pp)")
    tp: int = Field(default=1, ge=1, le=100_000)
    pp: int = Field(default=1, ge=1, le=100_000)
    ep: int = Field(default=1, ge=1, le=100_000)
    expert_tp: int = Field(default=1, ge=1, le=100_000)
    engine: EngineName = "vllm-v1"
    precision: Precision | None = Field(default=None, description="null: the 16-bit dtype of training.precision")
    max_running_requests: int | None = Field(default=None, ge=1, le=10_000_000, description="null: the engine's")
    max_batch_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000, description="null: the engine's")
    kv_cache: KvCache | None = Field(default=None, description="null: the engine's")
    prefix_cache: Literal["none", "gpu"] | None = Field(
        default=None,
        description="gpu: the generations of a prompt share its KV cache; null: gpu where the cache can be shared",
    )
    quantization: Quantization = "none"
    sampling: Sampling | None = Field(
        default=None, description="null: drawn with a temperature of 1, or what the engine is simulated with"
    )

    @property
    def ranks(self) -> int:
        """GPUs of all replicas, once `replicas` is known."""
        return (self.replicas or 1) * self.tp * self.pp


class Rl(UserInput):
    """One step of GRPO (Shao et al. 2024, arXiv 2402.03300), or with a `critic` of PPO: each prompt's
    `generations_per_prompt` answers are written by the policy, scored, and trained on.

    `colocated`: the engine and the trainer take turns on the same GPUs, or each has a pool of its own. `steps_off`: 1
    generates the next step's answers while this step's are trained on, by weights one update old.
    """

    prompts_per_step: int = Field(ge=1, le=MAX_ANSWERS)
    generations_per_prompt: int = Field(ge=1, le=MAX_ANSWERS)
    prompt_len: TokenLengths
    output_len: TokenLengths
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    colocated: bool = True
    steps_off: Literal[0, 1] = 0
    reference: Literal["none", "host", "gpu"] = Field(
        default="host", description="the frozen policy of the KL term; host: kept in host memory, swapped in and out"
    )
    epochs: int = Field(default=1, ge=1, le=1000, description="times that a step's answers are trained on")
    log_probs: Literal["trainer", "engine"] = Field(
        default="trainer",
        description="whose log-probabilities of the answers the loss starts from; engine: the trainer makes no forward",
    )
    critic: Literal["none", "host", "gpu"] = Field(
        default="none", description="PPO's value model, as large as the policy; host: its states come for its turns"
    )
    reward: Reward = Field(default="rule", description="rule: computed by the host; or a model that reads every answer")
    reward_s: float = Field(default=0.0, ge=0, le=1e9, description="seconds that a rule takes after the last answer")
    sequences: Literal["packed", "mean", "padded"] = Field(
        default="packed", description="how answers of unlike lengths become micro-batches"
    )
    transfer: Literal["ipc", "broadcast"] = Field(
        default_factory=lambda data: "ipc" if data.get("colocated", True) else "broadcast",
        description="how new weights reach the engine; null: ipc where colocated, else broadcast",
    )
    sleep_level: Literal[0, 1, 2] = Field(
        default=1, description="colocated: what the engine frees while the policy trains, by vLLM's sleep levels"
    )
    offload_training: bool = Field(
        default=True, description="colocated: parameters and optimizer states lie in host memory while the engine runs"
    )
    generation: Generation = Generation.model_construct()

    @property
    def answers(self) -> int:
        """Sequences of a step."""
        return self.prompts_per_step * self.generations_per_prompt
