"""Kinds of collectives and messages, and the names that torch, gloo and NCCL have for them."""

from __future__ import annotations

import re

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
POINT_TO_POINT = ("send", "recv")  # the kinds of a message's two ends
KINDS = (*COLLECTIVES, "barrier", *POINT_TO_POINT)  # of what a trace or a captured script holds
# By their letters alone: operators of torch.distributed, "Collective name" of record_param_comms, events of gloo,
# kernels of NCCL.
_NAMES = {
    "all_reduce": "allreduce allreducecoalesced",
    "all_gather": "allgather allgatherbase allgathercoalesced allgatherintotensor allgatherintotensorout "
    "allgatherintotensorcoalesced allgatherring",
    "reduce_scatter": "reducescatter reducescatterbase reducescattertensor reducescattertensorout "
    "reducescattertensorcoalesced",
    "all_to_all": "alltoall alltoallbase alltoallsingle alltoallv sharddimalltoall",
    "recv": "recv recvanysource",
}
_KINDS = {name: kind for kind in KINDS for name in _NAMES.get(kind, kind).split()}


def collective_kind(name: str) -> str | None:
    """The kind of what torch, gloo or NCCL calls `name`; None for anything else.

    >>> collective_kind("_allgather_base"), collective_kind("all_reduce"), collective_kind("allreduce_")
    ('all_gather', 'all_reduce', 'all_reduce')
    >>> collective_kind("mm") is None
    True
    """
    return _KINDS.get(re.sub(r"[^a-z]", "", name.lower()[:100]))
