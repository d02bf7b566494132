"""A prediction module's copies before its projection, in closed form."""

from __future__ import annotations

import pytest

from sim.core.program import Compute
from sim.models.output.mtp import mtp_block
from tests.sim.cases import scenario_with


@pytest.mark.parametrize(
    ("framework", "tp", "kernels"),
    [("megatron", 1, (1, 2)), ("megatron", 2, (1, 2)), ("eager", 1, (1, 0)), ("compiled", 1, (0, 0))],
)
def test_both_states_are_joined(framework: str, tp: int, kernels: tuple[int, int]) -> None:
    """torch.cat of embedding and state, [tokens / tp, hidden] each: read and written. Transformer Engine's norms copy
    their parts of the gradient; torch's read them where they are, and a compiler writes both norms' results there."""
    training = {"seq_len": 1024, "global_batch_size": 8, "framework": framework}
    model = {"preset": "llama3-8b", "mtp_layers": 1}
    s = scenario_with(training, {"dp": 8 // tp, "tp": tp, "sp": tp > 1}, model=model, cluster="dgx-h100")
    block, moved = mtp_block(s), 2 * 2 * (1024 / tp) * 4096 * 2
    names = ("mtp_states", "mtp_states_backward")
    for program, name, number in zip((block.forward, block.backward), names, kernels, strict=True):
        found = [(i.kernels, i.bytes) for i in program if isinstance(i, Compute) and i.name == name]
        assert found == ([(number, moved)] if number else [])
