"""Price one kernel by measured points: by the point of its shape, else by the efficiency of points around it.

The points of a profile, by `op` of a table:

- `gemm`, `gemm_input_grad`, `gemm_weight_grad`: the same product in the memory layouts of a linear layer's forward,
  input gradient and weight gradient; shape (batch, m, n, k). `grouped_gemm`: the same with groups for the batch;
- `attention_forward`, `attention_backward`: fused; (batch, heads, kv_heads, q_len, kv_len, head_dim,
  v_head_dim, causal);
- `attention_decode`, `moe_layer`: as `sim.core.program.Compute` describes them;
- memory-bound kinds: shape (bytes,), the bytes that one kernel reads and writes; `elementwise:gelu` is one operator,
  `elementwise_input_grad` any elementwise backward, `elementwise` any elementwise operator; `norm_eager` is one kernel
  of an RMSNorm in separate operators.

Matmuls and experts whose weights have a format of their own end in it: `gemm:fp8_block`, `moe_layer:w4a16_mxfp4`. Of
tables that differ only in the engine that they were measured in, the one of the wanted engine is taken, of its newest
release that is not newer; else one of another engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import peak_flops_per_s
from sim.core.operator_kinds import ATTENTION, COUNTED, MATMULS, MEMORY_BOUND, MOE_LAYER
from sim.core.program import EAGER_NORM, Compute, Phase
from sim.core.quantization import TABLE_FORMATS
from sim.prices.coefficients import USUAL_KERNEL, Coefficients
from sim.prices.cost import OUTSIDE_PER_OCTAVE, REPEAT_UNCERTAINTY, Cost, measured
from sim.prices.kernel_file import TableName, kernel_file
from sim.prices.kernel_tables import Table, adjusted, lookup, make_table, weights_of
from sim.prices.profile import PointTable, Profile
from sim.prices.roofline import Device

SHOWN_FROM = 2.0  # times of a table's fastest point, from which on a kernel takes longer than its call
TF32_UNCERTAINTY = 0.15  # of taking bf16's efficiency for tf32's, as of a grouped product by single ones
UNTUNED_UNCERTAINTY = 0.35  # standard deviation of the logarithms whose mean AMD's `untuned_slowdown` is
PLACES = ("at their points", "between points", "beyond their points")
BUNDLED_FLASH = "torch_2024"
_ATTENTION_KERNEL = "attention_forward:"


class _Candidate(Struct, frozen=True):
    """Hold a table that may price an operator."""

    op: str
    exact: bool  # True: the points are of this operator; False: only their efficiency is used
    uncertainty: float  # of using one operator's efficiency for another


class TablePrices:
    """Price kernels on `device` by the points of a profile and of its kernel file, measured on `reference`."""

    def __init__(
        self,
        profile: Profile,
        device: Device,
        reference: Device,
        coefficients: Coefficients,
        launch_s: float,
        engine: str = "",
    ) -> None:
        """`engine`: the engine and release whose kernels run, such as "vLLM 0.24.0"; empty: none."""
        self._device, self._reference, self._launch_s, self._engine = device, reference, launch_s, engine
        usual, self._untuned = coefficients.attention.get(USUAL_KERNEL), coefficients.untuned_slowdown
        # Forward points replace missing backward points, with the default kernel's `backward_share`.
        self._backward_share = 1.0 if usual is None else usual.backward_share
        # Tables are indexed on first use: a profile has dozens, and a run needs a few.
        self._raw: dict[tuple[str, str], list[PointTable]] = {}
        for table in profile.points:
            for op in _named(table.op):
                self._raw.setdefault((op, table.dtype), []).append(table)
        self._kernels, self._home = profile.kernels, profile.reference
        # Only names: the header lists the tables without reading points.
        self._stored: dict[tuple[str, str], list[str]] = {}
        for op, dtype, source in kernel_file(profile.kernels).tables if profile.kernels else ():
            self._stored.setdefault((op, dtype), []).append(source)
        self._ops = {op for op, _ in (*self._raw, *self._stored)}
        self._tables: dict[tuple[str, str], Table] = {}
        self.used: dict[str, str] = {}  # by operator and format: whose kernels priced it

    @property
    def attention_kernels(self) -> set[str]:
        """Return the attention kernels that have points."""
        return {kernel for op, _ in self._raw if (kernel := op.partition(_ATTENTION_KERNEL)[2])}

    def floor_s(self, op: Compute) -> float:
        """Return the fastest call of the table of exactly this kind, to which efficiencies are relative; 0 without."""
        table = self._table(op.kind, op.dtype, op.kind)
        return 0.0 if table is None else table.floor_s

    def has_points(self, op: str, dtype: str) -> bool:
        """Tell whether the profile itself, not its kernel file, has points of exactly this operator and dtype."""
        return (op, dtype) in self._raw

    def knows(self, op: Compute) -> bool:
        """Tell whether there are points of exactly this operator's kernel."""
        return f"{op.kind}:{op.kernel}" in self._ops

    def costs(self, op: Compute, shape: tuple[int, ...]) -> list[Cost]:
        """Return the cost of one kernel of `op` with this shape by suitable tables, in order of preference.

        Of kernels bound by memory, no table follows one that shows this kernel's own speed. Small kernels' points show
        how long their calls take (a backward's, how long autograd takes), so that another table may know more.
        """
        found = []
        for via in _candidates(op, self._ops):
            cost = self._through(via, op, shape)
            if cost is None:
                continue
            found.append(cost)
            table = self._table(via.op, op.dtype, op.kind)
            if op.kind in COUNTED and len(found) == 1 and table is not None:
                self._note(op, table, cost)
            own = via.exact and op.kind in MEMORY_BOUND and cost.source != "roofline"
            if own and table is not None and cost.seconds > SHOWN_FROM * float(table.seconds.min()):
                break
            if op.kind in COUNTED and op.kernel and via.op == f"{op.kind}:{op.kernel}":
                break  # others say nothing that this kernel's own points do not
        return found

    def _note(self, op: Compute, table: Table, cost: Cost) -> None:
        """Note whose kernels priced an operator, and the least certain place among their points."""
        known = ", ".join(filter(None, (table.kernels, table.source))) or "the profile's tables"
        name, whose = f"{op.kind} {op.kernel or op.dtype}", f"{known} on {table.device.name}, "
        had = self.used.get(name, "").removeprefix(whose)
        place = {"measured": 0, "interpolated": 1}.get(cost.source, 2)
        self.used[name] = whose + PLACES[max(place, PLACES.index(had) if had in PLACES else 0)]

    def _through(self, via: _Candidate, op: Compute, shape: tuple[int, ...]) -> Cost | None:
        """Return the measured or interpolated cost of one kernel; None if the table has no point near it."""
        table = self._table(via.op, op.dtype, op.kind)
        # A shape with 0 rows (an expert without tokens) has no logarithm.
        if table is None or not shape or min(shape[:2]) <= 0:
            return None
        # Roofline plus floor on this device: the table's efficiency is relative to this sum.
        usual = self._device.shape_seconds(op.kind, shape, op.dtype, table.weight_bytes) + table.floor_s
        here = self._device.seconds(op.kind, op.flops, op.bytes, op.dtype) + table.floor_s if op.own_bytes else usual
        # Tables exclude the input's quantization. Training has an operator for it; for served layers it is added here.
        before_s = table.quantizing_s(shape) if op.served and any(table.input_s) else 0.0
        point = table.exact(shape) if via.exact and not _of_other_format(table, op) else None
        if point is None:
            return self._interpolated(via, op, table, shape, here, before_s)
        # A chip that was measured in fp8 may not multiply in mxfp8 (Hopper).
        known = peak_flops_per_s(self._reference.peak_flops_per_s, op.dtype) is not None
        dtype = op.dtype if known else table.dtype
        there = self._reference.shape_seconds(op.kind, shape, dtype, table.weight_bytes) + table.floor_s
        cost = measured(point[0] * (here / there) + before_s, point[1])
        # Equal rooflines: the measured machine itself. `Costs` adds the uncertainty of the ratio.
        return cost if usual == there else cost._replace(source="interpolated")

    def _interpolated(
        self, via: _Candidate, op: Compute, table: Table, shape: tuple[int, ...], roofline_s: float, before_s: float
    ) -> Cost | None:
        """Return the cost by the efficiency of the table's points near a shape; None if there are none.

        `roofline_s`: of the shape on this device, with the table's floor; `before_s`: of what runs before the kernel.
        """
        like: tuple[float, ...] = shape
        doubt = max(via.uncertainty, TF32_UNCERTAINTY) if _of_other_format(table, op) else via.uncertainty
        if op.kind in MATMULS and table.single and shape[0] > 1:
            like, doubt = (1, shape[0] * shape[1], *shape[2:]), max(doubt, 0.15)  # as many tiles, one product
        if op.kind in ATTENTION and not op.served:
            like = _as_more_heads(shape, float(table.shapes.sizes[0].max()))
        # A GPU described by hand may not state its multiprocessors (1); then those of the reference are taken.
        sm_count = self._device.sm_count if self._device.sm_count > 1 else self._reference.sm_count
        found = lookup(table, op.kind, like, sm_count)
        if found is None:
            return None
        efficiency, outside, between = found
        if via.op == "attention_forward" and op.kind == "attention_backward":
            efficiency *= self._backward_share
        # Independent errors: interpolation, points of another operator, distance from the measured range.
        error = math.hypot(between, doubt, OUTSIDE_PER_OCTAVE * outside)
        # Outside the range a tiny kernel's efficiency would give almost 0 s, but no kernel is faster than its launch.
        seconds = max(roofline_s / efficiency, self._launch_s if outside and not table.floor_s else 0.0) + before_s
        if self._untuned > 1.0 and _untuned(op, table):
            seconds, error = seconds * self._untuned, math.hypot(error, UNTUNED_UNCERTAINTY)
        # Beyond one octave the efficiency is a guess, so the source is not a measurement.
        source = "interpolated" if outside <= 1.0 else "roofline"
        return Cost(seconds, source, min(max(error, REPEAT_UNCERTAINTY), 1.0))

    def _table(self, op: str, dtype: str, kind: str) -> Table | None:
        for name in _like_dtypes(op, dtype, kind, self._raw):
            key = (op, name)
            if key in self._tables:
                return self._tables[key]
            if key in self._raw:
                self._tables[key] = self._own_table(kind, *key)
                return self._tables[key]
            if key in self._stored:
                stored = TableName(op, name, nearest_source(self._stored[key], self._engine))
                self._tables[key] = _stored_table(self._kernels, stored, kind, self._home)
                return self._tables[key]
        return None

    def _own_table(self, kind: str, op: str, dtype: str) -> Table:
        """Return the table of the profile's own points."""
        tables = self._raw[op, dtype]
        source = nearest_source({table.source for table in tables}, self._engine)
        tables = [table for table in tables if table.source == source]
        # A profile's own few dozen points cannot determine three more slopes, and may all be large.
        many = bool(source)
        device = self._reference if many else replace(self._reference, sm_count=0)
        found = make_table(kind, dtype, tables, device, floored=many, weight_bytes=_weight_bytes(op))
        return replace(found, source=source, kernels=tables[-1].kernels)


