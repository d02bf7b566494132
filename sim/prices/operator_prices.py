"""Seconds for an operator: measured at measured shapes, interpolated between them, the roofline elsewhere.

Points hold what a kernel costs in a stream of others, launch included. The roofline adds the launch:
max(flops/peak, bytes/bandwidth, kernels x launch_overhead_s) + kernels x kernel_gap_s. `launch_overhead_s` is
the shortest time from one launch to the next (the host cannot issue faster, and an empty kernel takes about
as long), so it is a floor, hidden under longer kernels; `kernel_gap_s` is what nothing hides: 0 unless
measured, and on a CPU the dispatch of an operator, as there the same core does both.
"""

from __future__ import annotations

import math
from typing import get_args

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.normal import normal_quantile
from sim.core.program import Compute, Phase, Role
from sim.models.framework_facts import AttentionKernel
from sim.models.frameworks import attention_picks
from sim.prices.attention_speed import SCORES, SPARSE, flash_seconds
from sim.prices.attention_speed import UNCERTAINTY as FLASH_UNCERTAINTY
from sim.prices.coefficients import AS_STATED, STRIDED, PriceOptions
from sim.prices.collective_tables import collective_cost
from sim.prices.cost import Cost, measured
from sim.prices.kernel_tables import measured_bytes
from sim.prices.profile import BlockPoint, CollectiveTable, Profile
from sim.prices.roofline import ATTENTION, MATMULS, MEMORY_BOUND, Device
from sim.prices.table_prices import TablePrices
from topology.spec import GpuSpec

ROOFLINE_UNCERTAINTY = 0.3  # real kernels reach 0.4 to 0.9 of the roofline; nothing measured narrows it
MEMORY_UNCERTAINTY = 0.15  # published efficiencies of one GPU's streaming kernels spread about as much
POWER_UNCERTAINTY = 0.25  # of what the power limit adds: temperature, data and the part itself decide
POWER_AT_REST = 0.5  # of the power limit: a GPU streaming from memory
GROUPED_UNCERTAINTY = 0.1  # of taking a grouped matmul for one and its weights' traffic (b200_kernels)
STRIDED_UNCERTAINTY = 0.3  # a cast took 1.28 times as long before it was vectorized (pytorch pull request 137053)
UNALIGNED_UNCERTAINTY = 0.25  # fits to parts of vtrain_single_node find a slowdown of 1.5 to 2.6


