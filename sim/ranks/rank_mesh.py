"""The grid of ranks, numbered with `rank_order`'s first dimension varying fastest (Megatron: tp-cp-dp-pp)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from sim.inputs.parallelism import Parallelism

PLANE = ("tp", "cp", "dp")  # the dimensions along which the ranks of one pipeline rank differ


class Mesh(Struct, frozen=True):
    """The grid of ranks. `strides[d]` is how far apart neighbours along dimension d are."""

    sizes: dict[str, int]
    strides: dict[str, int]

    def coordinate(self, dimension: str, rank: int) -> int:
        """Where `rank` stands along `dimension`."""
        return rank // self.strides[dimension] % self.sizes[dimension]

    def along(self, dimensions: Sequence[str], rank: int) -> list[int]:
        """All ranks that differ from `rank` in these dimensions alone, in ascending order."""
        ranks = [rank]
        for d in dimensions:
            start, stride = -self.coordinate(d, rank) * self.strides[d], self.strides[d]
            ranks = [r + start + i * stride for r in ranks for i in range(self.sizes[d])]
        ranks.sort()
        return ranks

    def plane(self, rank: int) -> list[int]:
        """All ranks of the same pipeline rank, in ascending order."""
        return self.along(PLANE, rank)


def make_mesh(p: Parallelism) -> Mesh:
    """The mesh of a layout; its dimensions are those of `rank_order`."""
    sizes = {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp}
    strides, stride = {}, 1
    for d in p.rank_order.split("-"):
        strides[d] = stride
        stride *= sizes[d]
    return Mesh(sizes, strides)