def nearest_source(sources: Iterable[str], engine: str) -> str:
    """Return the engine and release among `sources` whose kernels are nearest to those of `engine`.

    That is the newest release of the same engine that is not newer, else its oldest one; else "" (measured in no engine
    of note), or the last of the others by name.

    >>> nearest_source(["", "SGLang 0.5.14", "vLLM 0.19.0", "vLLM 0.24.0"], "vLLM 0.22")
    'vLLM 0.19.0'
    """
    known = sorted(sources, key=lambda source: (source.partition(" ")[0], release_of(source)))
    same = [source for source in known if source and source.partition(" ")[0] == engine.partition(" ")[0]]
    if not same:
        return "" if "" in known else known[-1]
    return next((source for source in reversed(same) if release_of(source) <= release_of(engine)), same[0])


def release_of(source: str) -> tuple[int, ...]:
    """Return the numbers of a source's release."""
    return tuple(int(number) for number in re.findall(r"\d+", source.partition(" ")[2]))


def _untuned(op: Compute, table: Table) -> bool:
    """Tell whether an engine's library has no record of weights of these sizes, and runs its default kernel.

    Other matmuls are left to the vendor's library, which chooses by rules and not by records. A shared expert may be
    one more routed expert, which all tokens choose.
    """
    if op.kind != MOE_LAYER and not (op.kind == "gemm" and op.kernel in TABLE_FORMATS):
        return False
    own = weights_of(table.kind, op.shape)
    fused = (*own[:2], *(size + 1 for size in own[2:])) if table.kind == MOE_LAYER else own
    return own not in table.weights and fused not in table.weights


