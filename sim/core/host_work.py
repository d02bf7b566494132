"""Names the kinds of Python that torch's DTensor and FSDP2 run besides operators, and what one call of each is.

`calibrate.capture` notes each call, `calibrate.run` measures the host seconds of one (coefficient `host_KIND_s`), and
replays of captured programs charge them.
"""

from __future__ import annotations

HOST_WORK = {
    "dtensor_operator": "an operator of DTensors in the forward: sharding propagation, wrapping of its result",
    "dtensor_operator_backward": "the same in the backward",
    "dtensor_operator_optimizer": "the same in clipping and the optimizer, where one operator follows the other",
    "dtensor_mixed_operator": "an operator of a DTensor with a number or plain tensor, which leaves torch's fast path",
    "dtensor_conversion": "`from_local`, `to_local` or `redistribute` in the forward, without its transfer",
    "dtensor_conversion_backward": "the same in the backward",
    "dtensor_redistribute": "a change of placements that transfers, whatever asks for it; without the transfer itself",
    "fsdp2_group": "the forward's hooks of one parameter group: gather, copy, reshard",
    "fsdp2_parameter": "the same, for each parameter of the group",
    "fsdp2_group_backward": "the backward's hooks of one parameter group: gather, copy, reshard, reduce",
    "fsdp2_parameter_backward": "the same, for each parameter of the group",
}


def coefficient_of(kind: str) -> str:
    """Return the name under which a profile states the seconds of one call."""
    return f"host_{kind}_s"
