"""The grid of ranks, numbered with `rank_order`'s first dimension varying fastest (Megatron: tp-cp-dp-pp)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from sim.inputs.parallelism import Parallelism

PLANE = ("tp", "cp", "dp")  # the dimensions along which the ranks of one pipeline rank differ


class Cut(Struct, frozen=True):
    """Cut each group of the name `outer`, in ascending order, into runs of as many ranks as group `size` has.

    A group is one run or, `across`, the ranks at one place of every run.
    """

    outer: str
    size: str
    across: bool = False


# The groups of all ranks along some dimensions of the mesh.
ALONG = {**{d: (d,) for d in ("tp", "cp", "dp", "pp")}, "dp_cp": ("cp", "dp"), "model": ("tp", "pp"), "plane": PLANE}
# Parts of other groups. `experts`: ranks of a stage that hold each of its experts once.
# `cp_exchanged`: consecutive ranks of cp that exchange heads; `cp_ring`: one of each, which form a ring.
CUTS = {
    "cp_exchanged": Cut("cp", "cp_exchanged"),
    "cp_ring": Cut("cp", "cp_exchanged", across=True),
    "shard": Cut("dp_cp", "shard"),
    "replica": Cut("dp_cp", "shard", across=True),
    "secondary": Cut("shard", "secondary"),
    "local": Cut("shard", "local"),
    "between": Cut("shard", "local", across=True),
    "experts": Cut("plane", "experts"),
    "expert_tp": Cut("experts", "expert_tp"),
    "ep": Cut("experts", "expert_tp", across=True),
    "expert_dp": Cut("plane", "experts", across=True),
    "expert_shard": Cut("expert_dp", "expert_shard"),
    "expert_replica": Cut("expert_dp", "expert_shard", across=True),
}


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


def make_mesh(p: Parallelism) -> Mesh:
    """The mesh of a layout; its dimensions are those of `rank_order`."""
    sizes = {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp}
    strides, stride = {}, 1
    for d in p.rank_order.split("-"):
        strides[d] = stride
        stride *= sizes[d]
    return Mesh(sizes, strides)