def _named(op: str) -> tuple[str, ...]:
    """Return the names of a table's operator: torch's flash is the FlashAttention-2 that it bundles."""
    return (f"{op}2", f"{op.removesuffix('flash')}{BUNDLED_FLASH}") if op.endswith(":flash") else (op,)


def _weight_bytes(op: str) -> float | None:
    """Return the bytes of a weight of a table whose name ends in a format; None for others."""
    return TABLE_FORMATS.get(op.partition(":")[2])


# Cached for the process, because every `Costs` of a sweep uses the same tables.
@lru_cache(maxsize=64)
def _stored_table(kernels: str, name: TableName, kind: str, reference: str) -> Table:
    from topology.presets import GPUS

    file = kernel_file(kernels)
    shapes, seconds, error = file.points(*name)
    spread, device = np.broadcast_to(0.0, len(seconds)), Device.of(GPUS[reference])
    table = Table(kind, name.dtype, device, shapes, seconds, spread, error, file.input_s(*name))
    told = replace(table, weight_bytes=_weight_bytes(name.op), source=name.source, kernels=file.kernels_of(name))
    return adjusted(told, floored=True)


def _candidates(op: Compute, known: Container[str]) -> list[_Candidate]:
    """Return the existing tables that can price `op`, in order of preference."""
    phase = f"_{op.phase.value}" if op.phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) else ""
    found = []
    if op.kernel:
        # A kernel's own name precedes its phase, which precedes the kind.
        own = f"{op.kind}:{op.kernel}"
        # Points of the kernel itself are closer than any other kernel's, however far they are apart: a scalar loop of
        # SiLUs takes ten times as long as a sum, and a convolution longer than the matmul that computes it.
        if own in known and op.kind not in COUNTED:
            return [_Candidate(own, True, 0.0)]
        found.append((own, True, 0.0))
    if op.kind == "norm" and op.kernel == EAGER_NORM:
        found.append((f"norm_eager{phase}", True, 0.0))
    if phase:
        found.append((f"{op.kind}{phase}", True, 0.0))
    # The kind's table has points of another phase or kernel: a tanh takes longer than a sum.
    others = bool(phase) or (op.kind == "elementwise" and bool(op.kernel))
    found.append((op.kind, not phase or op.kind in ATTENTION, 0.05 if others else 0.0))
    # A grouped product runs the tiles of plain products, so their efficiency is used.
    if op.kind == "grouped_gemm":
        found += [(f"gemm{phase}", False, 0.15), ("gemm", False, 0.15)]
    # Forward and backward kernels differ (registers, atomics), so this is the last choice.
    if op.kind == "attention_backward":
        found.append(("attention_forward", False, 0.25))
    return [_Candidate(*table) for table in found if table[0] in known]


