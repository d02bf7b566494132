"""Loss scaling: what keeps small gradients above the smallest numbers of 16-bit floating point.

The loss is multiplied by a factor, so all gradients are; they are divided by it once they are fp32. Where one has
overflowed, the step is left out and the factor halved; after 2,000 good steps in a row it is doubled (Micikevicius et
al. 2018, arXiv 1710.03740, sec. 3.2; the numbers are torch.amp.GradScaler's). All ranks must decide alike: the norm,
which is summed over all who hold other parts of the gradients, is finite nowhere once one of them overflowed.

Documentation: docs/measuring.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

GROWTH_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """The factor, and what is to be multiplied with the fp32 gradients of this step (`apply`; None: leave it out)."""

    value: float = 65536.0
    good_steps: int = 0
    skipped: int = 0
    apply: float | None = 1.0

    def found(self, norm: Tensor, largest_norm: float) -> None:
        """Decide about a step from the norm of its scaled gradients; they are clipped to `largest_norm`."""
        unscaled = float(norm) / self.value
        self.apply = min(1.0, largest_norm / (unscaled + 1e-6)) / self.value if math.isfinite(unscaled) else None

    def stepped(self) -> None:
        """The step was made, or left out: adjust the factor."""
        if self.apply is None:
            self.value, self.good_steps, self.skipped = self.value / 2, 0, self.skipped + 1
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = 2 * self.value, 0


def square_sum(gradient: Tensor) -> Tensor:
    """Sum of squares; of fp16 in fp32, as 256² is beyond fp16."""
    wide = gradient.float() if gradient.dtype.itemsize == 2 else gradient
    return wide.square().sum()
