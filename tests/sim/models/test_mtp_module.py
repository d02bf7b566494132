"""A prediction module's copies before its projection, in closed form."""

from __future__ import annotations

import pytest
from model_programs import MOE, make

from sim.core.program import Compute
from sim.models.dims import Shard
from sim.models.output.mtp import mtp_block, mtp_blocks
from sim.models.parameters import count_parameters
from sim.simulation import simulate
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


def test_a_repeated_module_runs_twice_and_is_kept_once() -> None:
    """Megatron-LM, core/transformer/multi_token_prediction.py: `mtp_use_repeated_layer`."""
    once, twice, repeated = (
        make(MOE | {"mtp_layers": n, "mtp_repeated": same}, {"framework": "megatron"}, dp=2)
        for n, same in ((1, False), (2, False), (2, True))
    )
    counts = [count_parameters(s.model).mtp for s in (once, twice, repeated)]
    assert counts == [counts[0], 2 * counts[0], counts[0]]
    results = [simulate(s).result for s in (once, twice, repeated)]
    kept = [result["memory"][0]["parameters"] for result in results]
    assert kept[0] == kept[2] < kept[1]
    first, again = mtp_blocks(repeated, Shard())
    assert (first.forward, first.backward, first.saved) == (again.forward, again.backward, again.saved)
    assert (again.params, again.expert_params, again.quantized_bytes) == (0, 0, 0)
    assert results[0]["step_time_s"] < results[2]["step_time_s"] <= results[1]["step_time_s"]
