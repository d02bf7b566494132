"""A scenario's sections before they are checked against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.core.dtypes import peak_flops_per_s
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.rules.sizes import Sizes
from sim.inputs.training_config import Training
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.distillation_config import Distillation
    from sim.inputs.faults_config import Faults
    from sim.inputs.workloads import Inference


class Sections(NamedTuple):
    """A scenario's sections, each checked for itself. `seq_len`: tokens of the longest sequence known."""

    model: ModelConfig
    training: Training | None
    parallelism: Parallelism
    cluster: ClusterSpec
    inference: Inference | None
    distillation: Distillation | None
    faults: Faults | None
    seq_len: int

    def without_peak(self, dtype: str) -> str | None:
        """Name a GPU of the cluster that does not multiply in `dtype`; None: all do."""
        for gpu in self.cluster.gpus:
            peaks = gpu.peak_flops_per_s
            if peak_flops_per_s(peaks, dtype) is None:
                return f"GPU {gpu.name} has no {dtype} peak (it has: {', '.join(peaks)})"
        return None


def sizes_of(sections: Sections) -> Sizes:
    """Return what rules of layouts ask for."""
    p, t = sections.parallelism, sections.training
    shared = {key: getattr(p, key) for key in Sizes._fields if key in Parallelism.model_fields}
    size, mode = (t.micro_batch_size, t.recompute.mode) if t is not None else (1, "none")
    eplb = sections.inference.eplb if sections.inference is not None else None
    return Sizes(
        model=sections.model,
        training=t,
        micro_batch_size=size,
        recompute=mode,
        form=p.form,
        redundant_experts=eplb.redundant_experts if eplb is not None else 0,
        **shared,
    )
