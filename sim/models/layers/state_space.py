"""Layers that carry a state along the sequence instead of keys and values: Mamba 2, delta rules, lightning attention.

Input projection, a short causal convolution with SiLU, the scan by chunks (`sim.models.layers.scans`), a gated RMS
norm, output projection: Mamba2Mixer of Transformers and `mamba_ssm/modules/mamba2.py`; Qwen3NextGatedDeltaNet. In
training the scan is one autograd function that keeps the projected input and its own output, and computes the rest
again (`MambaSplitConv1dScanCombinedFn`); the output projection stands apart and keeps its input, as in Megatron-Core,
whose own kernels around the scan are in `sim.models.layers.state_kernels`. Those of Transformers' modules, which give
that function their output projection, are in `sim.models.layers.state_modules`.

Serving keeps of a sequence, however long it is, the last `conv_kernel` − 1 inputs of the convolution and one state of
N·P numbers a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, ModelPart, Phase, Program, Saved
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.layers.matrix import Matrix
from sim.models.layers.scans import Scan
from sim.models.layers.state_kernels import AROUND, Around, Sizes, gated_norm
from sim.models.layers.state_modules import MODULES
from sim.models.linear import linear
from sim.models.operators import F, I, Operator, W, memory_op
from sim.models.serving.operators import ServingDims, served_linear

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class _Run(Struct, frozen=True):
    """Hold the sizes of what one rank computes at once: sequences of `seq` tokens, their numbers' bytes and dtype."""

    batch: int
    seq: int
    tp: int
    size: float
    dtype: str

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


