"""Memory that captured CUDA graphs take: a pool of their own, which nothing outside of them can use.

A replay writes to the addresses of the capture, so what a graph allocates lies in a private pool that is never lent
(pytorch#51075; "Graph memory management" in torch's notes on CUDA). All graphs of a rank share one pool, since they run
in the order of their capture (Megatron: megatron/core/transformer/cuda_graphs.py, full_cuda_graph.py; Transformer
Engine: graph.py, `make_graphed_callables`). So a rank needs the sum of two peaks in place of the peak of the sum:

    peak = lasting + max over time of what graphs hold + max over time of what runs outside of them

`layers`: the pool holds the layers' saved activations and temporaries; embedding, head, loss and optimizer are outside.
`step`: it holds those of all forwards and backwards; the optimizer is outside.
Parts of layers (`cuda_graph_scope`): it holds what these keep (`Saved.graphed`); temporaries count as outside.

Static buffers besides: of layers the gradients of one layer's output and input (inputs are saved activations anyway,
the next graph uses buffers again: `_reuse_graph_input_output_buffers`, Transformer Engine 2.7); of a step its batch,
four numbers of 64 bits a token (`StaticBufferLoader`: tokens, labels, loss mask, positions).

Approximate: pools fragment by themselves, warm-up runs may leave segments behind, and the driver's own memory of each
graph's nodes is not counted, as it is not of torch's allocator. torchtitan's graphed Llama 3.1 70B took 153 GiB for 143
(pull request 2050), which is of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from sim.core.columns import Floats, Ints
from sim.core.program import Block, BlockKind
from sim.graph.build import ActionTasks
from sim.models.graphed_parts import gradient_buffers_bytes, graph_scope
from sim.models.source import source_of
from sim.programs.stages import Stage
from sim.results.memory import Levels, levels, overlap, peak_bytes
from sim.results.states import States

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

BATCH_BYTES = 4 * 8.0  # of a token: itself, its label, its weight in the loss, its place
NOTHING = States(0.0, 0.0, 0.0, 0.0)


def captured_kinds(scenario: Scenario) -> frozenset[BlockKind]:
    """The kinds of blocks that graphs hold; none of a captured program, whose states are known as they ran."""
    t = scenario.training
    if t is None or scenario.model.program is not None or t.cuda_graphs == "none":
        return frozenset()
    return frozenset({BlockKind.LAYER} if t.cuda_graphs == "layers" else BlockKind)


def static_bytes(scenario: Scenario) -> float:
    """Buffers that replays read from and write to, on one rank."""
    t, p = scenario.training, scenario.parallelism
    if t is None or not captured_kinds(scenario):
        return 0.0
    if _in_parts(scenario):
        return gradient_buffers_bytes(scenario)
    if t.cuda_graphs == "layers":
        return 2.0 * source_of(scenario).input_bytes(None)
    return BATCH_BYTES * t.micro_batch_size * t.seq_len / p.cp * scenario.micro_batches


def pooled_levels(
    scenario: Scenario,
    stages: Sequence[dict[int, Stage]],
    done: Sequence[ActionTasks],
    start_s: Floats,
    end_s: Floats,
    held: Sequence[States],
    fine: bool = False,
) -> Levels:
    """`levels` with captured graphs, if there are any: their pool is a buffer as far as it holds no activations.

    With graphs memory moves with whole actions, `fine` or not: their pool is one piece. A pair of a forward and a
    backward is captured layer by layer, and the forward's layers take what the backward's free in the same pool (core/
    pipeline_parallel/combined_1f1b.py of Megatron-Core 0.19; NVIDIA's scripts let the allocator use memory of other
    streams again while it captures, `graph_capture_record_stream_reuse`).
    """
    kinds = captured_kinds(scenario)
    if not kinds:
        return levels(stages, done, start_s, end_s, held, fine or any(overlap(x.listed.step) for x in done))
    own, others = _split(stages, kinds, _in_parts(scenario))
    outside = [replace(NOTHING, at_end=x.at_end) for x in held]
    pairs = any(overlap(x.listed.step) for x in done)
    inner = levels(own, done, start_s, end_s, [NOTHING] * len(held), pairs)
    outer = levels(others, done, start_s, end_s, outside, pairs)
    if pairs:  # whose blocks have moments of their own within an action
        inner, outer = _together(inner, outer)
    rows = np.diff(np.append(inner.first, len(inner.time_s)))
    pool = np.maximum.reduceat(inner.activations + inner.buffers, inner.first)
    gathered = np.array([x.gathered + static_bytes(scenario) for x in held])
    return Levels(
        held,
        outer.first,
        outer.time_s,
        inner.activations + outer.activations,
        np.repeat(pool + gathered, rows) - inner.activations + outer.buffers,
        outer.gradients,
    )


def _together(a: Levels, b: Levels) -> tuple[Levels, Levels]:
    """The two with rows at the same moments, class by class: at those of both."""
    ends = [np.append(x.first, len(x.time_s)) for x in (a, b)]
    ranges = [[slice(*pair) for pair in pairwise(end.tolist())] for end in ends]
    times = [np.union1d(a.time_s[mine], b.time_s[theirs]) for mine, theirs in zip(*ranges, strict=True)]
    first = np.cumsum([0, *map(len, times)])[:-1]
    found = []
    for x, its in zip((a, b), ranges, strict=True):
        row = [np.searchsorted(x.time_s[r], t, side="right") - 1 + r.start for r, t in zip(its, times, strict=True)]
        rows = np.concatenate(row)
        columns = {name: getattr(x, name)[rows] for name in ("activations", "buffers", "gradients")}
        found.append(replace(x, first=first, time_s=np.concatenate(times), **columns))
    return found[0], found[1]


def pooled_peak_bytes(scenario: Scenario, stages: dict[int, Stage], work: Ints, step: Ints, held: States) -> float:
    """`peak_bytes` with captured graphs, if there are any."""
    kinds = captured_kinds(scenario)
    if not kinds:
        return peak_bytes(stages, work, step, held, overlap(step))
    (own,), (others,) = _split([stages], kinds, _in_parts(scenario))
    outside = replace(held, gathered=held.gathered + static_bytes(scenario))
    pairs = overlap(step)
    return peak_bytes(own, work, step, NOTHING, pairs) + peak_bytes(others, work, step, outside, pairs)


def _split(
    stages: Sequence[dict[int, Stage]], kinds: frozenset[BlockKind], parts: bool
) -> tuple[list[dict[int, Stage]], list[dict[int, Stage]]]:
    """Stages as what graphs hold of them, and as the rest with all gradients; equal ones stay one object.

    The copies of gradients that ZeRO-2 and -3 reduce are made within the graphs of a whole step, else outside of them.
    """
    made: dict[Stage, tuple[Stage, Stage]] = {}
    for stage in (stage for mine in stages for stage in mine.values()):
        if stage not in made:
            ours = replace(stage.dp, fleeting_gradient_bytes=0.0, casts=None)
            theirs, none = stage.dp, {"parameter_bytes": 0.0, "gradient_bytes": 0.0}
            ours, theirs = (
                (ours, replace(theirs, **none)) if kinds >= set(BlockKind) else (replace(ours, **none), theirs)
            )
            own = tuple(_captured(b) if parts else _part(b, b.kind in kinds) for b in stage.blocks)
            others = tuple(_outside(b) if parts else _part(b, b.kind not in kinds) for b in stage.blocks)
            of = {"part_of": stage}
            made[stage] = replace(stage, blocks=own, dp=ours, **of), replace(stage, blocks=others, dp=theirs, **of)
    return tuple([{k: made[s][i] for k, s in mine.items()} for mine in stages] for i in (0, 1))  # type: ignore[return-value]


def _part(block: Block, here: bool) -> Block:
    """A block, without its activations and temporaries unless they are `here`."""
    if here:
        return block
    nothing = {"saved": (), "backward": (), "backward_moments": ()}
    return replace(block, **nothing, forward_peak_bytes=0.0, backward_peak_bytes=0.0, rebuilt_bytes=0.0)


def _captured(block: Block) -> Block:
    """A block with what graphs of its parts keep alone."""
    return replace(_part(block, False), saved=tuple(s for s in block.saved if s.graphed))


def _outside(block: Block) -> Block:
    return replace(block, saved=tuple(s for s in block.saved if not s.graphed))


def _in_parts(scenario: Scenario) -> bool:
    """Tell whether graphs hold parts of layers."""
    return bool(graph_scope(scenario))
