"""Who takes tokens to their experts' ranks: NCCL's all-to-all, or a library that sends a token once to a place.

Megatron-Core has all: `MoEAlltoAllTokenDispatcher`, and `MoEFlexTokenDispatcher` with `_DeepepManager` or
`_HybridEPManager`, in transformer/moe/token_dispatcher.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES

INDEX_BYTES = 8  # torch.int64


class Dispatcher(Struct, frozen=True):
    """How tokens travel to their experts and back.

    `once_to_a_place`: a token is sent once to each node that has experts of it, or once to each rank where all ranks
    share one NVLink domain; else once for each expert.
    `copies_on_arrival`: copies are made, and ordered by expert, where the experts are, and added up there before they
    go home; else both at home, so that what arrives is ordered a second time.
    `messages_beside`: counts of copies and weights of copies have messages of their own (where the framework sends
    them: `counts_copies`, `sends_probabilities`); else each token takes along `choice_bytes` for each of its experts,
    and its gradient `choice_gradient_bytes`.
    `domain_expert_bytes`: beside the token, and its gradient, these bytes travel for each expert of the NVLink domain.
    `map_byte`: bytes of an entry of a map of tokens and experts, which all ranks gather ahead; 0: no such map.
    `fills_tiles`: what arrives is copied into rows that are filled up to the tile of 8-bit matmuls at once.
    `chooses_again`: it is handed each token's experts as numbers, which a framework with maps (`maps_copies`) chooses
    once more from its map of weights, and turns into a map of the rank's own experts where they arrive.
    `sms`: multiprocessors that its kernels take; None: those of NCCL's channels. HybridEP's are a fact of frameworks.
    """

    once_to_a_place: bool
    copies_on_arrival: bool
    messages_beside: bool
    choice_bytes: float = 0.0
    choice_gradient_bytes: float = 0.0
    domain_expert_bytes: float = 0.0
    map_byte: int = 0
    fills_tiles: bool = False
    chooses_again: bool = False
    sms: int | None = None


ALL_TO_ALL = Dispatcher(once_to_a_place=False, copies_on_arrival=False, messages_beside=True)
# DeepEP's dispatch takes hidden states, indices of experts and weights together (fused_a2a.py: FusedDispatch). Within
# one NVLink domain a token goes to a rank if any of its experts is there (DeepEP, csrc/kernels/intranode.cu: dispatch,
# `is_token_in_rank`). Megatron-Core's `_DeepepManager` takes a top-k of the router's map of weights (`setup_metadata`)
# and makes maps of what arrives (`get_permuted_hidden_states_by_experts`), in one kernel with
# `enable_megatron_core_experimental`, which its recipes set (fusions/fused_indices_converter.py: IndicesToMultihot).
DEEP_EP = Dispatcher(
    once_to_a_place=True,
    copies_on_arrival=True,
    messages_beside=False,
    choice_bytes=INDEX_BYTES + FP32_BYTES,
    choice_gradient_bytes=FP32_BYTES,
    chooses_again=True,
    sms=20,  # core/transformer/transformer_config.py: moe_deepep_num_sms, as DeepEP's own default
)
# HybridEP (DeepEP, csrc/hybrid_ep): all ranks gather the map of tokens and experts, a byte each (deep_ep/
# hybrid_ep_buffer.py: dispatch_with_permute), from which a kernel says where in each rank a token goes
# (`sparse_to_dense_map`: [tokens, ranks of the domain]). With a token go the fp32 weights of all experts of the NVLink
# domain, and with its gradient theirs (executor/executor.cu: `dispatched_probs`). Where it arrives it is copied for
# each of its experts, whose rows are filled up at once (extension/permute.cu: `pad_multiple`), so that Transformer
# Engine's `Fp8Padding` has nothing to do.
HYBRID_EP = Dispatcher(
    once_to_a_place=True,
    copies_on_arrival=True,
    messages_beside=False,
    domain_expert_bytes=FP32_BYTES,
    map_byte=1,
    fills_tiles=True,
)

# By `parallelism.ep_dispatcher`.
DISPATCHERS: Mapping[str, Dispatcher] = {"all_to_all": ALL_TO_ALL, "deepep": DEEP_EP, "hybridep": HYBRID_EP}
