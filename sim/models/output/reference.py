"""The frozen reference of a loss over answers, and the trained model where it reads further ones: their forwards on one
rank, and what these hold while they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Block, BlockKind
from sim.models.activation_memory.recompute import as_block, keep_all
from sim.models.dims import Shard, dims, layer_dims
from sim.models.embedding import table_elements
from sim.models.layer import layer_parts
from sim.models.operators import Operator
from sim.models.output.head import reference_parts
from sim.models.source import source_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def reference_scenario(scenario: Scenario) -> Scenario:
    """The reference's own forward: the policy's model and layout, no adapters, nothing trained."""
    t = scenario.for_training
    lora = None if t.lora is None else t.lora.model_copy(update={"targets": (), "dropout": 0.0})
    return scenario.unchecked_copy(update={"training": t.model_copy(update={"lora": lora, "preference": None})})


def reading_scenario(scenario: Scenario) -> Scenario:
    """The trained model's forward over answers that it does not learn from, its adapters among it."""
    t = scenario.for_training
    return scenario.unchecked_copy(update={"training": t.model_copy(update={"preference": None})})


def without_gradients(scenario: Scenario, blocks: tuple[Block, ...], shard: Shard) -> tuple[Block, ...]:
    """The blocks of `reference_scenario` as they run under `torch.no_grad`, the head without what a trainer does with
    a loss: each operator's results live until the next has read them, and are among its temporaries."""
    d, source = dims(scenario), source_of(scenario)
    out, held, number = list[Block](), dict[tuple[object, ...], float](), 0
    for b in blocks:
        if b.kind is BlockKind.LAYER:
            kind = source.layer_kind(number)
            if kind not in held:
                parts = layer_parts(scenario, layer_dims(scenario, number), number, shard)
                held[kind] = d.stream_bytes + _held(parts)
            out.append(replace(b, forward_peak_bytes=held[kind]))
            number += 1
        elif b.kind is BlockKind.HEAD:
            parts = reference_parts(scenario, d)
            out.append(replace(as_block("head", b.kind, "", parts, keep_all(parts)), forward_peak_bytes=_held(parts)))
        else:
            out.append(b)
    return tuple(out)


def _held(parts: Iterable[Operator]) -> float:
    return max(p.forward_bytes + sum(s.bytes for s in p.saved) for p in parts)


def with_casts(scenario: Scenario, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """A reference's blocks with the 16-bit copies that autocast makes of fp32 weights. They are there until its forward
    ends, which autocast is left with: torch's cache holds those of weights that might need a gradient, and TRL loads
    the reference so (aten/src/ATen/autocast_mode.cpp: `cached_cast`; accelerate/accelerator.py: `prepare_model` with
    `evaluation_mode`)."""
    d = dims(scenario)
    if not d.autocast:
        return blocks
    out, copies = list[Block](), 0.0
    for b in blocks:
        tied = table_elements(scenario) if b.kind is BlockKind.HEAD and scenario.model.tied_embeddings else 0
        copies += d.act_bytes * (0 if b.kind is BlockKind.EMBEDDING else b.held_params + tied)
        out.append(replace(b, forward_peak_bytes=b.forward_peak_bytes + copies))
    return tuple(out)