def _of_other_format(table: Table, op: Compute) -> bool:
    """Tell whether an operator in tf32 is priced by a table of another dtype."""
    return op.dtype == "tf32" != table.dtype


def _as_more_heads(shape: tuple[int, ...], most: float) -> tuple[float, ...]:
    """Return attention of more sequences than were measured as attention of as many more heads.

    Each head of each sequence has thread blocks of its own.

    >>> _as_more_heads((16, 12, 4, 1024, 1024, 64, 64, 1), 4.0)
    (4.0, 48.0, 16.0, 1024, 1024, 64, 64, 1)
    """
    more = shape[0] / most
    return shape if more <= 1.0 else (most, shape[1] * more, shape[2] * more, *shape[3:])


def _like_dtypes(op: str, dtype: str, kind: str, known: dict[tuple[str, str], list[PointTable]]) -> list[str]:
    """Return dtypes with suitable points: bf16 and fp16 are equal, mxfp8 is as fp8; memory-bound kinds take any.

    Of bf16's points tf32 takes the efficiency: both run the tensor cores' kernels.
    """
    names = [dtype, {"bf16": "fp16", "fp16": "bf16", "mxfp8": "fp8", "tf32": "bf16"}.get(dtype, dtype)]
    return names + [d for o, d in known if o == op] if kind in MEMORY_BOUND else names
