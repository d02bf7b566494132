"""Expert parallelism: each rank holds some of the experts, and tokens are sent to their experts and back.

A token has one copy for each of its top-k experts. Copies are sorted by expert, so that those of one rank are
consecutive. Ranks first exchange how many copies they send. One all-to-all then dispatches the copies, and another
returns the results, which are weighted and summed (Lepikhin et al. 2020, GShard, arXiv 2006.16668; dropless as in
MegaBlocks, arXiv 2211.15841). The backward does the same in reverse.

If experts themselves are split over ranks (`expert_tensor.py`), each of these ranks gets all of their copies.

Documentation: docs/expert_parallel.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from calibrate.bundled_model.model import Experts
from calibrate.parallel.comm import Group
from calibrate.parallel.expert_tensor import cut_expert, gather_rows, scatter_sum


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return group.all_to_all(x, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_to_all(grad, ctx.sent, ctx.received, backward=True), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; the backward restores the order by a gather, where autograd would sum rows."""

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
    """This rank's experts, and the router that all ranks have.

    `group`: ranks with different experts. `split`: ranks with different parts of each expert's inner width. `numbers`:
    this rank's token numbers in the micro-batch, for the router.
    """

    def __init__(self, whole: Experts, group: Group, split: Group, numbers: Tensor) -> None:
        super().__init__()
        self.router, self.group, self.split, self.numbers = whole.router, group, split, numbers
        each = whole.router.experts // group.size
        own = range(group.index * each, (group.index + 1) * each)
        self.experts = nn.ModuleDict({str(e): whole.experts[str(e)] for e in own})
        if split.size > 1:
            for expert in self.experts.values():
                cut_expert(expert, split)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows, self.numbers)
        order = torch.argsort(chosen.view(-1), stable=True)  # copies by expert, dropped ones last
        counts = torch.bincount(chosen.view(-1), minlength=self.router.experts)[: self.router.experts]
        dropping = self.router.capacity_factor is not None
        kept = int(counts.sum()) if dropping else len(order)
        done = self._everywhere(rows[order[:kept] // chosen.shape[1]], counts.view(self.group.size, -1))
        done = _filled(done, len(order))
        results = _Permute.apply(done, _inverse(order))
        out: Tensor = (results.view(*chosen.shape, -1) * weights[..., None]).sum(1).view(x.shape)
        return out

    def _everywhere(self, copies: Tensor, sent: Tensor) -> Tensor:
        """Compute each copy by its expert on any rank; `sent[rank, expert]` counts this rank's copies."""
        came = self.group.exchange_counts(sent)
        out_rows, in_rows = came.sum(1).tolist(), sent.sum(1).tolist()
        x = _Exchange.apply(copies, self.group, out_rows, in_rows) if self.group.size > 1 else copies
        y = self._by_expert(x, came[None]) if self.split.size == 1 else self._on_all_parts(x, came)
        out: Tensor = _Exchange.apply(y, self.group, in_rows, out_rows) if self.group.size > 1 else y
        return out

    def _on_all_parts(self, x: Tensor, came: Tensor) -> Tensor:
        """Compute rows of all ranks that share experts with this one, by all parts of the experts.

        `came[sender, expert]` counts this rank's rows. Each rank's rows are padded to the number of the largest rank.
        """
        every = self.split.exchange_counts(came.expand(self.split.size, *came.shape).contiguous())
        most = int(every.sum((1, 2)).max())
        gathered = gather_rows(_filled(x, most), self.split)
        out = scatter_sum(self._by_expert(gathered, every), self.split)
        return _first(out, len(x))

    def _by_expert(self, x: Tensor, came: Tensor) -> Tensor:
        """Compute rows by this rank's experts, in the order of arrival; `came[part, sender, expert]` counts them."""
        counts, kept = came.sum((0, 1)), int(came.sum())
        if kept == len(x) and (len(counts) == 1 or came.shape[:2].numel() == 1):
            return self._own(x, counts)
        sort = torch.argsort(_expert_of(came, len(x)), stable=True)
        y = self._own(_first(_Permute.apply(x, sort), kept), counts)
        out: Tensor = _Permute.apply(_filled(y, len(x)), _inverse(sort))
        return out

    def _own(self, x: Tensor, counts: Tensor) -> Tensor:
        """Compute this rank's experts one after the other."""
        pieces = x.split(counts.tolist())
        return torch.cat([e(piece) for e, piece in zip(self.experts.values(), pieces, strict=True)])


def _expert_of(came: Tensor, rows: int) -> Tensor:
    """Return the expert of each of `rows` rows, in order of parts, senders and experts; padding is sorted last."""
    parts, senders, experts = came.shape
    own = came.reshape(parts, -1)
    counts = torch.cat((own, rows // parts - own.sum(1, keepdim=True)), 1)
    numbers = torch.arange(experts + 1, device=came.device)
    each = torch.cat((numbers[:-1].repeat(senders), numbers[-1:]))
    return each.repeat(parts).repeat_interleave(counts.view(-1))


def _filled(x: Tensor, rows: int) -> Tensor:
    """Pad `x` with rows of zeros to `rows` rows."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), x.shape[1])))


def _first(x: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows; if these are all, without a node of autograd."""
    return x if len(x) == rows else x[:rows]