class StateSpace(Struct, frozen=True):
    """Sizes of the whole model. `head_dim` P, `state` N, `chunk` Q of `sim.models.layers.scans`; `groups` of heads
    share B and C (key and query heads of the delta rule). `bias`: of both projections. `state_dtype` None: that of
    activations."""

    part: ClassVar = ModelPart.STATE_SPACE

    hidden: int
    scan: Scan
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_kernel: int
    chunk: int
    conv_bias: bool
    bias: bool
    gated_norm: bool
    state_dtype: str | None

    def split(self, tp: int) -> tuple[int, int]:
        """Heads and groups of one rank; groups are copied where tp exceeds them."""
        return ceil_div(self.heads, tp), max(1, self.groups // tp)

    def inner(self, tp: int = 1) -> int:
        """Width of the scan's input and output."""
        return self.split(tp)[0] * self.head_dim

    def convolved(self, tp: int = 1) -> int:
        """Width of the convolution: x, B and C."""
        return self.inner(tp) + 2 * self.split(tp)[1] * self.state

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Projections on one of `tp` ranks."""
        inner, heads = self.inner(tp), self.split(tp)[0]
        width = self.convolved(tp) + self.scan.gates * heads
        out = Matrix("state_out", inner, (self.hidden,), "row", self.bias)
        if self.scan.whole_gates:
            width += heads * self.state
        if self.scan.whole_gates or not self.scan.channel_gates:
            return (Matrix("state_in", self.hidden, (width + inner,), "column", self.bias), out)
        return (
            Matrix("state_in", self.hidden, (width,), "column", self.bias),
            Matrix("gates_down", self.hidden, (2 * self.head_dim,), "plain"),
            Matrix("decays_up", self.head_dim, (heads * self.state,), "column"),
            Matrix("gate_up", self.head_dim, (inner,), "column"),
            out,
        )

    def other_parameters(self, tp: int = 1) -> int:
        """Convolution, learned numbers of each head, gated norm."""
        taps = self.convolved(tp) * (self.conv_kernel + self.conv_bias)
        taps += self.split(tp)[0] * self.state if self.scan.channel_gates else 0  # a step of each channel
        norm = self.head_dim if self.scan.norm_of_head else self.inner(tp)
        return taps + self.scan.per_head * self.split(tp)[0] + (norm if self.gated_norm else 0)

    def key(self, seq_len: int) -> str:
        """All sizes, which stand beside those of the model's attention."""
        return f" {self!r}"

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices: the scan's matmuls forward, and twice as much backward."""
        return 3.0 * self.scan.flops_per_token(self._sizes(), self.heads, self.groups)

    def _sizes(self) -> dict[str, int]:
        return {"Q": self.chunk, "N": self.state, "P": self.head_dim}

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Input projection, convolution, scan, gated norm, output projection."""
        first, *low, last = self.matrices(d.tp)
        gates = [m.linear(d.rows if m.split == "plain" else d.tokens, i == 1) for i, m in enumerate(low)]
        again = self.scan.projects and d.framework.runs_model_code
        return (
            linear(d, first.linear(d.tokens)),
            *(linear(d, gate) for gate in gates),
            self._mixing(d),
            linear(d, last.linear(d.tokens, save_input=not again)),
        )

    def _mixing(self, d: Dims) -> Operator:
        """Everything between the projections."""
        at = _Run(d.batch, d.seq, d.tp, d.act_bytes, d.act)
        inner, convolved = at.tokens * self.inner(d.tp) * at.size, at.tokens * self.convolved(d.tp) * at.size
        states, around = self._moved("S", at), self._around(d, at)
        backward = (
            *around.after_back,
            *(() if self.scan.keeps_convolved else (self._convolution(at, I, "convolution_again", 2),)),
            self._decays(at, I, "decays_again"),
            *self._products(at, I),
            self._decays(at, I, "decays_backward"),
            *around.between_back,
            self._convolution(at, I, "convolution_backward", 3),
            self._convolution(at, W, "convolution_wgrad", 2),
            *around.before_back,
        )
        first, *rest = self._mixed(at)
        return Operator(
            "state_space",
            (*around.before, first, *around.between, *rest, *around.after),
            backward,
            around.kept or (*self._saved(d, at), *around.saved),
            params=self.other_parameters(d.tp),
            forward_bytes=convolved + inner + states,
            backward_bytes=2 * convolved + 3 * inner + 2 * states,
        )

    def _around(self, d: Dims, at: _Run) -> Around:
        """What the framework runs around the convolution and the scan."""
        sizes = self._sizes_of(at)
        if d.framework.runs_model_code:
            return MODULES[self.scan.modules](sizes)
        return AROUND[self.scan.around if d.framework.copies_around_scans and self.gated_norm else ""](sizes)

    def _sizes_of(self, at: _Run) -> Sizes:
        heads, groups = self.split(at.tp)
        widths = (self._projected(at.tp), self.convolved(at.tp), self.inner(at.tp))
        vectors = (groups * self.state, heads * self.state)
        low_rank = self.head_dim if self.scan.channel_gates and not self.scan.whole_gates else 0
        shared = (heads, groups, min(self.chunk, at.seq), low_rank)
        return Sizes(at.batch, at.tokens, *widths, *vectors, *shared, at.size, at.dtype)

    def _saved(self, d: Dims, at: _Run) -> tuple[Saved, ...]:
        """Projected input and scanned output; the delta rule's convolved input, gates and triangular systems too."""
        heads, groups = self.split(d.tp)
        convolved, fp32 = at.tokens * self.convolved(d.tp) * at.size, at.tokens * FP32_BYTES
        kept = [
            Saved("projected input", at.tokens * self._projected(d.tp) * at.size),
            Saved("scanned", self._moved("X", at)),
        ]
        if self.gated_norm:
            kept.append(Saved("gated norm statistics", fp32 * groups))
        if self.scan.keeps_convolved:
            kept.append(Saved("convolved", convolved))
        if self.scan.systems:
            decays = fp32 * (self.state if self.scan.channel_gates else 1)
            kept += [
                Saved("gates", heads * (decays + at.tokens * at.size)),
                Saved("triangular systems", self._moved("T", at)),
            ]
        return tuple(kept)

    def _mixed(self, at: _Run) -> Program:
        """Forward from the projected input to what the gated norm reads."""
        return (self._convolution(at, F, "convolution", 2), self._decays(at, F, "decays"), *self._products(at, F))

    def _convolution(self, at: _Run, phase: Phase, name: str, accesses: int) -> Compute:
        """Causal convolution with SiLU (causal_conv1d), one kernel."""
        n = at.tokens * self.convolved(at.tp)
        return memory_op(name, phase, "elementwise", n, accesses * at.size * n, at.dtype)

    def _decays(self, at: _Run, phase: Phase, name: str) -> Compute:
        """Steps and their running sums over a chunk: read once, two fp32 results."""
        n = at.tokens * self.split(at.tp)[0]
        return memory_op(name, phase, "elementwise", n, (at.size + 2 * FP32_BYTES) * n, at.dtype)

    def _moved(self, letter: str, at: _Run) -> float:
        """Bytes of one tensor of a `Product`."""
        heads, groups = self.split(at.tp)
        chunk = min(self.chunk, at.seq)
        return {
            "X": at.tokens * heads * self.head_dim * at.size,
            "W": at.tokens * heads * self.state * at.size,
            "K": at.tokens * groups * self.state * at.size,
            "A": at.tokens * groups * chunk * FP32_BYTES,
            "T": at.tokens * heads * chunk * at.size,
            "S": at.batch * ceil_div(at.seq, chunk) * heads * self.head_dim * self.state * FP32_BYTES,
        }[letter]

    def _products(self, at: _Run, phase: Phase) -> Program:
        """The scan's matmuls, and the kernels that hand states from chunk to chunk. The last chunk counts as whole."""
        products = self.scan.forward if phase is F else self.scan.backward
        passes = self.scan.passes[0 if phase is F else 1]
        heads, groups = self.split(at.tp)
        sizes = self._sizes() | {"Q": min(self.chunk, at.seq)}
        chunks = at.batch * ceil_div(at.seq, sizes["Q"])
        items: list[Compute] = []
        for product in products:
            m, n, k = (sizes[letter] for letter in product.sizes)
            number = chunks * (heads if product.owner == "head" else groups)
            moved = sum(self._moved(letter, at) for letter in product.moves)
            flops = 2.0 * number * m * n * k
            items.append(Compute(product.name, "gemm", (number, m, n, k), at.dtype, flops, moved, phase))
        if passes:
            states = self._moved("S", at)
            items.append(
                memory_op("state_passing", phase, "elementwise", states / FP32_BYTES, passes * states, at.dtype)
            )
        return tuple(items)

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """State of a sequence on one rank, however long it is."""
        numbers = self.split(d.tp)[0] * self.head_dim * self.state
        return (
            numbers * d.state_bytes(self.state_dtype)
            + max(0, self.conv_kernel - 1) * self.convolved(d.tp) * d.act_bytes
        )

    def _projected(self, tp: int) -> int:
        """Numbers of a token that the projections make of the hidden state."""
        return sum(m.width for m in self.matrices(tp)[:-1])

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token between the projections, on one rank."""
        return self._projected(tp) + self.convolved(tp) + 2 * self.inner(tp)

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Projections and gated norm, which depend on the number of tokens alone."""
        *before, last = self.matrices(d.tp)
        gate = gated_norm(self._sizes_of(_Run(1, tokens, d.tp, d.act_bytes, d.act))).after
        projections = [item for matrix in before for item in served_linear(d, matrix, tokens)]
        return (*projections, *gate, *served_linear(d, last, tokens))

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, which begin from a state: what came before costs nothing."""
        return self._mixed(_Run(batch, q_len, d.tp, d.act_bytes, d.act))

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` new tokens of each of `batch` sequences: convolution and state are read once, brought forward, and
        written after each token, as any may be the last that is right (vLLM, `IS_SPEC_DECODING` in
        fla/ops/fused_recurrent.py and mamba_ssm.py)."""
        numbers = batch * self.split(d.tp)[0] * self.head_dim * self.state
        width = batch * self.convolved(d.tp)
        window, step = 2 * max(1, self.conv_kernel) * width * d.act_bytes, 2 * width * d.act_bytes
        moved = (1 + queries) * numbers * d.state_bytes(self.state_dtype) + queries * step
        return (
            memory_op("convolution_update", F, "elementwise", queries * width, queries * window, d.act),
            memory_op("state_update", F, "elementwise", queries * numbers, moved, d.act),
        )
