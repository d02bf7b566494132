"""The server that an engine's own defaults depend on, of a scenario's sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.variants.engines.defaults import Server, ServerPool

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.workloads import Inference, PoolSize
    from topology.spec import GpuSpec


def server_of(
    gpu: GpuSpec,
    model: ModelConfig,
    served: Inference,
    layout: Parallelism | PoolSize,
    pp: int,
    pool: ServerPool = "all",
) -> Server:
    """One replica of `model` on `pp` stages, laid out as the replicas of a scenario or of one of its pools are."""
    replicas, said = layout.sharing_replicas, served.model_fields_set
    speculative = served.speculative
    return Server(
        memory_bytes=gpu.memory_bytes,
        tp=layout.tp,
        pp=pp,
        replicas=replicas,
        drafts=served.drafts,
        latent=model.mla is not None,
        graphs_to=served.graphs_to,
        pool=pool,
        deepep=served.all2all_backend == "deepep",
        code=model.code,
        tokens=served.max_batch_tokens * replicas if "max_batch_tokens" in said else None,
        running=served.max_running_requests * replicas if "max_running_requests" in said else None,
        checked=1 if speculative is None else 1 + speculative.checked,
    )
