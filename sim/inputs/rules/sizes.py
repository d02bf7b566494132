"""What the rules of layouts read, and what they return."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sim.inputs.model_config import ModelConfig
from sim.inputs.training_config import Training
from sim.inputs.yaml_input import KeyPath
from sim.schedules import ScheduleForm

Problem = tuple[KeyPath, str]


class Sizes(NamedTuple):
    """All that the rules read. `micro_batch_size` and `recompute` (a mode) are a layout's own, not `training`'s.

    `training` is None for serving, `form` that of one stage where pp is 1, `layers_per_stage` None where layers are
    dealt out evenly.
    """

    model: ModelConfig
    training: Training | None
    micro_batch_size: int
    recompute: str
    tp: int
    sp: bool
    cp: int
    pp: int
    dp: int
    ep: int
    expert_tp: int
    ep_overlap: bool
    shard_size: int
    cp_method: str
    cp_split: str
    form: ScheduleForm
    virtual_stages: int
    layers_per_stage: tuple[int, ...] | Literal["balanced"] | None
    mtp_stage: int | None = None
    redundant_experts: int = 0
    cp_method_by_layer: tuple[str, ...] | None = None
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
