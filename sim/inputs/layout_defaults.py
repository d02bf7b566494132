"""Keys of `parallelism` that a scenario leaves out and that follow from its model, framework or precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.core.dtypes import sixteen_bit
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism, overlaps_messages, split_layers
from sim.inputs.training_config import Training
from sim.inputs.zero_keys import zero_keys
from sim.variants.frameworks.records import framework_of

if TYPE_CHECKING:
    from sim.inputs.workloads import Inference

IN_A_ROW = "1f1b"  # a schedule whose stages are one a rank, in the ranks' order


def with_defaults(written: Parallelism, model: ModelConfig, workload: Training | Inference | None) -> Parallelism:
    """Return the section with these keys filled in; a model that is not cut has one stage, whatever is written, and
    engines that serve give a rank layers in a row, whatever the schedule."""
    serves = workload is not None and not isinstance(workload, Training)
    one: dict[str, Any] = {"virtual_stages": 1} if serves or written.pp == 1 else {}
    if serves:
        one |= {"schedule": IN_A_ROW, "p2p_overlap": overlaps_messages(IN_A_ROW)}
    one = {key: value for key, value in one.items() if getattr(written, key) != value}
    p = written.model_copy(update=one) if one else written
    changes: dict[str, Any] = {}
    if "layers_per_stage" not in p.model_fields_set:
        changes["layers_per_stage"] = split_layers(model.layers, p.stages, p.mtp_stage)
    if p.ep_dispatch_dtype is None and isinstance(workload, Training):
        changes["ep_dispatch_dtype"] = sixteen_bit(workload.precision)
    if p.accumulate_in_a_row is None:
        own = isinstance(workload, Training) and framework_of(workload).accumulates_in_a_row
        changes["accumulate_in_a_row"] = own
    if isinstance(workload, Training):
        if "p2p_scatter" not in p.model_fields_set:
            changes["p2p_scatter"] = framework_of(workload).sends_pieces
        if p.ep_dispatcher is None:
            limited = model.moe is not None and model.moe.max_nodes_per_token is not None
            changes["ep_dispatcher"] = "deepep" if limited else "all_to_all"
        changes |= zero_keys(workload, p, p.zero, p.dp, p.model_fields_set)
    return p.model_copy(update=changes)
