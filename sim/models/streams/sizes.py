"""Sizes of a residual stream of several streams; `sim.models.streams.hyper_connections` has what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

StreamKind = Literal["mixed", "independent", "gated"]


class _Weights(Struct, frozen=True):
    """Hold how a kind of streams combines them: `weights` computed for each of a token's streams, and where it `mixes`
    one for each pair; `scales`: learned factors of these. `gated`: instead a gate for each number, by low-rank
    matrices."""

    weights: int
    mixes: bool = False
    scales: int = 0
    gated: bool = False


_KINDS: dict[str, _Weights] = {
    "mixed": _Weights(2, mixes=True, scales=3),
    "independent": _Weights(2, scales=2),
    "gated": _Weights(1, gated=True),
}


class Streams(Struct, frozen=True):
    """Hold the residual stream of a model: `number` streams of `hidden` numbers a token; `rank`: of gates' matrices
    (kind gated).

    >>> Streams(1, 4096).branch_parameters, Streams(4, 4096).branch_parameters, Streams(4, 4096).head_parameters
    (0, 393243, 65541)
    """

    number: int = 1
    hidden: int = 0
    kind: StreamKind = "mixed"
    rank: int = 0

    @property
    def gated(self) -> bool:
        """Tell whether a gate of each number makes a branch's input, behind a norm of the streams: no other norm stands
        before a branch, nor before the output matrix."""
        return self.number > 1 and _KINDS[self.kind].gated

    @property
    def mixes(self) -> bool:
        """Tell whether the streams are mixed where a branch's result is added."""
        return _KINDS[self.kind].mixes

    @property
    def in_fp32(self) -> bool:
        """Tell whether the weights stay in fp32."""
        return not self.gated

    @property
    def width(self) -> int:
        """Numbers of a token in all streams."""
        return self.number * self.hidden

    @property
    def weights(self) -> int:
        """Weights that one branch computes for a token, gates apart."""
        own = _KINDS[self.kind]
        return (own.weights + (self.number if own.mixes else 0)) * self.number

    @property
    def scales(self) -> int:
        """Learned factors of a branch's weights."""
        return _KINDS[self.kind].scales

    @property
    def branch_elements(self) -> int:
        """Parameters of one branch that a token is multiplied by."""
        return 0 if self.number == 1 else (self.weights + self._gates) * self.width

    @property
    def _gates(self) -> int:
        """Numbers of gates' two matrices for each number of the streams."""
        return 2 * self.rank if self.gated else 0

    @property
    def branch_parameters(self) -> int:
        """Parameters of one branch: matrices, and a bias of each weight and scales, or a norm's weights."""
        if self.number == 1:
            return 0
        return self.branch_elements + (self.width if self.gated else self.weights + self.scales)

    @property
    def head_parameters(self) -> int:
        """Parameters of the sum after the last layer."""
        if self.number == 1:
            return 0
        return self.width * (self._gates + 1) if self.gated else self.number * (self.width + 1) + 1


def streams_of(model: ModelConfig) -> Streams:
    """The streams of the residual stream; one has no weights, so that its width does not matter."""
    if model.hyper_connections == 1:
        return Streams()
    sizes = model.hyper_connections, model.hidden, model.hyper_connection_kind
    return Streams(*sizes, rank=model.hyper_connection_rank or 0)
