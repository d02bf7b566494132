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


ADAMW = Optimizer("adamw", moments=2, matrix_moments=2, on_host=True)
SGD = Optimizer("sgd", moments=0, matrix_moments=0)  # without momentum
MUON = Optimizer("muon", moments=ADAMW.moments, matrix_moments=1, whole_matrices=True, others_by=ADAMW.name)
OPTIMIZERS: dict[str, Optimizer] = {record.name: record for record in (ADAMW, SGD, MUON)}
# `training.master_weights`: of fp32 copies the 16 bits that bf16 parameters lack (TE optimizers/fused_adam.py)
REMAINDERS = "remainders"
