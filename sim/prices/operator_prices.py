"""Price operators: by measured points, by interpolation between points, or by the roofline.

Points have the time of a kernel in a stream of kernels, including its launch. The roofline adds the launch:
max(flops/peak, bytes/bandwidth, kernels x launch_overhead_s) + kernels x kernel_gap_s, with the first two terms divided
by `matmul_efficiency` for matmuls and attention. `launch_overhead_s` is the shortest time from one launch to the next
(the host cannot issue faster, and an empty kernel takes about as long), so it is a floor that longer kernels hide.
`kernel_gap_s` is never hidden: it is 0 unless measured; on a CPU it is the dispatch of an operator, which runs on the
core that computes. With a profile's `memory_efficiency`, kernels that memory binds take
bytes / (bandwidth x efficiency) + kernels x memory_latency_s instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import numpy as np
from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.core.normal import normal_quantile
from sim.core.operator_kinds import ATTENTION, MATMULS, MEMORY_BOUND
from sim.core.program import (
    TORCH_SOFTMAX_BACKWARD,
    TORCH_SOFTMAX_SHORT_BACKWARD,
    Compute,
    Phase,
)
from sim.core.quantization import TABLE_FORMATS
from sim.prices.attention_speed import OF_SHAPES, attention_peak, flash_seconds
from sim.prices.attention_speed import UNCERTAINTY as FLASH_UNCERTAINTY
from sim.prices.coefficients import AS_STATED, STRIDED, PriceOptions
from sim.prices.collective_tables import collective_cost
from sim.prices.cost import Cost, measured
from sim.prices.fp32_matmuls import fp32_seconds
from sim.prices.instructions import with_instructions
from sim.prices.kernel_tables import TILES, least_waves, measured_bytes
from sim.prices.nearby import shifts_near
from sim.prices.point_corrections import MEMORY_UNCERTAINTY, PointCorrections
from sim.prices.power_limit import PowerLimit
from sim.prices.profile import BlockPoint, CollectiveTable, Profile
from sim.prices.random_numbers import DRAWN, with_draws
from sim.prices.reference_gpu import (
    OTHER_CHIP_UNCERTAINTY,
    borrowed_uncertainty,
    measured_device,
    reference_gpu,
)
from sim.prices.roofline import Device
from sim.prices.table_prices import TablePrices
from sim.prices.unvectorized import (
    MEASURED_APART,
    SUMS_ROWS,
    least_seconds,
    optimizer_slowdown,
    sm_clocks_per_s,
    sum_seconds,
)
from sim.prices.unvectorized import UNCERTAINTY as UNVECTORIZED_UNCERTAINTY
from sim.variants.frameworks.parts import AttentionKernel
from sim.variants.frameworks.records import attention_picks
from topology.spec import GpuSpec

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

Shifts = tuple[tuple[str, float], ...]  # of coefficients' logarithms, by name on disk
ROOFLINE_UNCERTAINTY = 0.3  # real kernels reach 0.4 to 0.9 of the roofline
GROUPED_UNCERTAINTY = 0.1  # error of pricing a grouped matmul as one matmul and its weights' traffic (b200_kernels)
MMA_SYNC = 0.63  # of Hopper's peak, for mma is not wgmma (Luo et al. 2024, arXiv 2402.13499; not checked again)
# Before each of these kernels runs another one, which moves as many bytes; the operator's `bytes` leave them out.
OF_TWO_KERNELS = (TORCH_SOFTMAX_SHORT_BACKWARD, TORCH_SOFTMAX_BACKWARD)


class Costs:
    """Price operators on one GPU with one profile. Results are cached.

    A profile with a `reference` other than `gpu` is scaled by the ratio of the two rooflines. `coefficients`: the
    profile's, shifted by `shifts` (`Coefficients.shifted`), with `options` applied.
    """

    def __init__(self, profile: Profile, gpu: GpuSpec, options: PriceOptions = AS_STATED, shifts: Shifts = ()) -> None:
        self.profile, self.gpu, self._options, self.engine = profile, gpu, options, options.engine
        self._by_shifts: dict[Shifts, Costs] = {shifts: self}
        self.coefficients = options.applied(profile.coefficients.shifted(dict(shifts)))
        # With a reference, the coefficients' bandwidth and peaks are the reference's, not those of `gpu`.
        self._device = measured_device(profile, gpu) if not profile.reference else Device.of(gpu)
        reference = reference_gpu(profile, gpu)
        measured_on = Device.of(reference) if profile.reference else self._device
        self.power = PowerLimit.of(self.coefficients, gpu, reference, acts=options.power)
        self._borrowed, self._measured_on = borrowed_uncertainty(gpu, reference), measured_on
        self._points = TablePrices(
            profile, self._device, measured_on, self.coefficients, self.launch_overhead_s, options.engine
        )
        self._corrections = PointCorrections(self.coefficients, gpu, self._device)
        self._sm_clocks_per_s = sm_clocks_per_s(gpu)
        self._has_tf32 = "tf32" in gpu.peak_flops_per_s and gpu.chip.rounds_fp32
        self._blocks: dict[tuple[str, str, int], BlockPoint] = {(b.key, b.phase, b.run): b for b in profile.blocks}
        # Another chip's collectives say nothing about this one's links. Tables of more ranks than cores are used only
        # through `shared_cores`, which sets `ranks_per_core` to 1.
        collectives = profile.collectives if self._borrowed < OTHER_CHIP_UNCERTAINTY else ()
        self._collectives: dict[tuple[str, int], CollectiveTable] = {
            (c.op, c.ranks): c for c in collectives if c.ranks_per_core == 1 and not c.source
        }
        # `pace` is in the key, because with a power limit a kernel takes longer in a large job.
        self._cache: dict[tuple[Compute, float], Cost] = {}
        self._accepted: set[str] = set()  # attention kernels that were checked: a search asks for each operator

    def near(self, scenario: Scenario) -> Costs:
        """Return the prices with the coefficients that the profile has near this scenario (`sim.prices.nearby`)."""
        if not self.profile.nearby:
            return self
        shifts: Shifts = tuple(sorted(shifts_near(self.profile.nearby, scenario, self.gpu).items()))
        if shifts not in self._by_shifts:
            other = Costs(self.profile, self.gpu, self._options, shifts)
            other._by_shifts = self._by_shifts
            self._by_shifts[shifts] = other
        return self._by_shifts[shifts]

    @property
    def launch_overhead_s(self) -> float:
        """Return the shortest time from one kernel launch to the next: the profile's, else the GPU's."""
        stated = self.coefficients.launch_overhead_s
        return self.gpu.launch_overhead_s if stated is None else stated

    def host_s(self, op: Compute, plain: bool = False) -> float:
        """Return the seconds in which the host issues an operator's kernels; see `sim.programs.compile`.

        `plain`: plain torch issues all operators (`Framework.plain_host`).
        """
        return op.share * self._issued_s(op, plain)

    def _issued_s(self, op: Compute, plain: bool) -> float:
        c = self.coefficients
        # A fused optimizer has few kernels, but its Python loops over all parameters, so the step is timed as a whole.
        if op.kind == "optimizer":
            return c.host_step_s * op.host_share
        each_s = c.host_operator_s
        if (plain or op.plain_host) and c.host_operator_eager_s is not None:
            each_s = c.host_operator_eager_s
        if op.within_call:
            return op.kernels * c.group_launch_s if each_s else 0.0
        # A library's loop in C++ issues launches faster than Python.
        if op.looped and each_s:
            return each_s + op.kernels * c.group_launch_s
        if op.one_call and op.kernels > 1:
            return each_s + (op.kernels - 1) * min(each_s, c.group_launch_s)
        return op.kernels * each_s

    def pace(self, ranks: int) -> float:
        """Return the time of the slowest of `ranks` GPUs at their power limit ÷ that of an average GPU.

        GPUs of one kind differ there by `power_spread` (standard deviation ÷ mean), and a step waits for the slowest:
        the expected largest of n normal variables, by Blom's approximation.
        """
        spread = self.coefficients.power_spread
        if ranks < 2 or not spread:
            return 1.0
        # (n - 3/8) / (n + 1/4): the quantile of the largest of n (Blom 1958).
        return 1.0 + spread * normal_quantile((ranks - 0.375) / (ranks + 0.25))

    def compute(self, op: Compute, pace: float = 1.0) -> Cost:
        """Return the cost of one operator; `pace`: the result of `pace`, if other ranks wait for this one.

        Raises:
            InputError: if the GPU has no peak for the operator's dtype.
            ValueError: if it is a measured block that the profile does not have.
        """
        cost = self._cache.get((op, pace))
        if cost is None:
            cost = self._cache[op, pace] = self._price(op, pace)
        return cost

    def block(self, key: str, phase: str, run: int = 0) -> Cost | None:
        """Return the cost of a measured block of the model; None if there is none."""
        point = self._blocks.get((key, phase, run)) if key else None
        return None if point is None else measured(point.seconds, point.spread)

    def collective(self, op: str, ranks: int, bytes_: float) -> Cost | None:
        """Return the cost of a collective within a node; None if this group size was not measured."""
        table = self._collectives.get((op, ranks))
        return None if table is None else collective_cost(table, bytes_)

    def _price(self, op: Compute, pace: float) -> Cost:
        if op.dtype == "tf32" and not self._has_tf32:
            return self._price(replace(op, dtype="fp32"), pace)
        if op.share < 1.0:
            # A kernel takes its whole time where it runs, so the mean is taken over times and not over bytes.
            once = replace(op, flops=op.flops / op.share, bytes=op.bytes / op.share, share=1.0)
            cost = self._price(once, pace)
            return cost._replace(seconds=op.share * cost.seconds)
        cost = self._alone(op, pace)
        if self._borrowed:
            source = "interpolated" if cost.source == "measured" else cost.source
            cost = Cost(cost.seconds, source, math.hypot(cost.uncertainty, self._borrowed))
        return self._in_model(op, cost)

    def _alone(self, op: Compute, pace: float) -> Cost:
        """Price an operator's kernels as if nothing ran around them, by the first rule that applies.

        The roofline is the last rule.
        """
        # Blocks come first, because they were timed as a whole. Points come last, because those of grouped matmuls and
        # of attention are mostly of serving libraries' kernels.
        served = op.served and op.kind in ATTENTION
        points, published = self._from_points, self._attention
        of_kernel = (points, published) if served else (published, points)
        prices = (self._measured_block, self._grouped, *of_kernel, self._kernel_by_kernel)
        found = next((cost for price in prices if (cost := price(op, pace)) is not None), None)
        cost = found or self.power.throttled(op, self._roofline(op), pace, self._device)
        cost = self._bound_by_memory(op, self._computing_tiles(op, self._without_tensor_cores(op, cost)))
        cost = self._bound_by_instructions(op, cost)
        cost = self._issuing(op, cost)
        return self._summing_rows(op, self._drawing(op, cost))

    def _without_tensor_cores(self, op: Compute, cost: Cost) -> Cost:
        known = self._sm_clocks_per_s and not self.profile.bare
        if op.kind not in MATMULS or op.dtype != "fp32" or not known or self._points.has_points(op.kind, "fp32"):
            return cost  # points of the user's own machine have the starts; groups are priced by points of one matmul
        peak, clocks_per_s = self._device.peak("fp32"), self._sm_clocks_per_s
        return cost._replace(seconds=fp32_seconds(op, cost.seconds, peak, self.gpu.sm_count, clocks_per_s))

    def _computing_tiles(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a borrowed matmul that computes fewer rows than a tile has, which it computes all the same.

        Points of a GPU with more multiprocessors for its memory do not show it: an H20's 78 draw a third of its
        bandwidth where one token is multiplied. The least tile is that of `TILES`, its speed that of matmuls without
        points (`matmul_efficiency`). Kernels that convert weights to 16 bits multiply 16 rows by mma.sync (Marlin,
        arXiv 2408.11743), which has `MMA_SYNC` of Hopper's peak.
        """
        if op.kind != "gemm" or not self._borrowed or self.gpu.sm_count < 2 or dtype_bytes(op.dtype) > 2:
            return cost
        batch, m, n, k = op.shape
        converts = op.kernel in TABLE_FORMATS and dtype_bytes(op.dtype) == 2
        rows, columns = (16, 64) if converts else np.min(TILES, axis=0).tolist()
        mma = MMA_SYNC if converts and self.gpu.kernel_architecture == "hopper" else 1.0
        speed = mma * self.coefficients.matmul_efficiency
        if m >= rows and n >= columns:
            return cost
        padded = 2.0 * batch * max(m, rows) * max(n, columns) * k / speed
        home, here = self._measured_on, self._device
        # A reference that is quicker than whole tiles has kernels with smaller ones.
        sizes = op.kind, op.flops, op.bytes, op.dtype
        there_s = cost.seconds * home.seconds(*sizes) / here.seconds(*sizes)
        least_s = min(padded / here.peak(op.dtype), there_s * home.peak(op.dtype) / here.peak(op.dtype))
        return cost._replace(seconds=max(cost.seconds, least_s))

    def _bound_by_memory(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a matmul that its points would let read faster than memory is: those have matrices that stay in the
        L2 cache, which holds no more than `Chip.cache_bytes` of this one's."""
        cached = self.gpu.chip.cache_bytes
        if op.kind != "gemm" or not 0 < cached < op.bytes or cost.source == "measured" or not self._sm_clocks_per_s:
            return cost
        bandwidth = self._device.bandwidth_bytes_per_s * self.coefficients.streaming_efficiency
        return cost._replace(seconds=max(cost.seconds, (op.bytes - cached) / bandwidth))

    def _summing_rows(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a sum over rows, whose thread blocks wait for each other."""
        # A CPU has no such blocks, and a profile's points of such sums were measured with the wait.
        if op.sums is None or not self._sm_clocks_per_s or (op.kernel == SUMS_ROWS and self._points.knows(op)):
            return cost
        seconds = sum_seconds(op.sums, cost.seconds, self._sm_clocks_per_s, self.gpu.sm_count)
        return cost._replace(seconds=seconds)

    def _drawing(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a kernel that draws random numbers."""
        # Points of kernels that draw were measured with it.
        measured_so = op.block is not None or (op.kernel == DRAWN and self._points.knows(op))
        if not op.random_numbers or measured_so:
            return cost
        return cost._replace(seconds=with_draws(cost.seconds, op.random_numbers, self._sm_clocks_per_s))

    def _issuing(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a kernel whose instructions were counted; points of its kind were measured with them."""
        if not op.instructions or (op.kernel and self._points.knows(op)):
            return cost
        return cost._replace(seconds=with_instructions(cost.seconds, op.instructions, self._sm_clocks_per_s))

    def _bound_by_instructions(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a kernel whose instructions take longer than its bytes."""
        if not (op.single_elements or op.rows_in_turn or op.clocks or op.lone_clocks):
            return cost
        # Points of such kernels have these instructions; those of casts are of the dtype that is written.
        cast = op.kind == "cast" and self._points.has_points("cast", op.dtype)
        if cast or (op.kernel in MEASURED_APART and self._points.knows(op)):
            return cost
        if self._sm_clocks_per_s and (slower := optimizer_slowdown(op)) > 1.0:
            return cost._replace(seconds=slower * cost.seconds)
        least_s = least_seconds(op, self._sm_clocks_per_s, self.gpu.sm_count)
        return cost if least_s <= cost.seconds else Cost(least_s, "interpolated", UNVECTORIZED_UNCERTAINTY)

    def _in_model(self, op: Compute, cost: Cost) -> Cost:
        """Add the time of modules and autograd on a CPU, which run on the core that computes.

        It is added once for each kernel, and once for one call that issues several; a call has it where its first
        kernel is priced.
        """
        # A block was timed inside a model. One call launches an optimizer's kernels.
        added_s = 0.0 if op.block is not None or op.kind == "optimizer" else self.coefficients.operator_in_model_s
        calls = 0 if op.within_call else 1 if op.looped or op.one_call else max(op.kernels, 1)
        return cost._replace(seconds=cost.seconds + calls * added_s) if added_s else cost

    def _measured_block(self, op: Compute, pace: float) -> Cost | None:
        """Price a measured run of computations, which includes the effect of the power limit."""
        if op.block is None:
            return None
        cost = self.block(*op.block)
        if cost is None:
            raise ValueError(f"profile {self.profile.name!r}: no block {op.block.key!r}, {op.block.phase}")
        return cost

    def _grouped(self, op: Compute, pace: float) -> Cost | None:
        """Price a grouped matmul as one matmul over all rows, plus the traffic of all groups' weights but one.

        A group has too few rows to hide its weights' traffic (in weight gradients: the gradients' traffic). Each group
        is a separate launch (Transformer Engine's `multi_stream_cublas_gemm`) of at least `group_launch_s`. None if the
        profile has measured grouped matmuls.
        """
        # A single group is a plain matmul.
        if op.kind != "grouped_gemm" or op.shape[0] <= 1 or self._points.has_points("grouped_gemm", op.dtype):
            return None
        groups, m, n, k = op.shape
        # A weight gradient sums over the rows of a group, which are its k. Here they become the first size, so that the
        # rows of all groups can be joined.
        rows, n, k = (k, m, n) if op.phase is Phase.WEIGHT_GRAD else (m, n, k)
        shape = (1, groups * rows, n, k)
        once = measured_bytes(shape, op.dtype)
        if op.own_bytes:  # the one group's weights, which the matmul hides, are as small as the others'
            weights = op.bytes - (once - dtype_bytes(op.dtype) * n * k)
            once = op.bytes - max(0.0, weights) * (groups - 1) / groups
        # FORWARD, because the shape now has the order of a forward's product.
        one = replace(op, kind="gemm", shape=shape, bytes=once, phase=Phase.FORWARD, kernels=1)
        whole = self._alone(one, pace)
        bandwidth = self._device.bandwidth_bytes_per_s * self.coefficients.streaming_efficiency
        seconds = whole.seconds + max(0.0, op.bytes - once) / bandwidth
        if op.kernels == groups and not op.looped and op.dtype != "fp32":  # whose own rule has it
            # Groups run one after another on one stream, and none fills the last wave of another.
            alone, joined = (least_waves(b, a, c, self.gpu.sm_count) for b, a, c in ((1, *op.shape[1:3]), shape[:3]))
            seconds *= max(1.0, alone / joined)
        # Dozens of small groups are bound by their launches.
        least = groups * self.coefficients.group_launch_s
        return Cost(max(seconds, least), "interpolated", math.hypot(whole.uncertainty, GROUPED_UNCERTAINTY))

    def _attention(self, op: Compute, pace: float) -> Cost | None:
        """Price fused attention by its published speed; None if the profile does not state it.

        In a training step this precedes the measured points, which are of serving libraries' kernels (FlashInfer,
        TensorRT-LLM).
        """
        if op.kind not in ATTENTION:
            return None
        peak = attention_peak(self._device, op.dtype, self._has_tf32, op.kernel)
        seconds = flash_seconds(op, self.gpu, peak, self.coefficients)
        if seconds is None:
            return None
        cost = Cost(seconds / self.coefficients.attention_speed, "interpolated", FLASH_UNCERTAINTY)
        return self.power.throttled(op, cost, pace, self._device)

    def _from_points(self, op: Compute, pace: float) -> Cost | None:
        """Price by the table of points with the least uncertainty; several memory-bound kernels share bytes evenly."""
        # Tables have single kernels, but an optimizer is one sweep over all its bytes.
        repeats = max(op.kernels, 1) if op.kind in MEMORY_BOUND and op.kind != "optimizer" else 1
        shape = (round(op.bytes / repeats),) if op.kind in MEMORY_BOUND else op.shape
        found = [self._corrections.corrected(op, cost) for cost in self._points.costs(op, shape)]
        if not found:
            return None
        # A measured point precedes any interpolation, even with a larger spread, because it is exactly this kernel.
        best = min(found, key=lambda cost: (cost.source != "measured", cost.uncertainty))
        # The power limit slows the matmul, but not the memory that takes the result.
        cost = self.power.throttled(op, best._replace(seconds=best.seconds * repeats), pace, self._device)
        # Points of the user's own machine were timed with the operator's own result.
        result_s = self._corrections.result_s(op) if self.profile.kernels else 0.0
        return cost._replace(seconds=cost.seconds + result_s)

    def _kernel_by_kernel(self, op: Compute, pace: float) -> Cost | None:
        """Price an operator by the kernels that it consists of, one after the other; None if it does not name them."""
        if not op.runs:
            return None
        costs = [self._alone(kernel, pace) for kernel in op.runs]
        seconds = sum(cost.seconds for cost in costs)
        longest = max(costs, key=lambda cost: cost.seconds)
        off = sum(cost.seconds * cost.uncertainty for cost in costs) / seconds  # kernels of one kind err alike
        return Cost(seconds, longest.source, off)

    @property
    def kernels(self) -> dict[str, str]:
        """Return whose kernels priced each kind of operator until now."""
        return self._points.used

    def knows(self, op: Compute) -> bool:
        """Tell whether there are points of exactly this operator's kernel."""
        return self._points.knows(op)

    def floor_s(self, op: Compute) -> float:
        """Return the seconds that no call of the operator's kind goes below, by its table; 0 where it has none."""
        return self._points.floor_s(op)

    @property
    def attention_kernels(self) -> set[str]:
        """Return the kernels that a scenario may name (`AttentionKernel`) and whose speed the profile has."""
        return (set(self.coefficients.attention) & set(get_args(AttentionKernel))) | self._points.attention_kernels

    def check_attention_kernel(self, wanted: str) -> None:
        """Check that the profile has the attention kernel that a scenario names; the bare roofline accepts all.

        Raises:
            InputError: if it does not.
        """
        if wanted in self._accepted:
            return
        # A framework's own choice is accepted by every profile; without coefficients it has the default kernel's.
        picks = attention_picks() | OF_SHAPES
        known = self.attention_kernels
        if not (wanted in picks or self.profile.bare or wanted in known):
            found = ", ".join(sorted(known)) or "none by name"
            raise InputError(f"training.attention_kernel: found '{wanted}'; profile {self.profile.name} has: {found}")
        self._accepted.add(wanted)

    def _roofline(self, op: Compute) -> Cost:
        seconds = self._device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        c = self.coefficients
        # `memory_latency_s`, the start and end of each kernel, replaces the launch floor here.
        if op.kind in MEMORY_BOUND and c.memory_efficiency is not None:
            usual = c.memory_efficiency_of.get(op.kind, c.memory_efficiency)
            named = STRIDED if op.strided else f"{op.kind}_{op.kernel}"
            efficiency = c.memory_efficiency_of.get(named, usual / (2.0 if op.kernel in OF_TWO_KERNELS else 1.0))
            ramp = max(op.kernels, 1) * c.memory_latency_s
            return Cost(seconds / efficiency + ramp, "interpolated", MEMORY_UNCERTAINTY)
        if op.flops and op.kind not in MEMORY_BOUND:
            seconds /= c.matmul_efficiency
        # The host issues one launch after another, so the device waits if kernels are shorter.
        floor = op.kernels * self.launch_overhead_s
        gaps = op.kernels * c.kernel_gap_s
        return Cost(max(seconds, floor) + gaps, "roofline", ROOFLINE_UNCERTAINTY)
