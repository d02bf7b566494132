"""One record for each optimizer: what it keeps of a parameter, and how it updates the matrices of layers.

`training.optimizer` names one of `OPTIMIZERS`. The formulas are in `sim.models.optimizers.step` and
`sim.models.optimizers.muon`.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class UpdateOperators(NamedTuple):
    """Hold how often an update that is made of torch's operators accesses a parameter, its gradient, a moment and a
    temporary update, and how many kernels it has for each tensor."""

    parameter: int
    gradient: int
    moment: int
    update: int
    kernels: int


class Optimizer(Struct, frozen=True):
    """Hold the facts of one optimizer. `moments` and `matrix_moments`: numbers kept of a parameter outside of layers'
    matrices, and in one. `others_by`: the optimizer of all that is in no matrix, if it is another. `operators`: its
    update, where every framework makes it of torch's operators; None: it is one kernel, or what the framework says."""

    name: str
    moments: int
    matrix_moments: int
    whole_matrices: bool = False  # an update needs a layer's whole matrix and its whole gradient on one rank
    others_by: str = ""
    on_host: bool = False  # simulated on the host's CPUs too (`training.optimizer_offload: cpu`)
    factored: bool = False  # its second moment is that of rows and columns, of a vector that of each number
    is_adam: bool = False  # `training.adamw_kernels` and a framework's record say which kernels update a parameter
    is_lion: bool = False  # a framework's record may say of which operators its update is made
    operators: UpdateOperators | None = None
    in_fp32: bool = False  # 16-bit parameters and gradients are cast to fp32 for the update, and parameters back


ADAMW = Optimizer("adamw", moments=2, matrix_moments=2, on_host=True, is_adam=True)
SGD = Optimizer("sgd", moments=0, matrix_moments=0)  # without momentum
SGD_MOMENTUM = Optimizer("sgd_momentum", moments=1, matrix_moments=1)
LION = Optimizer("lion", moments=1, matrix_moments=1, is_lion=True)  # Chen et al. 2023, arXiv 2302.06675
# A fast and a slow first moment, and the second (Pagliardini et al. 2024, arXiv 2409.03137; bitsandbytes).
ADEMAMIX = Optimizer("ademamix", moments=3, matrix_moments=3)
# Shazeer and Stern 2018, arXiv 1804.04235: of a matrix the sums of its rows and columns, which are not counted.
# Operators: transformers/optimization.py (`Adafactor.step`), of a matrix without a first moment and decay, in fp32.
# Parameter: its norm, `add_` (2); gradient: squared, multiplied; update: squared (1), eps added (2), means of rows and
# columns (2), made (1), multiplied by the gradient (2), its norm (1), divided (2), multiplied by the rate (2), negated
# (2), subtracted (1).
ADAFACTOR = Optimizer(
    "adafactor",
    moments=0,
    matrix_moments=0,
    factored=True,
    operators=UpdateOperators(3, 2, 0, 16, kernels=12),
    in_fp32=True,
)
MUON = Optimizer("muon", moments=ADAMW.moments, matrix_moments=1, whole_matrices=True, others_by=ADAMW.name)
OPTIMIZERS: dict[str, Optimizer] = {
    record.name: record for record in (ADAMW, SGD, MUON, SGD_MOMENTUM, LION, ADEMAMIX, ADAFACTOR)
}
# `training.master_weights`: of fp32 copies the 16 bits that bf16 parameters lack (TE optimizers/fused_adam.py)
REMAINDERS = "remainders"
