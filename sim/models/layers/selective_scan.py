"""Mamba 1 (Gu and Dao 2023, arXiv 2312.00752): every channel has a state of its own, scanned in one kernel.

Projection to x and gate, causal convolution, a projection to the low-rank steps (dt), B and C, one that widens the
steps to all channels, selective scan, output projection (JambaMambaMixer of Transformers). The scan's kernel keeps
states on chip: it is priced by what it reads and writes, with 9 flops for each token and number of the state (VMamba's
`flops_selective_scan_fn` counts so). No price of it was compared with a measured kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, ModelPart, Phase, Program, Saved
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.norm import norm
from sim.models.operators import F, I, Operator, W, elementwise_op, memory_op
from sim.models.serving.operators import ServingDims, served_linear

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

SCAN_FLOPS = 9.0  # a token, channel and number of its state: decay, input, state, output
# Every so many tokens the forward kernel writes two numbers for each number of a state: the product of the decays so
# far, and the state (mamba_ssm, csrc/selective_scan/selective_scan.cpp: x of [batch, dim, n_chunks, dstate * 2]).
KEPT_EVERY = 2048


class SelectiveScan(Struct, frozen=True):
    """Sizes of the whole model. `inner`: channels; `state`: numbers of a channel's state; `rank`: of the steps."""

    part: ClassVar = ModelPart.STATE_SPACE

    hidden: int
    inner: int
    state: int
    rank: int
    conv_kernel: int
    conv_bias: bool
    inner_norms: bool
    state_dtype: str | None

    def channels(self, tp: int) -> int:
        """Return the channels of one rank."""
        return ceil_div(self.inner, tp)

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Projections on one of `tp` ranks; steps, B and C are summed over them."""
        inner, small = self.channels(tp), self.rank + 2 * self.state
        return (
            Matrix("state_in", self.hidden, (2 * inner,), "column"),
            Matrix("steps_down", inner, (small,), "row"),
            Matrix("steps_up", self.rank, (inner,), "column", bias=True),
            Matrix("state_out", inner, (self.hidden,), "row"),
        )

    def other_parameters(self, tp: int = 1) -> int:
        """Convolution, decays of every channel's state, skip weights, norms of steps, B and C."""
        own = self.conv_kernel + self.conv_bias + self.state + 1
        return self.channels(tp) * own + (self.rank + 2 * self.state if self.inner_norms else 0)

    def key(self, seq_len: int) -> str:
        """All sizes, which stand beside those of the model's attention."""
        return f" {self!r}"

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices: the scan forward, and twice as much backward."""
        return 3.0 * SCAN_FLOPS * self.inner * self.state

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Input projection, convolution, steps, scan, output projection."""
        if d.framework.runs_model_code and not self.inner_norms:
            return self._in_one_function(d)
        first, down, up, last = self.matrices(d.tp)
        small = self.rank + 2 * self.state
        norms = (norm(d, "steps_norm", "rmsnorm", d.tokens, small),) if self.inner_norms else ()
        return (
            linear(d, first.linear(d.tokens)),
            self._convolution(d),
            linear(d, down.linear(d.tokens, False)),  # its input is the scan's
            *norms,
            linear(d, up.linear(d.tokens)),
            *((self._copied(d),) if d.framework.runs_model_code else ()),
            self._scan(d),
            linear(d, last.linear(d.tokens)),
        )

    def _in_one_function(self, d: Dims) -> tuple[Operator, ...]:
        """`MambaInnerFn` of Transformers' Mamba (mamba_ssm/ops/selective_scan_interface.py, checkpoint level 1).

        Of what lies between the projections it keeps the projected input, copied to channels' order (2 accesses of
        both halves), the low-rank steps with B and C, these by themselves, and the scan's result. Its backward computes
        convolution and steps again; the output projection's input is what the scan's backward writes besides.
        """
        first, down, up, last = self.matrices(d.tp)
        n, e, state = d.tokens * self.channels(d.tp), d.act_bytes, d.tokens * self.state
        steps = linear(d, up.linear(d.tokens, save_input=False))
        kept = (
            Saved("projected input", 2 * n * e),
            Saved("low-rank steps", (d.tokens * self.rank + 4 * state) * e),
            Saved("scanned", n * e),
            Saved("states", self._states_kept(d)),
        )
        copies = (
            elementwise_op("projected_copy", F, 2 * n, 2, e, d.act),
            elementwise_op("projected_copy_backward", I, 2 * n, 2, e, d.act),
        )
        convolution, scan = self._convolution(d), self._scan(d)
        again = tuple(
            replace(x, phase=I, name=f"{x.name}_again")
            for x in (*convolution.forward, *steps.forward)
            if isinstance(x, Compute)
        )
        written = elementwise_op("scanned_again", I, n, 1, e, d.act)
        return (
            linear(d, first.linear(d.tokens)),
            Operator("projected_copy", copies[:1], copies[1:]),
            replace(convolution, saved=()),
            linear(d, down.linear(d.tokens, save_input=False)),
            steps,
            replace(scan, backward=(*again, *scan.backward, replace(written, kernels=0)), saved=kept),
            linear(d, last.linear(d.tokens, save_input=False)),
        )

    def _states_kept(self, d: Dims) -> float:
        """Bytes of the states that the scan keeps; and of the decays, whose exponential torch makes of a parameter and
        negates."""
        chunks = d.batch * ceil_div(d.seq, KEPT_EVERY) + int(d.framework.runs_model_code)
        return chunks * self.channels(d.tp) * 2 * self.state * FP32_BYTES

    def _copied(self, d: Dims) -> Operator:
        """Copies to channels' order, in which the scan reads (`SelectiveScanFn`: `contiguous`): of its input, steps and
        gate, and of its result back; input and gate are kept so."""
        n, e = d.tokens * self.channels(d.tp), d.act_bytes
        ahead, back = (
            elementwise_op(name, phase, 4 * n, 2, e, d.act)
            for name, phase in (("scan_copies", F), ("scan_copies_backward", I))
        )
        kept = (Saved("scan's input", n * e), Saved("gate", n * e))
        return Operator("scan_copies", (replace(ahead, kernels=4),), (replace(back, kernels=4),), kept)

    def _convolution(self, d: Dims) -> Operator:
        n = d.tokens * self.channels(d.tp)
        return Operator(
            "convolution",
            (elementwise_op("convolution", F, n, 2, d.act_bytes, d.act),),
            (
                elementwise_op("convolution_backward", I, n, 3, d.act_bytes, d.act),
                elementwise_op("convolution_wgrad", W, n, 2, d.act_bytes, d.act),
            ),
            (Saved("projected input", 2 * n * d.act_bytes),),
            params=self.channels(d.tp) * (self.conv_kernel + self.conv_bias),
            backward_bytes=2 * n * d.act_bytes,
        )

    def _scan(self, d: Dims) -> Operator:
        n, e = d.tokens * self.channels(d.tp), d.act_bytes
        return Operator(
            "selective_scan",
            (self._kernel("selective_scan", F, d.tokens, d.tp, 5, e, d.act),),
            (self._kernel("selective_scan_backward", I, d.tokens, d.tp, 9, e, d.act),),
            (
                Saved("convolved", n * e),
                Saved("steps", n * e),
                Saved("scanned", n * e),
                Saved("states", self._states_kept(d)),
            ),
            params=self.channels(d.tp) * (self.state + 1),  # decays and skip weights
            backward_bytes=4 * n * e,
        )

    def _kernel(self, name: str, phase: Phase, tokens: int, tp: int, accesses: int, e: float, act: str) -> Compute:
        """`accesses` a token and channel, and B and C; backward computes states again: three times the flops."""
        n, shared = tokens * self.channels(tp), 2 * tokens * self.state
        op = memory_op(name, phase, "elementwise", n, (accesses * n + shared) * e, act)
        return replace(op, flops=SCAN_FLOPS * n * self.state * (1 if phase is F else 3))

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """State of a sequence on one rank, however long it is."""
        inner = self.channels(d.tp)
        return inner * (self.state * d.state_bytes(self.state_dtype) + (self.conv_kernel - 1) * d.act_bytes)

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token between the projections, on one rank."""
        return 5 * self.channels(tp) + self.rank + 2 * self.state

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Projections, which depend on the number of tokens alone."""
        return tuple(item for matrix in self.matrices(d.tp) for item in served_linear(d, matrix, tokens))

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, which begin from a state: what came before costs nothing."""
        n = batch * q_len * self.channels(d.tp)
        scan = self._kernel("selective_scan", F, batch * q_len, d.tp, 5, d.act_bytes, d.act)
        return (elementwise_op("convolution", F, n, 2, d.act_bytes, d.act), scan)

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` new tokens of each of `batch` sequences: convolution and state are read once, brought forward, and
        written after each token, as any may be the last that is right."""
        inner = batch * queries * self.channels(d.tp)
        moved = (1 + 1 / queries) * inner * self.state * d.state_bytes(self.state_dtype) + 5 * inner * d.act_bytes
        return (
            elementwise_op("convolution_update", F, inner, 2 * self.conv_kernel, d.act_bytes, d.act),
            memory_op("state_update", F, "elementwise", inner * self.state, moved, d.act),
        )
