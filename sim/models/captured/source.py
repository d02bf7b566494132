"""A captured program as the source of a scenario's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import dtype_bytes
from sim.core.program import Block, Program
from sim.models.captured.model import captured_model, with_accumulation
from sim.models.dims import Shard
from sim.models.optimizers.step import EndOfStep

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.models.optimizers.loops import Loops
    from sim.models.optimizers.muon import Dealt


class Captured:
    """A model as `calibrate.capture` recorded it."""

    def __init__(self, scenario: Scenario, path: str) -> None:
        self.scenario, self.model = scenario, captured_model(path)

    def first(self) -> Block:
        """Return what runs before the modules that repeat."""
        return self._block(0)

    def layer(self, number: int, shard: Shard) -> Block:
        """Return the repeated module of this number."""
        return self._block(number + 1)

    def last(self, shard: Shard) -> tuple[Block, ...]:
        """Return what runs after the modules that repeat."""
        return (self._block(len(self.model.pieces) - 1),)

    def apart(self, shard: Shard) -> tuple[Block, ...]:
        """Nothing: a program has no prediction modules."""
        return ()

    def _block(self, piece: int) -> Block:
        s = self.scenario
        p = s.parallelism
        whole = p.zero < 2 or s.sums_unsharded or p.reduces_rows
        return with_accumulation(self.model.pieces[piece], s.micro_batches if whole else 1)

    def layer_kind(self, number: int) -> tuple[object, ...]:
        """Return a number that equal modules share."""
        return (self.model.kinds[number],)

    def input_bytes(self, layer: int | None) -> float:
        """Return the bytes that a stage gets that begins with the module `layer`; None: the least of all."""
        return min(self.model.input_bytes) if layer is None else self.model.input_bytes[layer]

    def parameter_bytes(self) -> float:
        """Return the bytes of a parameter as the program keeps it: casts are operators of the program."""
        return dtype_bytes(self.scenario.for_training.param_dtype)

    def tied_elements(self) -> int:
        """Return the number of parameters that input and output both read."""
        return self.model.tied_elements

    def copied_elements(self) -> int:
        """Return the number of parameters that both ends of a pipeline hold: the tied ones."""
        return self.model.tied_elements

    def before_forward(self) -> Program:
        """Nothing: what was captured begins with the forward."""
        return ()

    def step_items(self, n_params: int, dealt: Dealt, loops: Loops) -> EndOfStep:
        """Clipping and optimizer as recorded, cut to the rank's share of the parameters."""
        return self.model.step_items(n_params)

    def flops_per_token(self, causal_half: bool) -> float:
        """Matmuls and attention of forward and backward; what is recomputed is not counted."""
        t = self.scenario.for_training
        return self.model.flops[0 if causal_half else 1] / (t.micro_batch_size * t.seq_len)

    def stranded_bytes(self) -> float:
        """Nothing: of the allocator's segments a program says nothing."""
        return 0.0

    def unknown(self) -> dict[str, int]:
        """Return the launches of operators that are priced by their bytes alone."""
        return self.model.unknown
