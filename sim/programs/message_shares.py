"""How ZeRO-3 cuts the parameters of a block into messages (`parallelism.gather_bucket_bytes`)."""

from __future__ import annotations

from sim.core.program import Block


def message_shares(b: Block, messages: float) -> list[float]:
    """The messages that gather a block's parameters, each by its share of them; none is below 1 / `messages`.

    Tensors are joined in order until a message is large enough. Where the sizes of most of them are unknown, as of
    frozen ones beside adapters, all messages are equal.
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
