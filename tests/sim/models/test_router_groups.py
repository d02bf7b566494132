"""A choice limited to groups in plain torch: its kernels counted by running it, its bytes by its operators' sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sim.variants.frameworks.megatron import MEGATRON_ROUTER
from sim.variants.frameworks.parts import (
    COMPILED_ROUTER,
    PLAIN_ROUTER,
    RouterKernels,
)
from sim.variants.frameworks.records import FRAMEWORKS

TOKENS, EXPERTS, GROUPS, TOP_GROUPS = 64, 64, 8, 4
# On a GPU a sorted top-k is two kernels, and so is a masked copy.
KERNELS = {"topk_sorted": 2, "topk": 1, "masked_fill": 2}


class Recorder(TorchDispatchMode):
    """Names of the operators that write memory, and the bytes that they move of whole tensors of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name == "topk" and (len(args) < 5 or args[4]):
            name = "topk_sorted"
        found = func(*args, **(kwargs or {}))
        if name not in ("view", "_unsafe_view", "unsqueeze", "expand", "detach"):
            self.names.append(name)
            moved = [whole_bytes(x) for x in (*args, *(found if isinstance(found, tuple) else (found,)))]
            # On a GPU a masked copy is a copy of the first argument, read and written, before the mask is applied.
            self.bytes += sum(moved) + (2 * moved[0] if name == "masked_fill" else 0)
        return found

    @property
    def kernels(self) -> int:
        return sum(KERNELS.get(name, 1) for name in self.names)


def whole_bytes(x: object) -> int:
    """Bytes of a tensor with a number for each score; none of smaller ones, and of views that repeat one number."""
    whole = isinstance(x, Tensor) and x.numel() == TOKENS * EXPERTS and 0 not in x.stride()
    return x.numel() * x.element_size() if whole and isinstance(x, Tensor) else 0


def limited(scores: Tensor) -> Tensor:
    """Scores with minus infinity outside each token's best groups, a group ranked by its two best experts."""
    by_group = scores.view(TOKENS, GROUPS, -1)
    best = by_group.topk(2, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(best, k=TOP_GROUPS, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, chosen, 1)
    wide = mask.unsqueeze(-1).expand_as(by_group).reshape(TOKENS, EXPERTS)
    return scores.masked_fill(~wide.bool(), float("-inf"))


def test_plain_torch_launches_as_many_kernels() -> None:
    scores = torch.rand(TOKENS, EXPERTS)
    with Recorder() as seen:
        found = limited(scores)
    assert (found > float("-inf")).sum().item() == TOKENS * EXPERTS * TOP_GROUPS / GROUPS
    assert seen.kernels == PLAIN_ROUTER.group_kernels[0]


@pytest.mark.parametrize("router", [PLAIN_ROUTER, MEGATRON_ROUTER])
def test_the_choice_of_groups_moves_as_many_bytes_whoever_runs_it(router: RouterKernels) -> None:
    scores = torch.rand(TOKENS, EXPERTS)
    with Recorder() as seen:
        limited(scores)
    assert (seen.kernels, seen.bytes) == (router.group_kernels[0], router.group_bytes[0] * TOKENS * EXPERTS)


def test_masked_scores_that_go_on_have_a_gradient() -> None:
    scores = torch.rand(TOKENS, EXPERTS, requires_grad=True)
    found, gradient = limited(scores), torch.rand(TOKENS, EXPERTS)
    with Recorder() as seen:
        torch.autograd.grad(found, scores, gradient)
    group = MEGATRON_ROUTER.group_kernels[1], MEGATRON_ROUTER.group_bytes[1]
    assert (seen.kernels, seen.bytes / TOKENS / EXPERTS) == group


@pytest.mark.parametrize("name", ["eager", "transformers", "compiled"])
def test_groups_cost_every_framework_of_plain_torch(name: str) -> None:
    router = FRAMEWORKS[name].router
    own = COMPILED_ROUTER if name == "compiled" else PLAIN_ROUTER
    assert (router.group_kernels, router.group_bytes) == (own.group_kernels, own.group_bytes)
    assert router.group_kernels[0] > 0
