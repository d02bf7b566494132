"""Seconds for an operator: measured at measured shapes, interpolated between them, the roofline elsewhere.

How the points of a profile are read (`op` of a table):

- `gemm`, `gemm_input_grad`, `gemm_weight_grad`: the same product in the memory layouts that a linear layer's
  forward, input gradient and weight gradient use; shape (batch, m, n, k). `grouped_gemm` likewise, by groups;
- `attention_forward`, `attention_backward`: fused; (batch, heads, kv_heads, q_len, kv_len, head_dim,
  v_head_dim, causal);
- kinds bound by memory: shape (bytes,), what one kernel reads and writes; `elementwise:gelu` is one operator,
  `elementwise_input_grad` any elementwise backward, `elementwise` any elementwise operator.

Points hold what a kernel costs in a stream of others, launch included. The roofline adds the launch:
max(flops/peak, bytes/bandwidth, kernels x launch_overhead_s) + kernels x kernel_gap_s. `launch_overhead_s` is
the shortest time from one launch to the next (the host cannot issue faster, and an empty kernel takes about
as long), so it is a floor, hidden under longer kernels; `kernel_gap_s` is what nothing hides: 0 unless
measured, and on a CPU the dispatch of an operator, as there the same core does both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.errors import InputError
from sim.interpolation import Surface
from sim.profile import BlockPoint, CollectiveTable, PointTable, Profile
from sim.program import Compute, Phase
from sim.roofline import MATMULS, MEMORY_BOUND, Device
from topology.spec import GpuSpec

ROOFLINE_UNCERTAINTY = 0.3  # real kernels reach 0.4 to 0.9 of the roofline; nothing measured narrows it
REPEAT_UNCERTAINTY = 0.02  # a quiet machine repeats a median within 2-3 % at another time
_OUTSIDE_PER_OCTAVE = 0.1


class Cost(NamedTuple):
    """`source`: measured | interpolated | roofline | topology. `uncertainty`: relative standard deviation."""

    seconds: float
    source: str
    uncertainty: float


class _Candidate(NamedTuple):
    """A table that may price an operator."""

    op: str
    exact: bool  # its points are this operator's own; else only their efficiency is taken
    uncertainty: float  # of taking one operator's efficiency for another's


@dataclass(frozen=True, slots=True)
class _Table:
    exact: dict[tuple[int, ...], tuple[float, float]]  # shape -> seconds, spread
    surfaces: dict[int, Surface]  # by causal; 0 where that has no meaning
    single: bool  # no matmul of a batch was measured


class Costs:
    """Prices operators on one GPU out of one profile. Answers are kept: equal operators cost one look-up.

    A profile with a `reference` other than `gpu` is scaled by the ratio of the two rooflines.
    """

    def __init__(self, profile: Profile, gpu: GpuSpec) -> None:
        self.profile = profile
        self.gpu = gpu
        self._device = _own_device(profile, gpu) if not profile.reference else _device(gpu)
        self._reference = _device(_gpu_named(profile)) if profile.reference else self._device
        self._raw: dict[tuple[str, str], list[PointTable]] = {}
        for table in profile.points:
            self._raw.setdefault((table.op, table.dtype), []).append(table)
        self._tables: dict[tuple[str, str], _Table] = {}
        self._blocks: dict[tuple[str, str, int], BlockPoint] = {
            (b.key, b.phase, b.run): b for b in profile.blocks
        }
        self._collectives: dict[tuple[str, int], CollectiveTable] = {
            (c.op, c.ranks): c for c in profile.collectives
        }
        self._cache: dict[Compute, Cost] = {}

    def coefficient(self, name: str, default: float) -> float:
        """A coefficient of the profile, by name, or the default."""
        found = self.profile.coefficients.get(name)
        return default if found is None else found.value

    @property
    def launch_overhead_s(self) -> float:
        """Shortest time from one kernel launch to the next: the profile's, else the GPU's."""
        return self.coefficient("launch_overhead_s", self.gpu.launch_overhead_s)

    def compute(self, op: Compute) -> Cost:
        """Seconds of one operator.

        Raises:
            InputError: if the GPU has no units for the operator's dtype.
            ValueError: if it is a block that the profile does not hold.
        """
        cost = self._cache.get(op)
        if cost is None:
            cost = self._cache[op] = self._price(op)
        return cost

    def block(self, key: str, phase: str, run: int = 0) -> Cost | None:
        """Seconds of a measured piece of the model, or None."""
        point = self._blocks.get((key, phase, run)) if key else None
        return None if point is None else _measured(point.seconds, point.spread)

    def collective(self, op: str, ranks: int, bytes_: float) -> Cost | None:
        """Seconds of a collective within a node, or None if this group size was not measured.

        Between sizes log-log; below the smallest that one's time (latency); above the largest α + β·bytes,
        with the β of the last two sizes.
        """
        table = self._collectives.get((op, ranks))
        return None if table is None else _collective(table, bytes_)

    def _price(self, op: Compute) -> Cost:
        if op.kind == "block":
            cost = self.block(op.name, op.phase.value)
            if cost is None:
                raise ValueError(f"profile {self.profile.name!r}: no block {op.name!r}, {op.phase.value}")
            return cost
        repeats = max(op.kernels, 1) if op.kind in MEMORY_BOUND and op.kind != "optimizer" else 1
        shape = (round(op.bytes / repeats),) if op.kind in MEMORY_BOUND else op.shape
        found = [cost for via in _candidates(op) if (cost := self._from_table(via, op, shape)) is not None]
        if not found:
            return self._roofline(op)
        best = min(found, key=lambda cost: (cost.source != "measured", cost.uncertainty))
        return best._replace(seconds=best.seconds * repeats)

    def _roofline(self, op: Compute) -> Cost:
        floor = op.kernels * self.launch_overhead_s
        seconds = max(self._device.seconds(op.kind, op.flops, op.bytes, op.dtype), floor)
        gaps = op.kernels * self.coefficient("kernel_gap_s", 0.0)
        return Cost(seconds + gaps, "roofline", ROOFLINE_UNCERTAINTY)

    def _from_table(self, via: _Candidate, op: Compute, shape: tuple[int, ...]) -> Cost | None:
        """Measured or interpolated seconds of one kernel; None where the profile has nothing near."""
        kind, dtype = op.kind, op.dtype
        table = self._table(via.op, dtype, kind)
        if table is None or not shape or shape[0] <= 0:
            return None
        here = self._device.shape_seconds(kind, shape, dtype)
        if via.exact and shape in table.exact:
            seconds, spread = table.exact[shape]
            there = self._reference.shape_seconds(kind, shape, dtype)
            cost = _measured(seconds * (here / there), spread)
            return cost if here == there else Cost(cost.seconds, "interpolated", ROOFLINE_UNCERTAINTY / 2)
        like, doubt = shape, via.uncertainty
        if kind in MATMULS and table.single and shape[0] > 1:
            like, doubt = (1, shape[0] * shape[1], *shape[2:]), max(doubt, 0.15)  # as many tiles, one product
        causal = like[-1] if kind.startswith("attention") else 0
        surface = table.surfaces.get(causal)
        found = surface.at(_coordinates(kind, np.array([like], dtype=np.int64))[0]) if surface else None
        if surface is None or found is None:
            return None
        log_efficiency, outside = found
        error = math.hypot(surface.leave_one_out_error(), doubt, _OUTSIDE_PER_OCTAVE * outside)
        seconds = max(here / math.exp(log_efficiency), self.launch_overhead_s if outside else 0.0)
        source = "interpolated" if outside <= 1.0 else "roofline"
        return Cost(seconds, source, min(max(error, REPEAT_UNCERTAINTY), 1.0))

    def _table(self, op: str, dtype: str, kind: str) -> _Table | None:
        for name in _like_dtypes(op, dtype, kind, self._raw):
            if (op, name) in self._raw:
                if (op, name) not in self._tables:
                    self._tables[op, name] = self._index(kind, name, self._raw[op, name])
                return self._tables[op, name]
        return None

    def _index(self, kind: str, dtype: str, tables: list[PointTable]) -> _Table:
        shapes = np.concatenate([t.shapes for t in tables])
        seconds = np.concatenate([t.seconds for t in tables])
        spread = np.concatenate([t.spread for t in tables])
        rows = [tuple(row) for row in shapes.tolist()]
        roof = np.array([self._reference.shape_seconds(kind, row, dtype) for row in rows])
        log_efficiency = np.log(roof / seconds)
        coordinates = _coordinates(kind, shapes)
        sort = shapes[:, -1] if kind.startswith("attention") else np.zeros(len(rows), dtype=np.int64)
        surfaces = {
            int(s): Surface(coordinates[sort == s], log_efficiency[sort == s]) for s in set(sort.tolist())
        }
        exact = dict(zip(rows, zip(seconds.tolist(), spread.tolist(), strict=True), strict=True))
        return _Table(exact, surfaces, kind in MATMULS and bool((shapes[:, 0] == 1).all()))


def _candidates(op: Compute) -> list[_Candidate]:
    """Tables that can price `op`; of equally sure ones the first is taken."""
    phase = f"_{op.phase.value}" if op.phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) else ""
    found = []
    if op.kind in MEMORY_BOUND:
        found.append(_Candidate(f"{op.kind}:{op.name}", True, 0.0))
    if phase:
        found.append(_Candidate(f"{op.kind}{phase}", True, 0.0))
    found.append(_Candidate(op.kind, not phase or op.kind.startswith("attention"), 0.05 if phase else 0.0))
    if op.kind == "grouped_gemm":
        found += [_Candidate(f"gemm{phase}", False, 0.15), _Candidate("gemm", False, 0.15)]
    if op.kind == "attention_backward":
        found.append(_Candidate("attention_forward", False, 0.25))
    return found


def _like_dtypes(op: str, dtype: str, kind: str, known: dict[tuple[str, str], list[PointTable]]) -> list[str]:
    """Dtypes whose points serve: bf16 and fp16 run alike; what is bound by memory depends on bytes alone."""
    names = [dtype, {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)]
    return names + [d for o, d in known if o == op] if kind in MEMORY_BOUND else names


def _coordinates(kind: str, shapes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[
    tuple[int, ...], np.dtype[np.float64]
]:
    """log2 of every dimension; of attention without the causal flag."""
    sizes = shapes[:, :-1] if kind.startswith("attention") else shapes
    return np.asarray(np.log2(np.maximum(sizes, 1)), dtype=np.float64)


def _collective(table: CollectiveTable, bytes_: float) -> Cost:
    size, seconds = table.bytes, table.seconds
    spread = float(table.spread[min(int(np.searchsorted(size, bytes_)), len(size) - 1)])
    if bytes_ > size[-1]:
        slope = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2]) if len(size) > 1 else 0.0
        slope = slope if slope > 0 else seconds[-1] / size[-1]
        outside = math.log2(bytes_ / size[-1])
        error = math.hypot(0.05, _OUTSIDE_PER_OCTAVE * min(outside, 3.0), 1.4826 * spread)
        return Cost(float(seconds[-1] + slope * (bytes_ - size[-1])), "interpolated", error)
    exact = np.flatnonzero(size == bytes_)
    if len(exact):
        return _measured(float(seconds[exact[0]]), spread)
    if bytes_ < size[0]:
        return Cost(float(seconds[0]), "interpolated", math.hypot(0.1, 1.4826 * spread))
    inside = np.interp(math.log(bytes_), np.log(np.maximum(size, 1e-9)), np.log(seconds))
    return Cost(float(np.exp(inside)), "interpolated", math.hypot(0.05, 1.4826 * spread))


def _measured(seconds: float, spread: float) -> Cost:
    """A normal distribution's standard deviation is 1.4826 median absolute deviations."""
    return Cost(seconds, "measured", max(1.4826 * spread, REPEAT_UNCERTAINTY))


def _device(gpu: GpuSpec) -> Device:
    return Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s)


def _own_device(profile: Profile, gpu: GpuSpec) -> Device:
    """The data sheet with what was measured on this very machine in its place."""
    found = profile.coefficients
    peak = {d: found[f"peak_{d}_flops_per_s"].value for d in ("fp32", "bf16", "fp16", "fp8")
            if f"peak_{d}_flops_per_s" in found}
    bandwidth = found.get("memory_bandwidth_bytes_per_s")
    return Device(
        gpu.name, {**gpu.peak_flops_per_s, **peak},
        gpu.memory_bandwidth_bytes_per_s if bandwidth is None else bandwidth.value,
    )


def _gpu_named(profile: Profile) -> GpuSpec:
    from topology.presets import GPUS

    if profile.reference not in GPUS:
        found, names = profile.reference, ", ".join(sorted(GPUS))
        raise InputError(f"profile {profile.name!r}: reference: found {found!r}; allowed: {names}")
    return GPUS[profile.reference]
