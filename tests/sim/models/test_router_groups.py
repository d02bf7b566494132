"""A choice limited to groups in plain torch: its kernels counted by running it, its bytes by its operators' sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sim.models.framework_facts import COMPILED_ROUTER, PLAIN_ROUTER
from sim.models.frameworks import FRAMEWORKS

TOKENS, EXPERTS, GROUPS, TOP_GROUPS = 64, 64, 8, 4
# On a GPU a sorted top-k is two kernels, and so is a masked copy.
KERNELS = {"topk_sorted": 2, "topk": 1, "masked_fill": 2}


class Recorder(TorchDispatchMode):
    """Names of the operators that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name == "topk" and (len(args) < 5 or args[4]):
            name = "topk_sorted"
        if name not in ("view", "_unsafe_view", "unsqueeze", "expand", "detach"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


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
    assert sum(KERNELS.get(name, 1) for name in seen.names) == PLAIN_ROUTER.group_kernels[0]


def test_bytes_of_one_score() -> None:
    """Read by top-k; copied wide; made boolean; inverted; scores copied; read, masked and written."""
    assert PLAIN_ROUTER.group_bytes[0] == 4 + 4 + (4 + 1) + (1 + 1) + (4 + 4) + (4 + 1 + 4)


@pytest.mark.parametrize("name", ["eager", "transformers", "compiled"])
def test_groups_cost_every_framework_of_plain_torch(name: str) -> None:
    router = FRAMEWORKS[name].router
    assert router == (COMPILED_ROUTER if name == "compiled" else PLAIN_ROUTER)
    assert router.group_kernels[0] > 0
