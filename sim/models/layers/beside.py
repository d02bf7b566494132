"""Attention and a state-space layer on the same input, their results added (Falcon-H1, arXiv 2507.22448, section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.program import ModelPart, Program
from sim.models.dims import Dims, Shard
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.matrix import Matrix
from sim.models.layers.state_space import StateSpace
from sim.models.operators import F, I, Operator, accumulate, memory_op, of_part
from sim.models.serving.operators import ServingDims, served_sum

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class Beside(Struct, frozen=True):
    """Both branches of a layer. Each has its own sum over tp, as row-parallel layers of serving engines have."""

    part: ClassVar = ModelPart.ATTENTION

    attention: GroupedQueryAttention
    state_space: StateSpace

    @property
    def _both(self) -> tuple[GroupedQueryAttention, StateSpace]:
        return self.attention, self.state_space

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Projections of both on one of `tp` ranks."""
        return tuple(matrix for branch in self._both for matrix in branch.matrices(tp))

    def other_parameters(self) -> int:
        """Return the parameters of both branches that are not in their matrices."""
        return sum(branch.other_parameters() for branch in self._both)

    def key(self, seq_len: int) -> str:
        """Return what of a block's key the model's own sizes do not say."""
        return "".join(branch.key(seq_len) for branch in self._both)

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices, forward and backward."""
        return sum(branch.core_flops(seq_len, causal_half) for branch in self._both)

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """One branch after the other, and the sum of both; backward their input's gradients are added."""
        elements = d.rows * d.hidden
        add = memory_op("branches_sum", F, "elementwise", elements, 3 * d.act_bytes * elements, d.act)
        together = Operator("branches_sum", (add,), forward_bytes=elements * d.act_bytes)
        gradients = Operator("branches_grad_sum", (), (accumulate(d, "branches_grad_sum", elements, phase=I),))
        first, *rest = of_part(StateSpace.part, self.state_space.train(scenario, d, shard))
        own = d.framework.runs_model_code  # a factor makes each branch an input of its own
        shared = first if own else replace(first, saved=())  # its input is that of the other branch, which keeps it
        factors = (self._factors(d),) if own else ()
        return (gradients, *self.attention.train(scenario, d, shard), shared, *rest, *factors, together)

    def _factors(self, d: Dims) -> Operator:
        """Factors on both branches' inputs and results and on what Mamba's projection makes, a kernel each, forward and
        backward (transformers/models/falcon_h1/modeling_falcon_h1.py: FalconH1DecoderLayer, FalconH1Mixer)."""
        numbers = 4 * d.rows * d.hidden + d.tokens * self.state_space.matrices(d.tp)[0].width
        run = [
            memory_op(name, phase, "elementwise", numbers, 2 * d.act_bytes * numbers, d.act, 5)
            for name, phase in (("factors", F), ("factors_backward", I))
        ]
        return Operator("factors", (run[0],), (run[1],))

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Cache and state of a sequence of `length` tokens on one rank."""
        return sum(branch.sequence_bytes(d, length) for branch in self._both)

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token between the projections, on one rank."""
        return sum(branch.expanded_width(tp) for branch in self._both)

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Return what depends on an iteration's number of tokens alone, up to the sum over tp."""
        n = tokens * d.model.hidden
        add = memory_op("branches_sum", F, "elementwise", n, 3 * n * d.act_bytes, d.act)
        first, second = (branch.serve(d, tokens) for branch in self._both)
        return (*first, *served_sum(d, "attention_branch", tokens), *second, add)

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """The cores of both branches for chunks of prompts."""
        return tuple(item for branch in self._both for item in branch.prefill(d, batch, q_len, kv_len))

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """Single tokens, or drafted ones, in both."""
        return tuple(item for branch in self._both for item in branch.decode(d, batch, kv_len, queries))
