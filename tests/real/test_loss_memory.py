"""What a loss and 16-bit copies of weights hold, as torch allocates it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.timings.fused import peak_bytes

TOKENS, VOCAB = 256, 4096


class InPlace(torch.autograd.Function):
    """Megatron-LM's loss (core/tensor_parallel/cross_entropy.py) on one rank."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
        rows = torch.arange(len(target))
        logits -= logits.max(-1)[0][:, None]
        predicted = logits[rows, target].clone()
        torch.exp(logits, out=logits)
        total = logits.sum(-1)
        logits.div_(total[:, None])
        ctx.save_for_backward(logits, target)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        softmax, target = ctx.saved_tensors
        softmax[torch.arange(len(target)), target] -= 1.0
        return softmax.mul_(grad[:, None]), None


@pytest.mark.parametrize(
    ("loss", "bytes_a_logit"),
    [(F.cross_entropy, 12), (lambda x, y: InPlace.apply(x, y).mean(), 6)],
    ids=["torch", "megatron"],
)
def test_bytes_a_logit(loss: Callable[[Tensor, Tensor], Tensor], bytes_a_logit: int) -> None:
    """`sim.models.output.head.cross_entropy`: what stays and what its backward takes besides."""
    hidden = torch.randn(TOKENS, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, 8, dtype=torch.bfloat16)
    target = torch.randint(0, VOCAB, (TOKENS,))

    def step() -> None:
        logits = hidden @ weight.T
        value = loss(logits.float(), target)
        del logits
        value.backward()

    step()
    assert peak_bytes("cpu", step) == pytest.approx(bytes_a_logit * TOKENS * VOCAB, rel=0.02)


def test_autocast_keeps_every_weight_s_copy() -> None:
    """`sim.results.states`: fp32 parameters cast on use, 2 bytes each until the backward."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.shape == (64, 64):
            found[x.untyped_storage()._cdata] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        kept = model(torch.randn(8, 64, requires_grad=True))
    assert kept.requires_grad
    assert sum(found.values()) == 2 * 4 * 64 * 64
