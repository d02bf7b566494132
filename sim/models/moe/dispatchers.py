"""Who takes tokens to their experts' ranks: NCCL's all-to-all, or a library that sends a token once to a node.

Megatron-Core has both: `MoEAlltoAllTokenDispatcher` and `MoEFlexTokenDispatcher` with `_DeepepManager`, in
transformer/moe/token_dispatcher.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES

INDEX_BYTES = 8  # torch.int64


class Dispatcher(Struct, frozen=True):
    """One way there and back.

    `once_to_a_node`: a token crosses the network once for each node that has experts of it; else once for each expert.
    `copies_on_arrival`: copies are made, and ordered by expert, where the experts are, and added up there before they
    go home; else both at home, so that what arrives is ordered a second time.
    `messages_beside`: counts of copies and weights of copies have messages of their own (where the framework sends
    them: `counts_copies`, `sends_probabilities`); else each token takes along `choice_bytes` for each of its experts,
    and its gradient `choice_gradient_bytes`.
    """

    once_to_a_node: bool
    copies_on_arrival: bool
    messages_beside: bool
    choice_bytes: float = 0.0
    choice_gradient_bytes: float = 0.0


ALL_TO_ALL = Dispatcher(once_to_a_node=False, copies_on_arrival=False, messages_beside=True)
# DeepEP's dispatch takes hidden states, indices of experts and weights together (fused_a2a.py: FusedDispatch).
DEEP_EP = Dispatcher(
    once_to_a_node=True,
    copies_on_arrival=True,
    messages_beside=False,
    choice_bytes=INDEX_BYTES + FP32_BYTES,
    choice_gradient_bytes=FP32_BYTES,
)


# By `parallelism.ep_dispatcher`.
DISPATCHERS: Mapping[str, Dispatcher] = {"all_to_all": ALL_TO_ALL, "deepep": DEEP_EP}
