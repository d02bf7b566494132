"""One record for each optimizer: what it keeps of a parameter, and how it updates the matrices of layers.

`training.optimizer` names one of `OPTIMIZERS`. The formulas are in `sim.models.optimizers.step` and
`sim.models.optimizers.muon`.
"""

from __future__ import annotations

from msgspec import Struct


class Optimizer(Struct, frozen=True):
    """Hold the facts of one optimizer. `moments` and `matrix_moments`: numbers kept of a parameter outside of layers'
    matrices, and in one. `others_by`: the optimizer of all that is in no matrix, if it is another."""

    name: str
    moments: int
    matrix_moments: int
    whole_matrices: bool = False  # an update needs a layer's whole matrix and its whole gradient on one rank
    others_by: str = ""
    on_host: bool = False  # simulated on the host's CPUs too (`training.optimizer_offload: cpu`)
    factored: bool = False  # its second moment is that of rows and columns, of a vector that of each number


ADAMW = Optimizer("adamw", moments=2, matrix_moments=2, on_host=True)
SGD = Optimizer("sgd", moments=0, matrix_moments=0)  # without momentum
SGD_MOMENTUM = Optimizer("sgd_momentum", moments=1, matrix_moments=1)
LION = Optimizer("lion", moments=1, matrix_moments=1)  # Chen et al. 2023, arXiv 2302.06675
# A fast and a slow first moment, and the second (Pagliardini et al. 2024, arXiv 2409.03137; bitsandbytes).
ADEMAMIX = Optimizer("ademamix", moments=3, matrix_moments=3)
# Shazeer and Stern 2018, arXiv 1804.04235: of a matrix the sums of its rows and columns, which are not counted.
ADAFACTOR = Optimizer("adafactor", moments=0, matrix_moments=0, factored=True)
MUON = Optimizer("muon", moments=ADAMW.moments, matrix_moments=1, whole_matrices=True, others_by=ADAMW.name)
OPTIMIZERS: dict[str, Optimizer] = {
    record.name: record for record in (ADAMW, SGD, MUON, SGD_MOMENTUM, LION, ADEMAMIX, ADAFACTOR)
}
# `training.master_weights`: of fp32 copies the 16 bits that bf16 parameters lack (TE optimizers/fused_adam.py)
REMAINDERS = "remainders"
