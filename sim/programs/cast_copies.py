"""The 16-bit copies of fp32 weights that `torch.autocast` makes, and how long they are there.

Each weight is cast at its first use in a forward. autograd keeps the copy for the input's gradient, so it is freed in
the backward behind its layer. Of layers that run again nothing is kept, but autocast's cache holds the copies of
weights that are trained until the forward ends (torch's aten/src/ATen/autocast_mode.cpp: `cached_cast`, `clear_cache`).
A layer that runs again casts its weights again, and they are freed with it. Embeddings are looked up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.core.program import Block, BlockKind
from sim.models.dims import dims
from sim.models.source import source_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class CastCopies(NamedTuple):
    """Hold the bytes `each` of a copy, whether `experts` have copies, whether layers cast `again` in the backward and
    are then `cached` to the forward's end, and elements of a matrix that embedding and output share (`tied`)."""

    each: float
    experts: bool
    again: bool
    cached: bool
    tied: int

    def of(self, block: Block, blocks: Sequence[Block]) -> float:
        """Return the bytes of a block's copies; `blocks`: of its stage."""
        if block.kind is BlockKind.EMBEDDING:
            return 0.0
        shares = block.kind is BlockKind.HEAD and any(b.kind is BlockKind.EMBEDDING for b in blocks)
        elements = block.held_params - block.few_bit_params + block.expert_params * self.experts + self.tied * shares
        return elements * self.each

    def kept(self, block: Block, blocks: Sequence[Block]) -> float:
        """Return those of a block's copies that stay from its forward to its backward."""
        return 0.0 if self.runs_again(block) else self.of(block, blocks)

    def runs_again(self, block: Block) -> bool:
        """Tell whether a block casts again in the backward."""
        return self.again and block.kind is BlockKind.LAYER


def cast_copies(scenario: Scenario, each: float) -> CastCopies | None:
    """Return the copies under autocast, of `each` bytes; None without it."""
    d, again = dims(scenario), scenario.for_training.recompute
    if not d.autocast:
        return None
    every_layer = again.mode == "full" and again.every is None and again.layers is None
    return CastCopies(each, not d.experts_in_fp32, every_layer, d.lora is None, source_of(scenario).tied_elements())
