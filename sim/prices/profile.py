"""Hold a profile, the measurements of a machine. `calibrate` writes it, `sim.prices.operator_prices` uses it.

A profile is one JSON file, `"format": "profile/1"`. Points are columns, one table for each operator and dtype, so ten
thousand points are a small file that loads in milliseconds::

    {"format": "profile/1", "name": "my-node", "source": "calibrate.run", "date": "2026-01-31",
     "reference": "", "hardware": {"device": "cpu", ...}, "software": {"torch": "2.13.0"},
     "settings": {"threads": 1},
     "coefficients": {"launch_overhead_s": {"value": 5e-6, "source": "..."}},
     "points": [{"op": "gemm", "dtype": "fp32", "shape": [[1, 256, 768, 256]],
                 "seconds": [1.1e-3], "spread": [0.02], "samples": [40]}],
     "blocks": [{"key": "layer b=1 ...", "phase": "forward", "run": 0, "seconds": 0.002, "spread": 0.01}],
     "collectives": [{"op": "all_reduce", "ranks": 2, "bytes": [1024], "seconds": [1e-4], "spread": [0.1]}]}

`spread` is the median absolute deviation ÷ the median of `samples` repetitions. In a table of points both may be one
number for the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, field, to_builtins
from numpy.typing import NDArray

from sim.core.files import write_json
from sim.prices.coefficients import Coefficients
from sim.prices.nearby import NearbyStep

FORMAT = "profile/1"

Facts = Mapping[str, str | int | float | bool]


class BlockPoint(NamedTuple):
    """Hold the measured seconds of part `run` of a block's phase; blocking communications separate the parts."""

    key: str
    phase: str
    run: int
    seconds: float
    spread: float


class PointTable(Struct, frozen=True, eq=False, rename={"shapes": "shape"}):
    """Hold measured kernels of one operator and dtype; `sim.prices.table_prices` describes `op` and `shapes`.

    `source`: the engine and release in which they were measured, if any; `kernels`: what it calls them.
    """

    op: str
    dtype: str
    shapes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    samples: NDArray[np.int64]
    source: str = ""
    kernels: str = ""


HOST_COPIES = ("offload", "reload")  # between a GPU and its host's memory


class CollectiveTable(Struct, frozen=True, eq=False):
    """Hold measured collectives of one kind and group size within a node, by bytes as nccl-tests counts them.

    Host copies are collectives of one rank. `ranks_per_core`: number of ranks that shared each core in the measurement;
    `sim.prices.shared_cores` uses tables with more than 1. `source`: the engine and release whose own kernels these
    are, as CUDA graphs replay them; empty: the library's (NCCL).
    """

    op: str
    ranks: int
    bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    ranks_per_core: float = 1.0
    source: str = ""


class Profile(Struct, frozen=True, eq=False):
    """Hold all measurements and coefficients of a machine.

    `reference`: the GPU preset of the points; for another GPU, or one with changed figures, points are scaled by the
    ratio of the two rooflines. "": the points were measured on the simulated machine, so they are used unchanged, and
    the coefficients `memory_bandwidth_bytes_per_s` and `peak_DTYPE_flops_per_s` replace the data sheet's. `kernels`: a
    shipped file of measured kernels of the `reference` (`sim.prices.kernel_file`), read on demand. `nearby`: the steps
    that the coefficients were fitted to, near which they are others.
    """

    name: str
    source: str
    date: str = ""
    reference: str = ""
    hardware: Facts = field(default_factory=dict)
    software: Facts = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    coefficients: Coefficients = field(default_factory=Coefficients)
    points: tuple[PointTable, ...] = ()
    blocks: tuple[BlockPoint, ...] = ()
    collectives: tuple[CollectiveTable, ...] = ()
    kernels: str = ""
    nearby: tuple[NearbyStep, ...] = ()

    @property
    def bare(self) -> bool:
        """Tell whether the profile has no measurement and no coefficient, so that the roofline prices all kernels."""
        return not (self.points or self.blocks or self.collectives or self.kernels or self.coefficients.flat())

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`; `profile_input.profile_from` reads it back unchanged."""
        plain: dict[str, Any] = to_builtins(self, enc_hook=lambda column: column.tolist())
        plain["coefficients"] = {name: c._asdict() for name, c in self.coefficients.flat().items()}
        plain["blocks"] = [b._asdict() for b in self.blocks]
        plain["points"] = list(plain["points"])
        plain["nearby"] = [{"features": n.features._asdict(), "factors": dict(n.factors)} for n in self.nearby]
        usual = {"ranks_per_core": 1.0, "source": "", "kernels": ""}  # left out
        for name in ("collectives", "points"):
            plain[name] = [{k: v for k, v in t.items() if k not in usual or v != usual[k]} for t in plain[name]]
        return {"format": FORMAT, **plain}

    def save(self, path: str | Path) -> None:
        """Write the file under a temporary name, then rename it, so that it is never incomplete."""
        write_json(Path(path), self.to_json())
