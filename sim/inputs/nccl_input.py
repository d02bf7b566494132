"""The release of NCCL that a scenario's software brings, and what its cluster leaves to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.variants.frameworks.records import framework_of
from topology.nccl import Release, nccl_at
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from sim.inputs.training_config import Training


def nccl_of(training: Training | None) -> Release:
    """Return the release that came with the trainer of `training.software_date`; without a trainer, the newest.

    A framework's record says who brings NCCL, and which month's it was if the scenario names none.
    """
    if training is None:
        return nccl_at(None)
    own = framework_of(training)
    return nccl_at(training.software_date or own.nccl_month, own.nccl_from)


def with_nccl(cluster: ClusterSpec, training: Training | None) -> ClusterSpec:
    """Return the cluster with what NCCL's release decides where its description leaves it out: `inter_node.pat`."""
    if cluster.inter_node.pat is not None:
        return cluster
    inter = cluster.inter_node.model_copy(update={"pat": nccl_of(training).pat})
    return cluster.model_copy(update={"inter_node": inter})
