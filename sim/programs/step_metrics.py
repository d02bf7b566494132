"""What a trainer tells all ranks behind a step while the device waits: losses, counts, and metrics."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, Item, Phase, Program
from sim.inputs.training_config import Training
from sim.models.operators import memory_op
from sim.ranks.plan import Plan
from sim.variants.frameworks.records import framework_of

SUMS = 2  # of a metric: of its losses, and of its tokens (composer/metrics/nlp.py: LanguageCrossEntropy)
REPORTED = ("loss", "samples and tokens", "seconds")  # composer/trainer/trainer.py: `_train_loop`
REDUCING = 2  # kernels that stack all ranks' numbers, and add them up


def metric_items(plan: Plan, t: Training) -> Program:
    """The messages and kernels behind a step of a trainer with metrics (`Framework.metric_losses`).

    Each sum of a metric is gathered by itself, behind a barrier, as a list of one number for each rank: the host makes
    as many zeros, and torch copies as many numbers out of what has arrived (torchmetrics/utilities/distributed.py:
    `gather_all_tensors`; torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: `allgather`). The host waits for every one.
    """
    ranks, metrics = plan.group_size("dp_cp"), framework_of(t).metric_losses
    if not metrics or ranks < 2:
        return ()
    out: list[Item] = [_message(name, "all_reduce", FP32_BYTES) for name in REPORTED]
    for _ in range(SUMS * metrics):
        out += [
            _message("metrics' barrier", "all_reduce", FP32_BYTES),
            _numbers("metric_zeros", ranks),
            _message("metrics", "all_gather", FP32_BYTES * ranks),
            _numbers("metric_copies", ranks + REDUCING),
        ]
    return tuple(out)


def _message(name: str, kind: str, nbytes: float) -> Comm:
    return Comm(name, kind, "dp_cp", nbytes, Phase.OPTIMIZER)


def _numbers(name: str, count: int) -> Compute:
    """Kernels that a loop issues, `count` of them, each on one number."""
    made = memory_op(name, Phase.OPTIMIZER, "elementwise", count, 2 * FP32_BYTES * count, "fp32", count)
    return replace(made, one_call=True, plain_host=True)
