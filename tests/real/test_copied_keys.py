"""torch copies a sequence's keys for each of its queries where there are several sequences, and not of one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sim.core.program import Compute  # noqa: E402
from sim.models.layers.indexer_of_transformers import separate_scores  # noqa: E402

QUERIES, HEADS, WIDTH, KEYS = 6, 3, 5, 7


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the elements that are copied."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("sequences", [1, 2])
def test_scores_of_an_indexer_copy_as_simulated(sequences: int) -> None:
    """The product of transformers/models/deepseek_v32/modeling_deepseek_v32.py: DeepseekV32Indexer.forward."""
    q, k = torch.ones(sequences, QUERIES, HEADS, WIDTH), torch.ones(sequences, KEYS, WIDTH)
    with _Copies() as found:  # type: ignore[no-untyped-call]
        torch.matmul(q, k.transpose(-1, -2).unsqueeze(1))
    items = separate_scores((HEADS, WIDTH), (sequences, QUERIES, KEYS), ("bf16", 2), 0.0)
    assert found.elements == sum(i.shape[0] for i in items if isinstance(i, Compute) and i.kind == "permute")
