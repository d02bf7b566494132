"""A.X K2: gates of low rank behind norms, before attention and before experts alone."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import matmul_params_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import llama_like

MODEL = llama_like(4, 256, 8, 1024) | {
    "ffn": 512,
    "norm_gate_rank": 16,
    "moe": {"experts": 8, "top_k": 2, "ffn": 128, "dense_layers": 1},
}


def training(change: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    run = {"seq_len": 256, "global_batch_size": 8} | keys
    model = MODEL | (change or {})
    return parse_scenario({"model": model, "training": run, "parallelism": layout or {}, "cluster": "dgx-h200"})


def test_layers_have_two_matrices_for_each_gate() -> None:
    own, plain = training().model, training({"norm_gate_rank": None}).model
    more = [a.parameters - b.parameters for a, b in zip(layer_specs(own), layer_specs(plain), strict=True)]
    assert more == [2 * 256 * 16, *[2 * 2 * 256 * 16] * 3]
    assert count_parameters(own).norms - count_parameters(plain).norms == sum(more)
    assert matmul_params_per_token(own) - matmul_params_per_token(plain) == sum(more)
    assert [layer_block(training(), i).params for i in range(2)] == [
        spec.parameters - (0 if i == 0 else 8 * 3 * 256 * 128) for i, spec in enumerate(layer_specs(own)[:2])
    ]


@pytest.mark.parametrize(("framework", "kernels", "kept"), [("megatron", 1, 2), ("transformers", 4, 4)])
def test_a_gate_is_one_kernel_or_four_and_is_kept(framework: str, kernels: int, kept: int) -> None:
    block = layer_block(training(framework=framework), 0)
    (gate,) = (i for i in block.forward if isinstance(i, Compute) and i.name == "attention_norm_gate")
    assert gate.kernels == kernels
    (saved,) = (s for s in block.saved if s.name.startswith("attention_norm") and s.name.endswith("gate"))
    assert saved.bytes == 256 * 256 * kept


@pytest.mark.parametrize("layout", [{"tp": 4, "sp": True}, {"dp": 4, "zero": 3}, {"pp": 2}])
def test_layouts_run(layout: dict[str, Any]) -> None:
    assert simulate(training(layout=layout)).step_time_s > 0


def test_serving_takes_longer_with_gates() -> None:
    requests = {"count": 2, "prompt_len": 256, "output_len": 8}
    run = {"inference": {"requests": requests}, "cluster": "dgx-h200"}
    ends = [simulate_serving(parse_scenario(run | {"model": MODEL | {"norm_gate_rank": r}})).end_s for r in (16, None)]
    assert ends[0] > ends[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_position", "both"), ("parallel_block", True), ("hyper_connections", 4), ("mtp_layers", 1)],
)
def test_where_norms_stand_elsewhere_it_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key}: found .* norm_gate_rank"):
        training({key: value})
