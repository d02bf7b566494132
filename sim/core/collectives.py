"""Kinds of collectives and messages, and the names that torch, gloo and NCCL have for them."""

from __future__ import annotations

import re

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
KINDS = (*COLLECTIVES, "barrier", "send", "recv")  # of what a trace or a captured script holds
# By their letters alone: operators of torch.distributed, "Collective name" of record_param_comms, events of gloo,
# kernels of NCCL.
_KINDS = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorout": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgatherring": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorout": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "alltoallv": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recvanysource": "recv",
}


def collective_kind(name: str) -> str | None:
    """The kind of what torch, gloo or NCCL calls `name`; None for anything else.

    >>> collective_kind("_allgather_base"), collective_kind("all_reduce"), collective_kind("allreduce_")
    ('all_gather', 'all_reduce', 'all_reduce')
    >>> collective_kind("mm") is None
    True
    """
    return _KINDS.get(re.sub(r"[^a-z]", "", name.lower()[:100]))
