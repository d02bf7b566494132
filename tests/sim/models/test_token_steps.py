"""What copies tokens for their experts, step by step, where torch's operators do so."""

from __future__ import annotations

import pytest
from model_programs import MOE, TOKENS, make

from sim.core.program import Compute
from sim.models.layer import layer_block


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_bytes_of_all_kernels_that_add_up_copies_gradients(top_k):
    """Of each copy its gradient is read; of each token zeros are written, and the sum is read and written, in 16 bits;
    indices and weights' gradients take 20 bytes a copy. No kernel moves less than nothing."""
    block = layer_block(make(MOE | {"moe": MOE["moe"] | {"top_k": top_k}}, {"framework": "transformers"}), 0)
    found = [i for i in block.backward if isinstance(i, Compute) and i.name.startswith("permute_backward")]
    moved = {i.name: i.bytes for i in found if not i.name.endswith("_starts")}
    assert all(size >= 0 for size in moved.values())
    assert sum(moved.values()) == TOKENS * (top_k * (1024 * 2 + 20) + 3 * 1024 * 2)
    assert moved["permute_backward_singly"] == TOKENS * (top_k + 2) * 1024 * 2