class Costs:
    """Prices operators on one GPU out of one profile. Answers are kept: equal operators cost one look-up.

    A profile with a `reference` other than `gpu` is scaled by the ratio of the two rooflines. `coefficients` are the
    profile's under `options`.
    """

    def __init__(self, profile: Profile, gpu: GpuSpec, options: PriceOptions = AS_STATED) -> None:
        self.profile, self.gpu = profile, gpu
        self.coefficients = options.applied(profile.coefficients)
        # With a reference, what the coefficients say of bandwidth and peaks belongs to the reference and not to `gpu`.
        self._device = _own_device(profile, gpu) if not profile.reference else Device.of(gpu)
        home = _gpu_named(profile) if profile.reference else gpu
        reference = Device.of(home) if profile.reference else self._device
        # In parts of the reference's limit, as `power_at_peak` is; below 1 for a GPU whose limit is lowered.
        self._power_limit = gpu.power_limit_w / _reference_w(gpu, home)
        self._points = TablePrices(profile, self._device, reference, self.coefficients, self.launch_overhead_s)
        self._blocks: dict[tuple[str, str, int], BlockPoint] = {(b.key, b.phase, b.run): b for b in profile.blocks}
        # What was measured with more ranks than cores is read by `shared_cores` alone, which makes it stand for 1.
        self._collectives: dict[tuple[str, int], CollectiveTable] = {
            (c.op, c.ranks): c for c in profile.collectives if c.ranks_per_core == 1
        }
        # `pace` is part of the key: with a power limit the same kernel takes longer in a large job.
        self._cache: dict[tuple[Compute, float], Cost] = {}

    @property
    def launch_overhead_s(self) -> float:
        """Shortest time from one kernel launch to the next: the profile's, else the GPU's."""
        stated = self.coefficients.launch_overhead_s
        return self.gpu.launch_overhead_s if stated is None else stated

    def host_s(self, op: Compute, plain: bool = False) -> float:
        """Seconds in which the host issues an operator's kernels (a floor under runs of them: `sim.programs.compile`).

        `plain`: plain torch issues all operators (`Framework.plain_host`).
        """
        c = self.coefficients
        # A fused optimizer's kernels are few, while its Python walks over all parameters. The step is timed as a whole.
        if op.kind == "optimizer":
            return c.host_step_s
        each_s = c.host_operator_s
        if (plain or op.plain_host) and c.host_operator_eager_s is not None:
            each_s = c.host_operator_eager_s
        # A library's loop in C++ issues a launch in less time than Python, and the device waits for the same launches.
        if op.looped and each_s:
            return each_s + op.kernels * c.group_launch_s
        return op.kernels * each_s

    def pace(self, ranks: int) -> float:
        """Slowdown of the slowest of `ranks` GPUs under their power limit, by the usual GPU.

        GPUs of one kind differ there by `power_spread` (standard deviation by mean), and a step waits for the slowest:
        the expected largest of n normal variables, by Blom's approximation.
        """
        spread = self.coefficients.power_spread
        if ranks < 2 or not spread:
            return 1.0
        # (n - 3/8) / (n + 1/4): the mean rank of the largest of n (Blom 1958).
        return 1.0 + spread * normal_quantile((ranks - 0.375) / (ranks + 0.25))

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
        return None if point is None else measured(point.seconds, point.spread)

    def collective(self, op: str, ranks: int, bytes_: float) -> Cost | None:
        """Seconds of a collective within a node, or None if this group size was not measured."""
        table = self._collectives.get((op, ranks))
        return None if table is None else collective_cost(table, bytes_)

    def _price(self, op: Compute, pace: float) -> Cost:
        return self._in_model(op, self._alone(op, pace))

    def _alone(self, op: Compute, pace: float) -> Cost:
        """Ask in this order who can price the kernels by themselves; the roofline prices what nobody else can."""
        # A block first: it is a run of kernels as they were timed. Points come last, because those of grouped matmuls
        # and of attention are mostly of serving libraries' kernels.
        for price in (self._measured_block, self._grouped, self._attention, self._from_points):
            cost = price(op, pace)
            if cost is not None:
                return cost
        return self._throttled(op, self._roofline(op), pace)

    def _in_model(self, op: Compute, cost: Cost) -> Cost:
        """Add what a step's modules and autograd take on a CPU, whose core cannot compute meanwhile: for each kernel,
        once for a library's loop over groups, which one call runs."""
        # A block was timed within a model. An optimizer's kernels are launched by one call.
        added_s = 0.0 if op.block is not None or op.kind == "optimizer" else self.coefficients.operator_in_model_s
        calls = 1 if op.looped else max(op.kernels, 1)
        return cost._replace(seconds=cost.seconds + calls * added_s) if added_s else cost

    def _measured_block(self, op: Compute, pace: float) -> Cost | None:
        """Price a run of computations as it was measured, power limit and all."""
        if op.block is None:
            return None
        cost = self.block(*op.block)
        if cost is None:
            raise ValueError(f"profile {self.profile.name!r}: no block {op.block.key!r}, {op.block.phase}")
        return cost

    def _grouped(self, op: Compute, pace: float) -> Cost | None:
        """Price one matmul over the rows of all groups, then the weights (or their gradients) of all groups but one.

        A group's rows are too few to hide its weights' traffic under its own tiles; each group is a launch of its own
        (Transformer Engine's `multi_stream_cublas_gemm`), which the many small ones wait for: `group_launch_s`. None
        where the profile has measured grouped matmuls.
        """
        # One group is a plain matmul, which the points price by itself.
        if op.kind != "grouped_gemm" or op.shape[0] <= 1 or self._points.has_points("grouped_gemm", op.dtype):
            return None
        groups, m, n, k = op.shape
        # In a weight gradient the rows of a group are summed over: they are the product's k. Here they become its first
        # size, so that all groups' rows may be put end to end.
        rows, n, k = (k, m, n) if op.phase is Phase.WEIGHT_GRAD else (m, n, k)
        shape = (1, groups * rows, n, k)
        once = measured_bytes(shape, op.dtype)
        # FORWARD, since the shape has been put into the order of a forward's product.
        one = replace(op, kind="gemm", shape=shape, bytes=once, phase=Phase.FORWARD, kernels=1)
        whole = self._alone(one, pace)
        bandwidth = self._device.bandwidth_bytes_per_s * self.coefficients.streaming_efficiency
        seconds = whole.seconds + max(0.0, op.bytes - once) / bandwidth
        # Dozens of small groups are bound by launches, however little each computes.
        least = groups * self.coefficients.group_launch_s
        return Cost(max(seconds, least), "interpolated", math.hypot(whole.uncertainty, GROUPED_UNCERTAINTY))

    def _attention(self, op: Compute, pace: float) -> Cost | None:
        """Price a training step's fused attention by its published speed; None where the profile does not state it.

        This goes before the measured points, which are of serving libraries' kernels.
        """
        # Serving kernels are other ones (FlashInfer, TensorRT-LLM), which the measured points hold.
        if op.kind not in ATTENTION or op.served:
            return None
        seconds = flash_seconds(op, self.gpu, self._device.peak(op.dtype), self.coefficients)
        if seconds is None:
            return None
        cost = Cost(seconds / self.coefficients.attention_speed, "interpolated", FLASH_UNCERTAINTY)
        return self._throttled(op, cost, pace)

    def _from_points(self, op: Compute, pace: float) -> Cost | None:
        """Price by the surest table of measured points; several kernels bound by memory share the bytes evenly."""
        # The table holds single kernels, but an optimizer is one sweep over all its bytes.
        repeats = max(op.kernels, 1) if op.kind in MEMORY_BOUND and op.kind != "optimizer" else 1
        shape = (round(op.bytes / repeats),) if op.kind in MEMORY_BOUND else op.shape
        found = [
            self._at_speed(op, self._strided(op, self._unaligned(op, cost))) for cost in self._points.costs(op, shape)
        ]
        if not found:
            return None
        # A measured point beats any interpolation, though its spread may be larger: it is this very kernel.
        best = min(found, key=lambda cost: (cost.source != "measured", cost.uncertainty))
        # The power limit acts on the matmul. It leaves the clock of memory alone, which moves the result.
        cost = self._throttled(op, best._replace(seconds=best.seconds * repeats), pace)
        return cost._replace(seconds=cost.seconds + self._result_seconds(op))

    def check_attention_kernel(self, wanted: str) -> None:
        """Check that the profile knows the attention kernel that a scenario names; to the bare roofline all are one.

        Raises:
            InputError: if it does not.
        """
        # A framework's own pick suits every profile. Without coefficients it takes the usual kernel's.
        picks = attention_picks() | {SPARSE, SCORES}
        if wanted in picks or self.profile.bare:
            return
        known = set(self.coefficients.attention) & set(get_args(AttentionKernel))
        known |= self._points.attention_kernels
        if wanted not in known:
            found = ", ".join(sorted(known)) or "none by name"
            raise InputError(f"training.attention_kernel: found '{wanted}'; profile {self.profile.name} has: {found}")

    def _unaligned(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a matmul whose sizes leave the fast kernels."""
        if op.aligned:
            return cost
        # cuBLAS has fast kernels for leading dimensions of 16 bytes' multiples only; the points are all aligned.
        slower = self.coefficients.unaligned_matmul_slowdown
        return Cost(cost.seconds * slower, cost.source, math.hypot(cost.uncertainty, UNALIGNED_UNCERTAINTY))

    def _strided(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a streaming kernel that torch does not vectorize: the points are of kernels that it does."""
        if not op.strided:
            return cost
        c = self.coefficients
        usual, own = c.memory_efficiency_of.get(op.kind, c.memory_efficiency), c.memory_efficiency_of.get(STRIDED)
        if usual is None or own is None:
            # Nobody says how much slower: the time stands, in doubt by what one GPU lost.
            return Cost(cost.seconds, "interpolated", math.hypot(cost.uncertainty, STRIDED_UNCERTAINTY))
        return Cost(cost.seconds * usual / own, "interpolated", math.hypot(cost.uncertainty, MEMORY_UNCERTAINTY))

    def _at_speed(self, op: Compute, cost: Cost) -> Cost:
        """Scale a matmul from the speed of the points to that of this machine; gradients in fp8 are slower."""
        if op.kind not in MATMULS:
            return cost
        c = self.coefficients
        # Points are forward products of the usual kernel. Transformer Engine accumulates gradients' products in two
        # stages (`_2X_ACC_DGRAD`, `_2X_ACC_WGRAD`), torchao without fast accumulation: on Hopper their sums leave the
        # tensor cores every 128 steps. Other kernels were measured by themselves, or not at all.
        slower = c.matmul_slowdown_of.get(op.kernel, 1.0)
        if not op.kernel and op.dtype == "fp8" and op.role is not Role.OUTPUT:
            slower = c.fp8_gradient_slowdown
        return cost._replace(seconds=cost.seconds * slower / c.matmul_speed)

    def _throttled(self, op: Compute, cost: Cost, pace: float) -> Cost:
        """Under a sustained load the clock falls until the draw fits the power limit.

        Draw in parts of the reference GPU's limit: a memory-bound kernel `POWER_AT_REST`, more by the share u of
        the tensor cores' peak that is in use, `power_at_peak` at all of it (fp32 uses none). At the low voltages of a
        limited GPU the energy of a flop stays about equal, so that time grows as draw / limit.
        """
        at_peak = self.coefficients.power_at_peak
        # fp32 runs on the vector units, whose draw stays below the limit.
        unlimited = not at_peak or op.kind in MEMORY_BOUND or op.dtype == "fp32"
        if unlimited or not op.flops or cost.seconds <= 0:
            return cost
        # The share in use follows from the seconds: a badly shaped matmul draws little and keeps its clock.
        used = op.flops / (cost.seconds * self._device.peak(op.dtype))
        draw = POWER_AT_REST + (at_peak - POWER_AT_REST) * used
        slower = max(1.0, draw * pace / self._power_limit)
        # Only the part that the limit adds is in doubt, so a kernel below the limit is as sure as before.
        error = math.hypot(cost.uncertainty, POWER_UNCERTAINTY * (slower - 1.0))
        return Cost(cost.seconds * slower, cost.source, error)

    def _result_seconds(self, op: Compute) -> float:
        """Seconds of what a matmul moves beyond its points (accumulating in fp32), as far as nothing hides it."""
        # Points of the user's own machine were timed with the result that the operator has.
        if op.kind not in MATMULS or not self.profile.kernels:
            return 0.0
        more = op.bytes - measured_bytes(op.shape, op.dtype)
        return max(0.0, self.coefficients.result_exposed * more / self._device.bandwidth_bytes_per_s)

    def _roofline(self, op: Compute) -> Cost:
        seconds = self._device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        c = self.coefficients
        # No launch floor here: `memory_latency_s`, the start and end of each kernel, takes its place.
        if op.kind in MEMORY_BOUND and c.memory_efficiency is not None:
            usual = c.memory_efficiency_of.get(op.kind, c.memory_efficiency)
            named = STRIDED if op.strided else f"{op.kind}_{op.kernel}"
            efficiency = c.memory_efficiency_of.get(named, usual)
            ramp = max(op.kernels, 1) * c.memory_latency_s
            return Cost(seconds / efficiency + ramp, "interpolated", MEMORY_UNCERTAINTY)
        if op.flops and op.kind not in MEMORY_BOUND:
            seconds /= c.matmul_efficiency
        # The host issues one launch after another, so the device waits where kernels are shorter.
        floor = op.kernels * self.launch_overhead_s
        gaps = op.kernels * c.kernel_gap_s
        return Cost(max(seconds, floor) + gaps, "roofline", ROOFLINE_UNCERTAINTY)


def _own_device(profile: Profile, gpu: GpuSpec) -> Device:
    """The data sheet with what was measured on this very machine in its place."""
    c = profile.coefficients
    bandwidth = c.memory_bandwidth_bytes_per_s or gpu.memory_bandwidth_bytes_per_s
    return Device(gpu.name, {**gpu.peak_flops_per_s, **c.peak_flops_per_s}, bandwidth)


def _reference_w(gpu: GpuSpec, home: GpuSpec) -> float:
    """Watts in whose parts `gpu` draws power as the coefficients of `home` say: the same where it is the same chip (as
    many multiprocessors of one peak, whatever the board), else its own data sheet's limit.
    """
    from topology.presets import GPUS

    # Two boards with one chip (SXM, PCIe) draw alike for the same work, so both are measured by one limit.
    if gpu.sm_count == home.sm_count and gpu.peak_flops_per_s.get("fp16") == home.peak_flops_per_s.get("fp16"):
        return home.power_limit_w
    # Another chip: nobody knows its draw. The share of its own limit at peak is then the best guess.
    return GPUS.get(gpu.name, gpu).power_limit_w


def _gpu_named(profile: Profile) -> GpuSpec:
    from topology.presets import GPUS

    if profile.reference not in GPUS:
        found, names = profile.reference, ", ".join(sorted(GPUS))
        raise InputError(f"profile {profile.name!r}: reference: found {found!r}; allowed: {names}")
    return GPUS[profile.reference]
