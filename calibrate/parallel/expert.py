"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back.

A token's copies, one for each of its top-k experts, are sorted by expert, so that what goes to one rank is
consecutive; one all-to-all dispatches them, another brings the results home, where they are weighted and
summed (Lepikhin et al. 2020, GShard, arXiv 2006.16668; dropless as in MegaBlocks, arXiv 2211.15841). How many
copies come from where is asked first. Backward is the same in reverse.

Beside it: docs/expert_parallel.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from calibrate.model import Experts
from calibrate.parallel.comm import Group


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return group.all_to_all(x, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_to_all(grad, ctx.sent, ctx.received, backward=True), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; backward in the order they had (a gather, not the sum of rows that autograd makes)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad[_inverse(order)], None


def _inverse(order: Tensor) -> Tensor:
    out = torch.empty_like(order)
    out[order] = torch.arange(len(order), device=order.device, dtype=order.dtype)
    return out


class ExpertParallel(nn.Module):
    """This rank's experts, and the router that all ranks have. `numbers` of this rank's tokens, for the router."""

    def __init__(self, whole: Experts, group: Group, numbers: Tensor) -> None:
        super().__init__()
        self.router, self.group, self.numbers = whole.router, group, numbers
        each = whole.router.experts // group.size
        own = range(group.index * each, (group.index + 1) * each)
        self.experts = nn.ModuleDict({str(e): whole.experts[str(e)] for e in own})

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows, self.numbers)
        order = torch.argsort(chosen.view(-1), stable=True)  # copies by expert, dropped ones last
        counts = torch.bincount(chosen.view(-1), minlength=self.router.experts)[: self.router.experts]
        dropping = self.router.capacity_factor is not None
        kept = int(counts.sum()) if dropping else len(order)
        done = self._everywhere(rows[order[:kept] // chosen.shape[1]], counts.view(self.group.size, -1))
        if kept < len(order):
            done = torch.cat((done, done.new_zeros(len(order) - kept, done.shape[1])))
        results = _Permute.apply(done, _inverse(order))
        out: Tensor = (results.view(*chosen.shape, -1) * weights[..., None]).sum(1).view(x.shape)
        return out

    def _everywhere(self, copies: Tensor, sent: Tensor) -> Tensor:
        """Each copy through its expert, wherever that is. `sent[rank, expert]` counts them."""
        came = self.group.exchange_counts(sent)
        out_rows, in_rows = came.sum(1).tolist(), sent.sum(1).tolist()
        x = _Exchange.apply(copies, self.group, out_rows, in_rows) if self.group.size > 1 else copies
        if self.group.size > 1 and len(self.experts) > 1:  # by sender now: by expert
            sort = torch.argsort(_expert_of(came), stable=True)
            y = _Permute.apply(self._own(_Permute.apply(x, sort), came.sum(0)), _inverse(sort))
        else:
            y = self._own(x, came.sum(0))
        out: Tensor = _Exchange.apply(y, self.group, in_rows, out_rows) if self.group.size > 1 else y
        return out

    def _own(self, x: Tensor, counts: Tensor) -> Tensor:
        """This rank's experts, one after the other."""
        pieces = x.split(counts.tolist())
        return torch.cat([e(piece) for e, piece in zip(self.experts.values(), pieces, strict=True)])


def _expert_of(came: Tensor) -> Tensor:
    """The expert of each row that came, in order of senders and then experts."""
    experts = torch.arange(came.shape[1], device=came.device).repeat(came.shape[0])
    return experts.repeat_interleave(came.reshape(-1))
