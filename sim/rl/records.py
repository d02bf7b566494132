"""The result of a step of reinforcement learning as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from sim.inputs.scenario import Scenario
from sim.results.fit import Fit
from sim.results.records import Engine, Provenance, Record

Pool = Literal["training", "generation", "both"]


class PhaseKind(StrEnum):
    """The work of a phase."""

    __hash__ = str.__hash__
    GENERATION = "GENERATE_ANSWERS"
    REWARD = "REWARD"
    LOGPROBS = "LOGPROBS"
    REFERENCE = "REFERENCE"
    VALUES = "VALUES"
    CRITIC = "CRITIC_UPDATE"
    TRAINING = "UPDATE"
    WEIGHTS = "WEIGHTS"
    HOST_COPY = "HOST_COPY"


class Phase(Record, frozen=True):
    """A part of the step. `pool`: whose GPUs it keeps; `interval_s`: 90 %."""

    name: str
    kind: str  # see `PhaseKind`
    pool: Pool
    seconds: float
    interval_s: tuple[float, float]
    start_s: float = 0.0


class WeightTransfer(Record, frozen=True):
    """New weights for the engine: `bytes` of the whole model, gathered over `gathered_over` ranks. `load_s`: each rank
    of the engine copies its piece."""

    how: str
    bytes: float
    gathered_over: int
    gather_s: float
    broadcast_s: float
    load_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole transfer: its gather, broadcast and load follow each other."""
        return self.gather_s + self.broadcast_s + self.load_s


class GenerationResult(Record, frozen=True, kw_only=True):
    """The answers that the engine wrote. `tail_s`: seconds at the end in which fewer than a tenth of the answers are
    under way; `busy_share`: of its GPUs, while the last answer is not finished."""

    duration_s: float
    tail_s: float
    busy_share: float
    replicas: int
    answers: int
    prompt_tokens: int
    output_tokens: int
    longest_output: int
    output_tokens_per_s_per_gpu: float
    prefix_hit_rate: float
    running_max: int
    preemptions: int


class Trained(Record, frozen=True, kw_only=True):
    """The policy's updates, taken to be equal. `filled`: tokens of prompts and answers ÷ all tokens, with padding."""

    update_s: float
    updates: int
    micro_batches: int
    micro_batch_size: int
    seq_len: int
    filled: float
    mfu: float
    bubble_fraction: float


class PoolUse(Record, frozen=True, kw_only=True):
    """GPUs that belong together: `colocated`, or `training` and `generation`. `busy_s`: of the step, the mean GPU;
    `peak_by_turn`: bytes on the fullest GPU in each turn, the largest of which is the peak; `memory_limit_bytes`: what
    `peak_reserved_bytes` may be to fit."""

    name: str
    gpus: int
    busy_s: float
    idle_share: float
    peak_memory_bytes: float
    peak_reserved_bytes: float
    peak_by_turn: Mapping[str, float]
    memory_limit_bytes: float
    fits_in_memory: bool
    fit: Fit


class RlResult(Record, frozen=True, kw_only=True):
    """A simulated step of reinforcement learning: format sim-result/1. Tokens are those of prompts and answers."""

    format: str = "sim-result/1"
    scenario: Scenario
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    tokens: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    answers_per_s: float
    critical_path: Mapping[str, float]  # seconds by phase
    phases: tuple[Phase, ...]
    generation: GenerationResult
    training: Trained
    weight_transfer: WeightTransfer
    pools: tuple[PoolUse, ...]
    peak_memory_bytes: float
    peak_reserved_bytes: float
    fits_in_memory: bool
    provenance: Provenance
    warnings: tuple[str, ...]
    engine: Engine

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the phases that trainers report, under keys of tables of measurements."""
        keys = {
            "generation_s": (PhaseKind.GENERATION,),
            "reward_s": (PhaseKind.REWARD,),
            "log_probabilities_s": (PhaseKind.LOGPROBS, PhaseKind.REFERENCE),
            "values_s": (PhaseKind.VALUES,),
            "critic_training_s": (PhaseKind.CRITIC,),
            "training_s": (PhaseKind.TRAINING,),
            "weight_transfer_s": (PhaseKind.WEIGHTS,),
        }
        return {key: sum([p.seconds for p in self.phases if p.kind in kinds], 0.0) for key, kinds in keys.items()}
