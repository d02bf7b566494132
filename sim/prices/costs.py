"""Seconds for an operator: measured at measured shapes, interpolated between them, the roofline elsewhere.

How the points of a profile are read (`op` of a table):

- `gemm`, `gemm_input_grad`, `gemm_weight_grad`: the same product in the memory layouts that a linear layer's
  forward, input gradient and weight gradient use; shape (batch, m, n, k). `grouped_gemm` likewise, by groups;
- `attention_forward`, `attention_backward`: fused; (batch, heads, kv_heads, q_len, kv_len, head_dim,
  v_head_dim, causal);
- kinds bound by memory: shape (bytes,), what one kernel reads and writes; `elementwise:gelu` is one operator,
  `elementwise_input_grad` any elementwise backward, `elementwise` any elementwise operator; `norm_eager` is one of
  the kernels of an RMSNorm written in separate operators.

Points hold what a kernel costs in a stream of others, launch included. The roofline adds the launch:
max(flops/peak, bytes/bandwidth, kernels x launch_overhead_s) + kernels x kernel_gap_s. `launch_overhead_s` is
the shortest time from one launch to the next (the host cannot issue faster, and an empty kernel takes about
as long), so it is a floor, hidden under longer kernels; `kernel_gap_s` is what nothing hides: 0 unless
measured, and on a CPU the dispatch of an operator, as there the same core does both.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.errors import InputError
from sim.prices.flash import BY_STYLE, flash_seconds
from sim.prices.flash import UNCERTAINTY as FLASH_UNCERTAINTY
from sim.prices.kernels import Table, kernel_file, lookup, make_table, measured_bytes, table_of
from sim.prices.profile import BlockPoint, CollectiveTable, PointTable, Profile
from sim.prices.roofline import ATTENTION, MATMULS, MEMORY_BOUND, PREFILL, SERVED, Device
from sim.program import Compute, Phase
from topology.spec import GpuSpec

ROOFLINE_UNCERTAINTY = 0.3  # real kernels reach 0.4 to 0.9 of the roofline; nothing measured narrows it
REPEAT_UNCERTAINTY = 0.02  # a quiet machine repeats a median within 2-3 % at another time
MEMORY_UNCERTAINTY = 0.15  # published efficiencies of one GPU's streaming kernels spread about as much
EPILOGUE_EXPOSED = 0.5  # of the result's extra traffic; the rest runs under other tiles' matmuls, as on an A100
POWER_UNCERTAINTY = 0.25  # of what the power limit adds: temperature, data and the part itself decide
POWER_AT_REST = 0.5  # of the power limit: a GPU streaming from memory
GROUPED_UNCERTAINTY = 0.1  # of taking a grouped matmul for one and its weights' traffic (b200_kernels)
UNALIGNED_UNCERTAINTY = 0.25  # fits to parts of vtrain_single_node find a slowdown of 1.5 to 2.6
NORM_KERNELS = 2  # of a norm that is one kernel forward and two backward; more make it a chain of elementwise ones
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


class Costs:
    """Prices operators on one GPU out of one profile. Answers are kept: equal operators cost one look-up.

    A profile with a `reference` other than `gpu` is scaled by the ratio of the two rooflines.
    """

    def __init__(self, profile: Profile, gpu: GpuSpec) -> None:
        self.profile, self.gpu = profile, gpu
        self._device = _own_device(profile, gpu) if not profile.reference else _device(gpu)
        home = _gpu_named(profile) if profile.reference else gpu
        self._reference = _device(home) if profile.reference else self._device
        self._power_at_peak = self.coefficient("power_at_peak", 0.0)
        self._matmul_speed = self.coefficient("matmul_speed", 1.0)  # of this machine's, by that of the points
        self._power_limit = gpu.power_limit_w / _reference_w(gpu, home)
        self._gradient_slowdown = self.coefficient("fp8_gradient_slowdown", 1.0)
        self._raw: dict[tuple[str, str], list[PointTable]] = {}
        for table in profile.points:
            op = f"{table.op}2" if table.op.endswith(":flash") else table.op  # torch's name of FlashAttention-2
            self._raw.setdefault((op, table.dtype), []).append(table)
        self._stored = kernel_file(profile.kernels).tables if profile.kernels else frozenset()
        self._ops = {op for op, _ in (*self._raw, *self._stored)}
        self._tables: dict[tuple[str, str], Table] = {}
        self._blocks: dict[tuple[str, str, int], BlockPoint] = {(b.key, b.phase, b.run): b for b in profile.blocks}
        self._collectives: dict[tuple[str, int], CollectiveTable] = {(c.op, c.ranks): c for c in profile.collectives}
        self._cache: dict[tuple[Compute, float], Cost] = {}
        self._host_operator_s = self.coefficient("host_operator_s", 0.0)
        self._host_operator_eager_s = self.coefficient("host_operator_eager_s", self._host_operator_s)
        self._host_step_s = self.coefficient("host_step_s", 0.0)
        self.host_collective_s = self.coefficient("host_collective_s", 0.0)
        self.collective_sm_share = self.coefficient("collective_sm_share", 0.0)
        self.host_message_s = self.coefficient("host_message_s", 0.0)

    def coefficient(self, name: str, default: float) -> float:
        """A coefficient of the profile, by name, or the default."""
        found = self.profile.coefficients.get(name)
        return default if found is None else found.value

    @property
    def launch_overhead_s(self) -> float:
        """Shortest time from one kernel launch to the next: the profile's, else the GPU's."""
        return self.coefficient("launch_overhead_s", self.gpu.launch_overhead_s)

    def host_s(self, op: Compute, plain: bool = False) -> float:
        """Seconds in which the host issues an operator's kernels (a floor under runs of them: `sim.graph.template`).

        `plain`: plain torch, compiled or not. Megatron's layers issue fewer kernels, each with more Python around it.
        """
        if op.kind == "optimizer":
            return self._host_step_s
        return op.kernels * (self._host_operator_eager_s if plain else self._host_operator_s)

    def pace(self, ranks: int) -> float:
        """How much slower than the usual GPU's is the slowest clock of `ranks` GPUs under their power limit.

        GPUs of one kind differ there by `power_spread` (standard deviation by mean), and a step waits for the slowest:
        the expected largest of n normal variables, by Blom's approximation.
        """
        spread = self.coefficient("power_spread", 0.0)
        if ranks < 2 or not spread:
            return 1.0
        return 1.0 + spread * _normal_quantile((ranks - 0.375) / (ranks + 0.25))

    def compute(self, op: Compute, pace: float = 1.0) -> Cost:
        """Seconds of one operator; `pace` from the method of that name, where others wait for the result.

        Raises:
            InputError: if the GPU has no units for the operator's dtype.
            ValueError: if it is a block that the profile does not hold.
        """
        cost = self._cache.get((op, pace))
        if cost is None:
            cost = self._cache[op, pace] = self._price(op, pace)
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

    def _price(self, op: Compute, pace: float) -> Cost:
        if op.kind == "block":
            cost = self.block(op.name, op.phase.value)
            if cost is None:
                raise ValueError(f"profile {self.profile.name!r}: no block {op.name!r}, {op.phase.value}")
            return cost
        if op.kind == "grouped_gemm" and op.shape[0] > 1 and ("grouped_gemm", op.dtype) not in self._raw:
            return self._grouped(op, pace)
        if op.kind in ATTENTION and ":" in op.name:
            self._check_kernel(op)
        if op.kind in ATTENTION and op.name != PREFILL:
            seconds = flash_seconds(op, self.gpu, self._device.peak(op.dtype), self.coefficient)
            if seconds is not None:
                return self._throttled(op, Cost(seconds, "interpolated", FLASH_UNCERTAINTY), pace)
        repeats = max(op.kernels, 1) if op.kind in MEMORY_BOUND and op.kind != "optimizer" else 1
        shape = (round(op.bytes / repeats),) if op.kind in MEMORY_BOUND else op.shape
        found = [c for via in _candidates(op, self._ops) if (c := self._from_table(via, op, shape)) is not None]
        if not found:
            return self._throttled(op, self._roofline(op), pace)
        if op.name.startswith("output_unaligned"):
            slower, doubt = self.coefficient("unaligned_matmul_slowdown", 1.0), UNALIGNED_UNCERTAINTY
            found = [Cost(c.seconds * slower, c.source, math.hypot(c.uncertainty, doubt)) for c in found]
        if op.kind in MATMULS:
            speed = self._matmul_speed / (self._gradient_slowdown if op.dtype == "fp8" and "grad" in op.name else 1.0)
            found = [Cost(c.seconds / speed, c.source, c.uncertainty) for c in found]
        best = min(found, key=lambda cost: (cost.source != "measured", cost.uncertainty))
        cost = self._throttled(op, Cost(best.seconds * repeats, best.source, best.uncertainty), pace)
        return Cost(cost.seconds + self._result_seconds(op), cost.source, cost.uncertainty)

    def _check_kernel(self, op: Compute) -> None:
        """That the profile knows the attention kernel that a scenario names; to the bare roofline all are one."""
        wanted, end = op.name.partition(":")[2], "_efficiency_128"
        if wanted in BY_STYLE or self.profile.name == "roofline":
            return
        known = {n.removesuffix(end) for n in self.profile.coefficients if n.endswith(end)} - {"attention", *BY_STYLE}
        known |= {kernel for op, _ in self._raw if (kernel := op.partition("attention_forward:")[2])}
        if wanted not in known:
            found = ", ".join(sorted(known)) or "none by name"
            raise InputError(f"training.attention_kernel: found '{wanted}'; profile {self.profile.name} has: {found}")

    def _throttled(self, op: Compute, cost: Cost, pace: float) -> Cost:
        """Under a sustained load the clock falls until the draw fits the power limit.

        Draw in parts of the reference GPU's limit: a memory-bound kernel `POWER_AT_REST`, more by the share u of
        the matrix units' peak that is in use, `power_at_peak` at all of it (fp32 uses none). At the low voltages of a
        limited GPU the energy of a flop stays about equal, so that time grows as draw / limit.
        """
        unlimited = not self._power_at_peak or op.kind in MEMORY_BOUND or op.dtype == "fp32"
        if unlimited or not op.flops or cost.seconds <= 0:
            return cost
        used = op.flops / (cost.seconds * self._device.peak(op.dtype))
        draw = POWER_AT_REST + (self._power_at_peak - POWER_AT_REST) * used
        slower = max(1.0, draw * pace / self._power_limit)
        error = math.hypot(cost.uncertainty, POWER_UNCERTAINTY * (slower - 1.0))
        return Cost(cost.seconds * slower, cost.source, error)

    def _grouped(self, op: Compute, pace: float) -> Cost:
        """A matmul over the rows of all groups, then the weights (or the sums kept of their gradients) of all but one.

        A group's rows are too few to hide its weights' traffic under its own tiles; each group is a launch of its own
        (Transformer Engine's `multi_stream_cublas_gemm`), which the many small ones wait for: `group_launch_s`.
        """
        groups, m, n, k = op.shape
        rows, n, k = (k, m, n) if op.phase is Phase.WEIGHT_GRAD else (m, n, k)
        shape = (1, groups * rows, n, k)
        once = measured_bytes(shape, op.dtype)
        whole = self.compute(Compute(op.name, "gemm", shape, op.dtype, op.flops, once, Phase.FORWARD), pace)
        bandwidth = self._device.bandwidth_bytes_per_s * self.coefficient("memory_efficiency", 1.0)
        seconds = whole.seconds + max(0.0, op.bytes - once) / bandwidth
        least = groups * self.coefficient("group_launch_s", 0.0)
        return Cost(max(seconds, least), "interpolated", math.hypot(whole.uncertainty, GROUPED_UNCERTAINTY))

    def _result_seconds(self, op: Compute) -> float:
        """What a matmul moves beyond its points (accumulating in fp32), as far as nothing hides it."""
        if op.kind not in MATMULS or not self.profile.kernels:
            return 0.0
        more = op.bytes - measured_bytes(op.shape, op.dtype)
        exposed = self.coefficient("result_exposed", EPILOGUE_EXPOSED)
        return max(0.0, exposed * more / self._device.bandwidth_bytes_per_s)

    def _roofline(self, op: Compute) -> Cost:
        seconds = self._device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        if op.kind in MEMORY_BOUND and "memory_efficiency" in self.profile.coefficients:
            efficiency = self.coefficient(f"memory_efficiency_{op.kind}", self.coefficient("memory_efficiency", 1.0))
            ramp = max(op.kernels, 1) * self.coefficient("memory_latency_s", 0.0)
            return Cost(seconds / efficiency + ramp, "interpolated", MEMORY_UNCERTAINTY)
        if op.flops and op.kind not in MEMORY_BOUND:
            seconds /= self.coefficient("matmul_efficiency", 1.0)
        floor = op.kernels * self.launch_overhead_s
        gaps = op.kernels * self.coefficient("kernel_gap_s", 0.0)
        return Cost(max(seconds, floor) + gaps, "roofline", ROOFLINE_UNCERTAINTY)

    def _from_table(self, via: _Candidate, op: Compute, shape: tuple[int, ...]) -> Cost | None:
        """Measured or interpolated seconds of one kernel; None where the profile has nothing near."""
        kind, dtype = op.kind, op.dtype
        table = self._table(via.op, dtype, kind)
        if table is None or not shape or shape[0] <= 0:
            return None
        here = self._device.shape_seconds(kind, shape, dtype) + table.floor_s
        before_s = table.quantizing_s(shape) if op.name == SERVED and any(table.input_s) else 0.0
        exact = table.exact(shape) if via.exact else None
        if exact is not None:
            there = self._reference.shape_seconds(kind, shape, dtype) + table.floor_s
            cost = _measured(exact[0] * (here / there) + before_s, exact[1])
            return cost if here == there else Cost(cost.seconds, "interpolated", ROOFLINE_UNCERTAINTY / 2)
        like, doubt = shape, via.uncertainty
        if kind in MATMULS and table.single and shape[0] > 1:
            like, doubt = (1, shape[0] * shape[1], *shape[2:]), max(doubt, 0.15)  # as many tiles, one product
        found = lookup(table, kind, like, self._device.sm_count or self._reference.sm_count)
        if found is None:
            return None
        efficiency, outside, between = found
        if via.op == "attention_forward" and kind == "attention_backward":
            efficiency *= self.coefficient("attention_backward_share", 1.0)
        error = math.hypot(between, doubt, _OUTSIDE_PER_OCTAVE * outside)
        seconds = max(here / efficiency, self.launch_overhead_s if outside and not table.floor_s else 0.0) + before_s
        source = "interpolated" if outside <= 1.0 else "roofline"
        return Cost(seconds, source, min(max(error, REPEAT_UNCERTAINTY), 1.0))

    def _table(self, op: str, dtype: str, kind: str) -> Table | None:
        for name in _like_dtypes(op, dtype, kind, self._raw):
            key = (op, name)
            if key in self._tables:
                return self._tables[key]
            if key in self._raw:
                self._tables[key] = make_table(kind, name, self._raw[key], replace(self._reference, sm_count=0))
                return self._tables[key]
            if key in self._stored:
                self._tables[key] = _stored_table(self.profile.kernels, op, name, kind, self.profile.reference)
                return self._tables[key]
        return None


def _normal_quantile(p: float) -> float:
    """Where the standard normal distribution reaches p, 0.5 to below 1, by Newton's method: from 0 it comes nearer
    from below alone, for the distribution is concave there. (`statistics` takes longer to import than a step to run.)

    >>> round(_normal_quantile(0.975), 12)
    1.95996398454
    """
    x, step = 0.0, 1.0
    while step > 1e-12:
        density = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        step = (p - 0.5 * math.erfc(-x / math.sqrt(2.0))) / density
        x += step
    return x


@lru_cache(maxsize=64)
def _stored_table(kernels: str, op: str, dtype: str, kind: str, reference: str) -> Table:
    from topology.presets import GPUS

    file = kernel_file(kernels)
    shapes, seconds, error = file.points(op, dtype)
    spread, device = np.broadcast_to(0.0, len(seconds)), _device(GPUS[reference])
    return table_of(kind, dtype, shapes, seconds, spread, device, True, error, file.input_s(op, dtype))


def _candidates(op: Compute, known: Container[str]) -> list[_Candidate]:
    """Tables that can price `op`, of those that there are; of equally sure ones the first is taken."""
    phase = f"_{op.phase.value}" if op.phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) else ""
    found = []
    if op.kind in MEMORY_BOUND:
        found.append((f"{op.kind}:{op.name}", True, 0.0))
    if op.kind in ATTENTION and ":" in op.name:
        found.append((f"{op.kind}:{op.name.partition(':')[2]}", True, 0.0))
    if op.kind == "norm" and op.kernels > NORM_KERNELS:
        found.append((f"norm_eager{phase}", True, 0.0))
    if phase:
        found.append((f"{op.kind}{phase}", True, 0.0))
    found.append((op.kind, not phase or op.kind.startswith("attention"), 0.05 if phase else 0.0))
    if op.kind == "grouped_gemm":
        found += [(f"gemm{phase}", False, 0.15), ("gemm", False, 0.15)]
    if op.kind == "attention_backward":
        found.append(("attention_forward", False, 0.25))
    return [_Candidate(*table) for table in found if table[0] in known]


def _like_dtypes(op: str, dtype: str, kind: str, known: dict[tuple[str, str], list[PointTable]]) -> list[str]:
    """Dtypes whose points serve: bf16 and fp16 run alike, mxfp8 as fp8; what is bound by memory depends on bytes."""
    names = [dtype, {"bf16": "fp16", "fp16": "bf16", "mxfp8": "fp8"}.get(dtype, dtype)]
    return names + [d for o, d in known if o == op] if kind in MEMORY_BOUND else names


def _collective(table: CollectiveTable, bytes_: float) -> Cost:
    size, seconds, last = table.bytes, table.seconds, len(table.bytes) - 1
    above = int(size.searchsorted(bytes_))  # the first that is no less
    spread = float(table.spread[min(above, last)])
    if above > last:
        slope = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2]) if last > 0 else 0.0
        slope = slope if slope > 0 else seconds[-1] / size[-1]
        outside = math.log2(bytes_ / size[-1])
        error = math.hypot(0.05, _OUTSIDE_PER_OCTAVE * min(outside, 3.0), 1.4826 * spread)
        return Cost(float(seconds[-1] + slope * (bytes_ - size[-1])), "interpolated", error)
    if size[above] == bytes_:
        return _measured(float(seconds[above]), spread)
    if above == 0:
        return Cost(float(seconds[0]), "interpolated", math.hypot(0.1, 1.4826 * spread))
    size, seconds = size[above - 1 : above + 1], seconds[above - 1 : above + 1]
    inside = np.interp(math.log(bytes_), np.log(np.maximum(size, 1e-9)), np.log(seconds))
    return Cost(float(np.exp(inside)), "interpolated", math.hypot(0.05, 1.4826 * spread))


def _measured(seconds: float, spread: float) -> Cost:
    """A normal distribution's standard deviation is 1.4826 median absolute deviations."""
    return Cost(seconds, "measured", max(1.4826 * spread, REPEAT_UNCERTAINTY))


def _device(gpu: GpuSpec) -> Device:
    return Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)


