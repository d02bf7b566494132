"""nanotron's ZeRO-1 gathers lists of tensors: each rank's part of each tensor is copied back by a kernel of its own."""

from __future__ import annotations

import pytest

from sim.core.program import Comm, Compute
from sim.models.layer import layer_block
from sim.programs.data_parallel import make_data_parallel
from sim.programs.updated_parameters import gather_after_optimizer
from sim.ranks.plan import make_plan
from tests.sim.models.test_nanotron_memory import scenario

DP = 8


@pytest.mark.parametrize(
    ("framework", "zero", "copied"), [("nanotron", 1, True), ("nanotron", 2, False), ("eager", 1, False)]
)
def test_each_rank_s_part_of_each_tensor_is_copied_back(framework: str, zero: int, copied: bool) -> None:
    """distributed.py, `all_gather_coalesced`: parts joined rank by rank, gathered, put into the ranks' buffers, copied
    back. Each reads and writes every 16-bit parameter once: 4 bytes."""
    s = scenario(framework, dp=DP, zero=zero)
    s = s.unchecked_copy(update={"parallelism": s.parallelism.model_copy(update={"param_gather_overlap": False})})
    block = layer_block(s, 0)
    items = gather_after_optimizer((block, block), make_data_parallel(make_plan(s)))
    kernels = [item.kernels for item in items if isinstance(item, Compute)]
    if not copied:
        assert kernels == []
        return
    # qkv_proj, o_proj, gate_up_proj, down_proj and two norms, of two layers
    assert kernels == [DP, DP, 2 * 6 * DP]
    assert {item.bytes for item in items if isinstance(item, Compute)} == {4.0 * 2 * block.params}
    assert [isinstance(item, Comm) for item in items] == [False, True, False, False]
