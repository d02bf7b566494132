"""Data parallelism of a stage with experts, whose gradients are summed over other ranks than dense parameters'.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightGrads
from calibrate.parallel.data import DataParallel, Sync
from calibrate.parallel.model_parallel import dense_modules, expert_modules
from calibrate.parallel.pipeline import Record


class ExpertDataParallel:
    """`DataParallel` with one group for the dense parameters and another for the experts."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        groups: Sequence[dist.ProcessGroup | None],
        sync: Sync,
        stage: int,
        store: WeightGrads | None,
    ) -> None:
        self.stage = stage
        parts = (dense_modules(blocks), expert_modules(blocks))
        self.parts = [DataParallel(part, group, sync, stage, store) for part, group in zip(parts, groups, strict=True)]

    @property
    def records(self) -> list[Record]:
        return [r for part in self.parts for r in part.records]

    @property
    def silent(self) -> bool:
        return self.parts[0].silent

    @silent.setter
    def silent(self, value: bool) -> None:
        for part in self.parts:
            part.silent = value

    def state(self) -> list[Tensor]:
        """Return the tensors that hold all parameters, to save and restore them."""
        return [x for part in self.parts for x in part.state()]

    def silence(self) -> None:
        """Stop communicating."""
        self.silent = True

    def speak(self) -> None:
        """Communicate again."""
        self.silent = False

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates."""
        return [p for part in self.parts for p in part.owned()]

    def owned_gradients(self) -> list[Tensor]:
        """Return the flat buffers of all gradients."""
        return [g for part in self.parts for g in part.owned_gradients()]

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """Return the gradient of `p` from a row on, flat."""
        return self.parts[0].own_gradient(p, row)

    def copied_gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient of `p`, which all ranks with a copy of `p` have to sum."""
        return self.parts[0].copied_gradient(p)

    def begin(self) -> None:
        """Begin a step."""

    def last(self) -> None:
        """Note that the next micro-batch is the step's last."""
        for part in self.parts:
            part.last()

    def before_block(self, block: nn.Module) -> None:
        """Prepare for a block's forward."""

    def updated(self) -> None:
        """Note that the optimizer has run."""

    def finish(self) -> None:
        """Reduce the remaining gradients and wait for all."""
        for part in self.parts:
            part.finish()

    def zero(self) -> None:
        """Zero the gradients for the next step."""
        for part in self.parts:
            part.zero()

    def whole_gradients(self) -> dict[int, Tensor]:
        """Return all gradients by id of their parameter."""
        return self.parts[0].whole_gradients() | self.parts[1].whole_gradients()

    def whole_parameters(self) -> dict[int, Tensor]:
        """Return all parameters by their id."""
        return self.parts[0].whole_parameters() | self.parts[1].whole_parameters()
