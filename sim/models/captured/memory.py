"""Memory of a captured program, piece by piece: when each storage is born and dies says who keeps it.

What the forward made and the backward still reads is saved by the piece in whose backward it dies; in a pipeline that
is the stage which must have kept it. What lives no longer than the forward is transient there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.program import NeededBy, OwnBytes, Saved
from sim.inputs.program_blocks import Pieces
from sim.inputs.program_file import CapturedOperator, CapturedProgram, Storage

ALLOCATOR_BYTES = 512  # what torch's CUDA allocator rounds to (c10/cuda/CUDACachingAllocator: kMinBlockSize)
LASTING = ("parameter", "frozen parameter", "optimizer state", "buffer")
Bytes = NDArray[np.float64]


class PieceMemory(NamedTuple):
    """Hold the bytes that one piece keeps and needs, under the names of `Block`."""

    saved: tuple[Saved, ...]
    forward_peak_bytes: float
    backward_peak_bytes: float
    own: OwnBytes


class ProgramMemory(NamedTuple):
    """The pieces' memory, and what clipping and optimizer hold beside states and gradients."""

    pieces: tuple[PieceMemory, ...]
    optimizer_peak_bytes: float


class ProgramLives:
    """When each storage of a program is born and dies. `owner`: the piece that holds each storage that lasts; `late`:
    whether an operator is a weight gradient's, whose inputs a split backward keeps."""

    def __init__(
        self, program: CapturedProgram, pieces: Pieces, owner: Sequence[int], late: Callable[[CapturedOperator], bool]
    ) -> None:
        self.program, self.pieces, self.owner = program, pieces, owner
        self.rows = len(program.operators) + 1
        phases = [o.phase for o in program.operators]
        self.forward_end = phases.count("forward")
        self.end = sum(p in ("forward", "recomputed", "backward") for p in phases)
        self.read_late = {n for o in program.operators if late(o) for n in o.reads}
        count = pieces.output + 1
        self.saved = {needed: np.zeros(count) for needed in (NeededBy.INPUT_GRAD, NeededBy.BOTH)}
        self.kept, self.until_end = np.zeros(count), np.zeros(count)

    def memory(self) -> ProgramMemory:
        """The memory of every piece."""
        apart = (*LASTING, "gradient", "host")
        passing = [(i, s) for i, s in enumerate(self.program.storages) if s.kind not in apart]
        for i, s in passing:
            self._place(i, s)
        gradients = [s for s in self.program.storages if s.kind == "gradient"]
        alive = self._alive([s for _, s in passing])
        first = alive + self._alive(gradients)
        later = alive + self._alive([s._replace(died=min(s.born + 1, self.rows)) for s in gradients])
        own_gradients = np.zeros(len(self.kept))
        for s in gradients:
            own_gradients[self._piece(s.born)] += rounded(s.bytes)
        lasting = {kind: self._lasting(kind) for kind in LASTING}
        states = sum(rounded(s.bytes) for s in self.program.storages if s.kind == "optimizer state")
        trained = lasting["parameter"]
        optimizer = states * trained / max(1.0, trained.sum())
        found, before, after = [], 0.0, own_gradients.sum()
        for k in range(len(self.kept)):
            held = before + self.kept[k] + self.until_end[k]
            after -= own_gradients[k]  # of the pieces whose backward comes first
            saved = self.kept[: k + 1].sum()
            own = OwnBytes(
                float(trained[k]),
                float(lasting["frozen parameter"][k] + lasting["buffer"][k]),
                float(own_gradients[k]),
                float(optimizer[k]),
                self._peak(first, k, False) - float(saved + after),
                float(self.until_end[k]),
            )
            kept = (Saved("activations", float(x[k]), needed) for needed, x in self.saved.items() if x[k])
            peaks = self._peak(alive, k, True) - float(held), self._peak(later, k, False) - float(saved)
            found.append(PieceMemory(tuple(kept), *peaks, own))
            before = held
        return ProgramMemory(tuple(found), float(alive[self.end :].max(initial=0.0)))

    def _piece(self, row: int) -> int:
        """The piece of an operator of forward or backward; of a later one the input, whose backward ends last."""
        return max(0, self.pieces.of_operator[row]) if row < self.end else 0

    def _place(self, number: int, s: Storage) -> None:
        """Count a storage of the forward for the piece that saves it, or holds it until the forward ends."""
        if s.born >= self.forward_end:
            return
        if s.died is None or s.died > self.forward_end:
            at = s.born if s.died is None or s.died > self.end else s.died - 1
            needed = NeededBy.BOTH if number in self.read_late else NeededBy.INPUT_GRAD
            self.saved[needed][self._piece(at)] += rounded(s.bytes)
            self.kept[self._piece(at)] += rounded(s.bytes)
        elif s.died == self.forward_end:
            self.until_end[self._piece(s.born)] += rounded(s.bytes)

    def _lasting(self, kind: str) -> Bytes:
        total = np.zeros(len(self.kept))
        for piece, s in zip(self.owner, self.program.storages, strict=True):
            if s.kind == kind:
                total[piece] += rounded(s.bytes)
        return total

    def _peak(self, alive: Bytes, piece: int, forward: bool) -> float:
        """The most that is alive while a piece runs; a piece without operators needs what is there before it."""
        rows = range(self.forward_end) if forward else range(self.forward_end, self.end)
        mine = [r for r in rows if self.pieces.of_operator[r] == piece]
        return float(alive[mine].max(initial=0.0))

    def _alive(self, storages: Sequence[Storage]) -> Bytes:
        """Bytes alive while each operator runs."""
        changes = np.zeros(self.rows + 1)
        for s in storages:
            changes[min(s.born, self.rows)] += rounded(s.bytes)
            if s.died is not None:
                changes[min(s.died, self.rows)] -= rounded(s.bytes)
        return np.cumsum(changes)[: self.rows]


def rounded(size: int) -> int:
    """Bytes of the block that torch's allocator gives for a tensor of `size` bytes.

    >>> rounded(0), rounded(1), rounded(1024)
    (0, 512, 1024)
    """
    return -(-size // ALLOCATOR_BYTES) * ALLOCATOR_BYTES
