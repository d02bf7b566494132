"""`layers_per_stage: balanced`: layers dealt out to pipeline stages by what the stages compute.

Cost of a piece of the model: FLOPs of its matmuls and attention, forward and backward, without recomputation. The
embedding only looks up, so it costs nothing; the output layer and multi-token prediction stand on the last stage beside
its layers. With `mtp_stage` the prediction modules, without their outputs, stand on that stage instead, and no layer
behind it. All layers count as their mean: kinds that alternate (windows, experts) even out within a stage.

Layers are dealt one by one to the stage that costs least so far, which leaves the slowest stage as fast as whole layers
allow. Of stages that cost the same the earlier one is taken, but the first stage comes last: it holds the embedding and
the most micro-batches.

Others do alike with the ends counted as whole layers: Llama 3 takes one layer from the first and the last stage
(arXiv 2407.21783, section 3.3.2); Megatron-LM's `--account-for-embedding-in-pipeline-split` and
`--account-for-loss-in-pipeline-split` count each as a layer, and so does torchtitan's
`pipeline_parallel_first_stage_less_layers` and `…_last_stage_less_layers`.

>>> deal(32, 8, last=2.1)
(4, 5, 5, 4, 4, 4, 4, 2)
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from sim.core.operator_kinds import MODEL_FLOPS_KINDS
from sim.core.program import Block, Compute
from sim.inputs.parallelism import split_layers
from sim.models.dims import Shard
from sim.models.source import source_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def with_balanced_stages(scenario: Scenario) -> Scenario:
    """The scenario with the layers of each stage as numbers, where it says `balanced`; else itself."""
    p = scenario.parallelism
    if p.layers_per_stage != "balanced":
        return scenario
    last = cost_of_last(scenario, p.mtp_apart is not None)
    return _with_layers(scenario, deal(scenario.model.layers, p.stages, last, p.mtp_stage))


def cost_of_last(scenario: Scenario, mtp_apart: bool = False) -> float:
    """Return what follows the layers, on the stage of the prediction modules where they are apart from the output; in
    FLOPs of a mean layer."""
    layers, p = scenario.model.layers, scenario.parallelism
    whole = scenario.unchecked_copy(update={"parallelism": p.model_copy(update={"mtp_stage": None})})
    source = source_of(_with_layers(whole, split_layers(layers, p.stages)))
    kinds = [source.layer_kind(number) for number in range(layers)]
    cost = {kind: _flops(source.layer(kinds.index(kind), Shard())) for kind in dict.fromkeys(kinds)}
    head, *modules = map(_flops, source.last(Shard()))
    flops = sum(modules) - head * len(modules) if mtp_apart else sum((head, *modules))
    return flops * layers / sum(cost[kind] for kind in kinds)


def deal(layers: int, stages: int, last: float, mtp_stage: int | None = None) -> tuple[int, ...]:
    """Layers of each stage where the last costs `last` layers before it has any; none behind `mtp_stage`."""
    if mtp_stage is not None and mtp_stage < stages - 1:
        return (*deal(layers, mtp_stage + 1, last), *[0] * (stages - 1 - mtp_stage))
    counts = [0] * stages
    heap = [(last if i == stages - 1 else 0.0, i == 0, i) for i in range(stages)]
    heapq.heapify(heap)
    for _ in range(layers):
        cost, first, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (cost + 1, first, i))
    return tuple(counts)


def _with_layers(scenario: Scenario, layers: tuple[int, ...]) -> Scenario:
    parallelism = scenario.parallelism.model_copy(update={"layers_per_stage": layers})
    return scenario.unchecked_copy(update={"parallelism": parallelism})


def _flops(block: Block) -> float:
    items = (*block.forward, *block.backward)
    return sum(i.flops for i in items if isinstance(i, Compute) and i.kind in MODEL_FLOPS_KINDS)
