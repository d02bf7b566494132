"""Gradients that are freed between steps, and what torch's allocator reserves beyond the peak."""

from __future__ import annotations

from typing import Any

import pytest

from sim.models.parameters import count_parameters
from sim.prices.operator_prices import Costs
from sim.simulation import prepare, simulate
from tests.sim.cases import case

PSI = count_parameters(case().model).total


@pytest.mark.parametrize(
    ("training", "bytes_a_logit"),
    [({}, 2), ({"precision": "fp32"}, 0), ({"framework": "megatron"}, 0), ({"cross_entropy": "fused"}, 0)],
)
def test_the_logits_own_segment_is_of_no_use_at_the_loss(training: dict[str, Any], bytes_a_logit: int) -> None:
    """torch's loss: 2 bytes a logit freed, then 4 asked for where the fp32 copy's 4 are taken already."""
    vocab, tokens = 128_000, 4096
    sizes = {"global_batch_size": 1, "seq_len": tokens, "zero_grad": "keep"}
    r = simulate(case(None, {**sizes, **training}, {"vocab": vocab})).result
    rounding = 5 * 2 * 2**20
    stranded = r["peak_reserved_bytes"] - r["peak_memory_bytes"]
    assert bytes_a_logit * tokens * vocab <= stranded < bytes_a_logit * tokens * vocab + rounding


def unused_bytes(layout: dict[str, Any], training: dict[str, Any]) -> float:
    sizes = {"global_batch_size": 2, "cross_entropy": "fused", **training}
    r = simulate(case(layout, sizes)).result
    return float(r["peak_reserved_bytes"] - r["peak_memory_bytes"])


def left_by_gradients(layout: dict[str, Any], seq_len: int, **training: Any) -> float:
    """Bytes reserved and not allocated at the peak, more than where gradients are never freed."""
    freed, kept = (
        unused_bytes(layout, {"seq_len": seq_len, **training, "zero_grad": z}) for z in ("set_to_none", "keep")
    )
    return freed - kept


def test_freed_gradients_leave_segments_that_larger_tensors_cannot_use() -> None:
    """At 2,048 tokens activations fit in what gradients leave behind; at 65,536 little but norms' statistics does."""
    assert left_by_gradients({"dp": 2}, 65_536) == pytest.approx(4 * PSI, rel=0.1)
    assert left_by_gradients({"dp": 2}, 2_048) < 4 * PSI / 2


def test_shards_that_are_reduced_on_another_stream_leave_nothing_to_activations() -> None:
    """torch's FSDP allocates them on a stream of their own; DeepSpeed's ZeRO-2 does not."""
    shards = 4 * PSI / 2
    for seq_len in (512, 65_536):
        assert left_by_gradients({"dp": 2, "zero": 3}, seq_len) == pytest.approx(shards, rel=0.1)
    by_deepspeed = left_by_gradients({"dp": 2, "zero": 2}, 512, framework="deepspeed", grad_dtype="fp32")
    assert by_deepspeed < shards / 2


def test_buffers_of_gathered_parameters_are_reserved_beside_what_is_at_the_peak() -> None:
    """FSDP2's forward has two blocks' buffers on another stream: here an embedding's and a layer's. Of these the peak
    counts the larger, beside the block in use. FSDP1 gathers in place."""
    layer = 12 * 1024**2
    idle = [unused_bytes({"dp": 2, "zero": 3}, {"zero_grad": "keep", "framework": f}) for f in ("eager", "composer")]
    assert idle[0] - idle[1] == pytest.approx(2 * layer, rel=0.01)


def steps_of(zero_grad: str, **changes: Any) -> Any:
    return simulate(case(None, {"zero_grad": zero_grad, **changes}))


def test_gradients_set_to_none_come_with_the_first_backward_and_go() -> None:
    kept, freed = (steps_of(z, global_batch_size=2).memory_over(4)[0] for z in ("keep", "set_to_none"))
    assert set(kept.gradients) == {4.0 * PSI}
    step_s = freed.time_s[-1] / 4
    for i in range(4):
        mine = freed.gradients[(freed.time_s >= i * step_s * 1.05) & (freed.time_s < (i + 1) * step_s)]
        assert mine[0] in (0.0, 4.0 * PSI)
        assert mine[-1] == pytest.approx(4.0 * PSI)
    assert freed.gradients[0] == 0.0


def test_a_step_of_one_micro_batch_holds_no_gradients_at_the_loss() -> None:
    kept, freed = (steps_of(z, global_batch_size=1) for z in ("keep", "set_to_none"))
    many = [steps_of(z, global_batch_size=4) for z in ("keep", "set_to_none")]
    less = kept.outcome.peak_memory_bytes - freed.outcome.peak_memory_bytes
    assert 0 < less <= 4.0 * PSI
    assert many[0].outcome.peak_memory_bytes == many[1].outcome.peak_memory_bytes
    assert freed.outcome.memory[0].gradients == pytest.approx(4.0 * PSI)
    assert kept.step_time_s == freed.step_time_s


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}])
@pytest.mark.parametrize("batch", [8, 4])
def test_the_peak_of_freed_gradients_takes_no_simulation(layout: dict[str, int], batch: int) -> None:
    scenario = case(layout, {"zero_grad": "set_to_none", "global_batch_size": batch})
    whole = simulate(scenario)
    step = prepare(scenario, Costs(whole.profile, scenario.cluster.gpu))
    assert step.peak_bytes == pytest.approx(whole.outcome.peak_memory_bytes, rel=1e-12)
    assert simulate(scenario, expand=True).outcome.peak_memory_bytes == pytest.approx(step.peak_bytes, rel=1e-12)


def test_the_output_matrix_gets_its_gradient_after_the_loss() -> None:
    """The loss's backward holds two fp32 tensors of all logits, and has ended by then."""
    sizes = {"global_batch_size": 1, "seq_len": 4096, "zero_grad": "set_to_none"}
    step = simulate(case(None, sizes, {"vocab": 128_000}))
    (stage,) = step.stages[0].values()
    states, head = step.states[0], stage.blocks[-1]
    saved = sum(s.bytes for b in stage.blocks for s in b.saved)
    lasting = states.parameters + states.optimizer + states.gathered
    assert head.params * stage.dp.fleeting_gradient_bytes > 1e8
    assert step.outcome.peak_memory_bytes == pytest.approx(lasting + saved + head.backward_peak_bytes, rel=1e-9)