def _own_device(profile: Profile, gpu: GpuSpec) -> Device:
    """The data sheet with what was measured on this very machine in its place."""
    found = profile.coefficients
    peak = {
        d: found[f"peak_{d}_flops_per_s"].value
        for d in ("fp32", "bf16", "fp16", "fp8")
        if f"peak_{d}_flops_per_s" in found
    }
    bandwidth = found.get("memory_bandwidth_bytes_per_s")
    return Device(
        gpu.name,
        {**gpu.peak_flops_per_s, **peak},
        gpu.memory_bandwidth_bytes_per_s if bandwidth is None else bandwidth.value,
    )


def _reference_w(gpu: GpuSpec, home: GpuSpec) -> float:
    """Watts in whose parts `gpu` draws power as the coefficients of `home` say: the same where it is the same chip (as
    many multiprocessors of one peak, whatever the board), else its own data sheet's limit.
    """
    from topology.presets import GPUS

    if gpu.sm_count == home.sm_count and gpu.peak_flops_per_s.get("fp16") == home.peak_flops_per_s.get("fp16"):
        return home.power_limit_w
    return GPUS.get(gpu.name, gpu).power_limit_w


def _gpu_named(profile: Profile) -> GpuSpec:
    from topology.presets import GPUS

    if profile.reference not in GPUS:
        found, names = profile.reference, ", ".join(sorted(GPUS))
        raise InputError(f"profile {profile.name!r}: reference: found {found!r}; allowed: {names}")
    return GPUS[profile.reference]
