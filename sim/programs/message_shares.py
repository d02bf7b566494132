"""How ZeRO-3 cuts the gather of a block into messages of whole tensors."""

from __future__ import annotations

from sim.core.program import Block


def message_shares(b: Block, messages: float) -> list[float]:
    """Return the shares of a block's parameters in `messages` messages that gather it, each at least an equal part.

    Tensors follow each other, joined until a message is large enough. If most of them are not known one by one, as
    frozen ones beside adapters, messages are equal.
    """
    if 2 * sum(b.tensors) < b.held_params:
        count = max(1, int(messages))
        return [1.0 / count] * count
    least, shares, size = sum(b.tensors) / max(1.0, messages), [0.0], 0
    for n in b.tensors:
        size += n
        shares[-1] = size / sum(b.tensors)
        if size >= least:
            shares.append(0.0)
            size = 0
    left = shares.pop() if len(shares) > 1 else 0.0
    return [*shares[:-1], shares[-1] + left]
