"""From the time of a table's kernel to that of an operator whose kernel is a different one.

Tables have forward products of aligned sizes in the default kernel, and streaming kernels that torch vectorizes.
"""

from __future__ import annotations

import math

from msgspec import Struct

from sim.core.operator_kinds import MATMULS
from sim.core.program import ALIGNED, Compute, Role
from sim.prices.coefficients import STRIDED, Coefficients
from sim.prices.cost import Cost
from sim.prices.kernel_tables import measured_bytes
from sim.prices.roofline import Device
from topology.spec import GpuSpec

MEMORY_UNCERTAINTY = 0.15  # spread of published efficiencies of one GPU's streaming kernels
STRIDED_UNCERTAINTY = 0.3  # a cast took 1.28 times as long before it was vectorized (pytorch pull request 137053)
# As in all shipped profiles (vtrain_single_node, A100). Hopper runs Ampere's kernels for such sizes: at one size they
# take 3.5 times as long (m87-labs/kestrel pull request 143), at another as long (meta-pytorch/float8_experimental 145).
UNALIGNED_SLOWDOWN = 2.0
PARTLY_ALIGNED = 0.58  # power of the slowdown of odd widths that even ones have
USUALLY_REACHED = 0.6  # part of the peak that large matmuls reach in a step
UNALIGNED_UNCERTAINTY = 0.25  # fits to parts of vtrain_single_node find a slowdown of 1.5 to 2.6


class PointCorrections(Struct, frozen=True):
    """Correct times of tables for one GPU and one profile's coefficients."""

    coefficients: Coefficients
    gpu: GpuSpec
    device: Device

    def corrected(self, op: Compute, cost: Cost) -> Cost:
        """Return the cost of an operator whose table says `cost`."""
        return self._from_memory(op, self._at_speed(op, self._strided(op, self._unaligned(op, cost))))

    def result_s(self, op: Compute) -> float:
        """Return the exposed seconds of a matmul's bytes beyond those of its points (accumulation in fp32)."""
        if op.kind not in MATMULS:
            return 0.0
        more = op.bytes - measured_bytes(op.shape, op.dtype)
        return max(0.0, self.coefficients.result_exposed * more / self.device.bandwidth_bytes_per_s)

    def _unaligned(self, op: Compute, cost: Cost) -> Cost:
        """Slow a matmul whose sizes do not allow the fast kernels; a point of exactly these sizes had the slow ones."""
        if op.alignment == ALIGNED or cost.source == "measured":
            return cost
        # cuBLAS has fast kernels only for leading dimensions of multiples of 16 bytes, as all points have.
        stated = self.coefficients.unaligned_matmul_slowdown
        odd = stated or (1.0 if self.gpu.chip.is_host else UNALIGNED_SLOWDOWN)
        # On an H100 a vocabulary of 30,522 words (alignment 2) takes 2.9 times as long as a padded one, one of 128,100
        # (alignment 4) 2.9 times on an H200, an odd one 6.1 times (scenarios/measured/gpu_programs, gpu_programs_h200).
        # Elsewhere each load has half the elements with half the alignment.
        even = PARTLY_ALIGNED if stated else 1.0 - math.log2(op.alignment) / math.log2(ALIGNED)
        slower = odd if op.alignment == 1 else odd**even
        # A product that does not fill the fast kernels loses less: gpt-oss's of 64 wide heads take 1.5 times as long.
        filled_s = op.flops / (USUALLY_REACHED * self.device.peak(op.dtype))
        seconds = min(cost.seconds * slower, max(cost.seconds, filled_s * slower))
        return Cost(seconds, cost.source, math.hypot(cost.uncertainty, UNALIGNED_UNCERTAINTY))

    def _from_memory(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a batch of products to the time of its bytes; points are of single products.

        The matrices of a point stay in the L2 cache from one call to the next, those of a batch are all read. No batch
        in scenarios/measured/gpu_programs and gpu_programs_h200 is faster than its bytes: 192 x 512 x 512 x 64 takes
        28.7 us on an H200 (DeBERTa; 26.2 by its bytes), 64 of them 15.8 us on an H100 (T5; 12.5).
        """
        if op.kind != "gemm" or op.shape[0] < 2 or cost.source == "measured" or self.gpu.chip.is_host:
            return cost
        # A convolution's shape is that of the product of its windows, which it does not write.
        least_s = min(op.bytes, measured_bytes(op.shape, op.dtype)) / self.device.bandwidth_bytes_per_s
        return cost if least_s <= cost.seconds else cost._replace(seconds=least_s)

    def _strided(self, op: Compute, cost: Cost) -> Cost:
        """Lengthen a streaming kernel that torch does not vectorize; the points are of vectorized kernels."""
        if not op.strided:
            return cost
        c = self.coefficients
        usual, own = c.memory_efficiency_of.get(op.kind, c.memory_efficiency), c.memory_efficiency_of.get(STRIDED)
        if usual is None or own is None:
            # How much slower was not measured here: the time stays, with the slowdown of one GPU as its uncertainty.
            return Cost(cost.seconds, "interpolated", math.hypot(cost.uncertainty, STRIDED_UNCERTAINTY))
        return Cost(cost.seconds * usual / own, "interpolated", math.hypot(cost.uncertainty, MEMORY_UNCERTAINTY))

    def _at_speed(self, op: Compute, cost: Cost) -> Cost:
        """Scale a matmul from the points' speed to this machine's; gradients in fp8 are slower."""
        if op.kind not in MATMULS:
            return cost
        c = self.coefficients
        # Points are forward products of the default kernel. Transformer Engine accumulates gradients in two stages
        # (`_2X_ACC_DGRAD`, `_2X_ACC_WGRAD`), torchao without fast accumulation: on Hopper the sums leave the tensor
        # cores every 128 steps. Other kernels have their own slowdown.
        slower = c.matmul_slowdown_of.get(op.kernel, 1.0)
        if not op.kernel and op.dtype == "fp8" and op.role is not Role.OUTPUT:
            slower = c.fp8_gradient_slowdown
        return cost._replace(seconds=cost.seconds * slower / c.matmul_speed)
