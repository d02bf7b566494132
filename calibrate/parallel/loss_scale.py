"""Loss scaling: keeps small gradients above the smallest numbers of 16-bit floating point.

The loss is multiplied by a factor, and with it all gradients. They are divided by it once they are fp32. If a gradient
has overflowed, the step is skipped and the factor halved. After 2,000 good steps in a row it is doubled (Micikevicius
et al. 2018, arXiv 1710.03740, sec. 3.2; the numbers are those of torch.amp.GradScaler). All ranks decide alike, because
the norm sums over all ranks' gradients and is not finite on any rank if one gradient overflowed.

Documentation: docs/measuring.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

GROWTH_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """The loss's factor, and the factor `apply` for this step's fp32 gradients (None: skip the step)."""

    value: float = 65536.0
    good_steps: int = 0
    skipped: int = 0
    apply: float | None = 1.0

    def found(self, norm: Tensor, largest_norm: float) -> None:
        """Set `apply` from the norm of this step's scaled gradients, which are clipped to `largest_norm`."""
        unscaled = float(norm) / self.value
        self.apply = min(1.0, largest_norm / (unscaled + 1e-6)) / self.value if math.isfinite(unscaled) else None

    def stepped(self) -> None:
        """Adjust the factor after a step that was made or skipped."""
        if self.apply is None:
            self.value, self.good_steps, self.skipped = self.value / 2, 0, self.skipped + 1
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = 2 * self.value, 0


def square_sum(gradient: Tensor) -> Tensor:
    """Return the sum of squares, of fp16 gradients in fp32, as 256² is beyond fp16."""
    wide = gradient.float() if gradient.dtype.itemsize == 2 else gradient
    return wide.square().sum()
