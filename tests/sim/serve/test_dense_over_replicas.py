"""SGLang's replicas that share experts split dense MLPs and the output matrix, unless they are told not to."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario
from sim.models.layers import layer_specs
from sim.models.serving.operators import head_samples
from sim.prices.profiles import load_profile
from sim.serve.memory import weight_bytes
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving
from tests.sim.cases import scenario_with

HIDDEN, FFN, VOCAB = 7168, 18432, 129280  # DeepSeek-V3's; its first three layers have dense MLPs


def spread(engine: str = "sglang-0.5", layout: dict[str, int] | None = None, **inference: Any) -> Scenario:
    section = {"engine": engine, "requests": {"prompt_len": 500, "output_len": 4, "count": 16}}
    return scenario_with(
        parallelism=layout or {"dp": 8, "ep": 8},
        model="deepseek-v3",
        cluster="dgx-h200",
        calibration="h200-sxm",
        inference=section | inference,
    )


OWN = {"dense_over_replicas": False, "head_over_replicas": False}


@pytest.mark.parametrize("layout", [{"dp": 8, "ep": 8}, {"dp": 8, "expert_tp": 8}, {"dp": 4, "tp": 2, "ep": 8}])
def test_a_dense_mlp_computes_all_tokens_with_a_part_of_its_weights(layout: dict[str, int]) -> None:
    whole, own = (serving_dims(spread(layout=layout, **keys)) for keys in ({}, OWN))
    first, tp = layer_specs(whole.model)[0], layout.get("tp", 1)
    saved = first.served_elements(own).linear - first.served_elements(whole).linear
    assert saved == 3 * HIDDEN * FFN * (1 / tp - 1 / 8)
    assert first.mlp is not None
    tokens = 64 * 8 // tp
    there, *ops, back = first.mlp.serve(whole, 64)
    messages = [(m.kind, m.group, m.bytes) for m in (there, back) if isinstance(m, Comm)]
    assert messages == [(kind, "experts", tokens * HIDDEN * 2.0) for kind in ("all_gather", "reduce_scatter")]
    gemms = [op for op in ops if isinstance(op, Compute) and op.kind == "gemm"]
    assert sum(op.flops for op in gemms) == 2 * tokens * 3 * HIDDEN * FFN / 8
    assert not any(isinstance(op, Comm) for op in first.mlp.serve(own, 64))


def test_every_rank_gets_the_logits_of_all_replicas() -> None:
    whole, own = (serving_dims(spread(**keys)) for keys in ({}, OWN))
    messages = [(m.kind, m.group, m.bytes) for m in head_samples(whole, 16) if isinstance(m, Comm)]
    assert messages == [("all_gather", "experts", 8 * 16 * n * 2.0) for n in (HIDDEN, VOCAB)]
    (output,) = (op for op in head_samples(whole, 16) if isinstance(op, Compute) and op.name == "output")
    assert output.flops == 2 * 8 * 16 * HIDDEN * VOCAB / 8
    assert not any(isinstance(op, Comm) for op in head_samples(own, 16))


def test_weights_of_both_are_kept_once_by_all_replicas() -> None:
    costs = [iteration_costs(s, load_profile(s.calibration)) for s in (spread(), spread(**OWN))]
    less, more = (weight_bytes(c.dims, c.specs, c.stages[0]) for c in costs)
    assert more - less == pytest.approx(
        7 / 8 * (3 * 3 * HIDDEN * FFN * costs[0].dims.weight_bytes + HIDDEN * VOCAB * 2.0)
    )


def test_more_tokens_on_other_replicas_delay_a_dense_mlp() -> None:
    """By what 4,096 tokens of each take more than 64: their multiplications, at least."""
    s = spread()
    costs = iteration_costs(s, load_profile(s.calibration))
    dense = [i for i, spec in enumerate(costs.specs) if not spec.serve_exchange(costs.dims, 1)[0]]
    (i,) = dense
    few, many = (Load(64, 64, 64 * 1000, (), 64, 1, pooled) for pooled in (64, 4096))
    assert costs._routed_more_s(few, costs.stages[0]) == 0.0
    one = costs._routed_difference_s(4096, 64, i)
    assert one > 2 * 8 * (4096 - 64) * 3 * HIDDEN * FFN / 8 / 1979e12
    assert costs.device_seconds(many)[0] - costs.device_seconds(few)[0] > costs.stages[0].layers[i] * one


def test_other_engines_do_not() -> None:
    assert (serving_dims(spread("vllm-0.28")).dense_tp, serving_dims(spread("vllm-0.28")).head_tp) == (0, 0)
    with pytest.raises(InputError, match=r"dense_over_replicas: found true; engine vllm-0\.28 cannot do that"):
        spread("vllm-0.28", dense_over_replicas=True)


def test_replicas_that_share_nothing_are_told() -> None:
    noted = spread(layout={"tp": 8}, head_over_replicas=False).warnings
    assert any("inference.head_over_replicas: of no effect, as no replicas share experts" in note for note in noted)


def test_requests_are_served_to_the_end() -> None:
    assert simulate_serving(spread()).result["requests"] == 16
