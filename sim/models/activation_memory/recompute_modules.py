"""Selective recomputation of parts of a layer by name (Megatron-Core's `--recompute-modules`).

A checkpoint keeps its part's input and runs the part again (transformer/transformer_layer.py, moe_layer.py:
`tensor_parallel.checkpoint`). Parts whose output is large and quickly made keep their own inputs and lose the output,
which the next operator would keep (tensor_parallel/random.py: `CheckpointWithoutOutput`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Program, Saved, TensorRole
from sim.inputs.training_config import LOSES_OUTPUT, RecomputeModule
from sim.models.operators import Operator, forward_of, saved_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

CORE: tuple[RecomputeModule, ...] = ("core_attn",)


def runs_again(scenario: Scenario, module: RecomputeModule) -> bool:
    """Tell whether a part of that name runs again by itself."""
    t = scenario.training
    return t is not None and t.recompute.mode == "selective" and module in t.recompute.modules


def inside(module: RecomputeModule, parts: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators as a part of that name, beside those that they are part of already."""
    return tuple(replace(p, within=(*p.within, module)) for p in parts)


def module_kept(parts: Sequence[Operator], modules: Sequence[RecomputeModule]) -> tuple[Program, tuple[Saved, ...]]:
    """Return what runs again of a layer's parts, in order, and what stays of all it would keep."""
    checkpoints = set(modules) - set(LOSES_OUTPUT)
    again = [p for p in parts if _in(p, modules)]
    lost = _lost_outputs(parts, [m for m in modules if m in LOSES_OUTPUT])
    plain: list[Saved] = []
    inputs: list[Saved] = []
    entered: set[str] = set()
    for i, part in enumerate(parts):
        saved = tuple(s for s in saved_of([part]) if not (i in lost and s.role is TensorRole.INPUT))
        held = [m for m in _names(part) if m in checkpoints]
        if not held:
            plain += saved
        elif part.core or any(m not in entered for m in held):
            inputs += [s for s in saved if s.role is TensorRole.INPUT]
        entered.update(held)
    return forward_of(again), (*plain, *inputs)


def _names(part: Operator) -> tuple[str, ...]:
    return (*part.within, *(CORE if part.core else ()))


def _in(part: Operator, modules: Sequence[RecomputeModule]) -> bool:
    return any(m in modules for m in _names(part))


def _goes_on(parts: Sequence[Operator], module: RecomputeModule) -> bool:
    """Tell whether more of the module comes before its consumer: the next operator, or the core where more of the
    module stands in front of it (MLA's up-projections of queries and of keys and values)."""
    ahead = list(takewhile(lambda p: not p.core, parts))
    before_core = len(ahead) < len(parts) and any(module in p.within for p in ahead)
    return module in parts[0].within or before_core


def _lost_outputs(parts: Sequence[Operator], modules: Sequence[RecomputeModule]) -> set[int]:
    """Places of the operators whose input is the output of such a part: the first behind each that keeps one."""
    lost: set[int] = set()
    for module in modules:
        for i in range(1, len(parts)):
            if module in parts[i - 1].within and not _goes_on(parts[i:], module):
                keeps = [j for j in range(i, len(parts)) if any(s.role is TensorRole.INPUT for s in parts[j].saved)]
                lost.update(keeps[:1])
    return lost
