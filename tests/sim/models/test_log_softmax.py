"""torch's own loss: its kernels one by one, or as a profile measured it as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import dims
from sim.models.output.head import head_parts
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile

MEASURED = Path("scenarios/cuda/h100.json")
TOKENS, VOCAB = 8192, 32000  # of its largest loss


def scenario(framework: str = "transformers", **layout: object) -> Scenario:
    training = {"seq_len": TOKENS, "global_batch_size": 1, "framework": framework, "master_weights": False}
    data = {"model": {"preset": "llama3-8b", "vocab": VOCAB}, "training": training, "cluster": "dgx-h100"}
    return parse_scenario(data | {"parallelism": layout})


def loss_of(s: Scenario) -> tuple[Compute, Compute]:
    """The loss forward and backward, without what a trainer does with the logits."""
    part = head_parts(s, dims(s))[-1]
    found = [x for x in (*part.forward, *part.backward) if isinstance(x, Compute) and x.kind == "cross_entropy"]
    forward, backward = found
    return forward, backward


def measured_s() -> list[float]:
    """Seconds of `F.cross_entropy(logits.float(), target)` on an H100, its points times the kernels they stand for."""
    points = json.loads(MEASURED.read_text("utf-8"))["points"]
    names = {"cross_entropy": 7, "cross_entropy_input_grad": 4}
    return [p["seconds"][-1] * names[p["op"]] for p in points if p["op"] in names and p["dtype"] == "bf16"]


def test_kernels_of_the_shipped_profile_take_what_was_measured() -> None:
    """With the bytes of a softmax in separate kernels the forward took 63 % longer, the backward 15 % less."""
    s = scenario()
    costs = Costs(load_profile("h100-sxm", "test"), s.cluster.gpu)
    found = [costs.compute(x).seconds for x in loss_of(s)]
    assert found == [pytest.approx(x, rel=limit) for x, limit in zip(measured_s(), (0.14, 0.05), strict=True)]


def test_a_profile_with_points_of_the_loss_prices_it_as_a_whole() -> None:
    s = scenario()
    costs = Costs(load_profile(str(MEASURED), "test"), s.cluster.gpu)
    found = [costs.compute(x).seconds for x in loss_of(s)]
    assert found == [pytest.approx(x, rel=1e-6) for x in measured_s()]


def test_its_kernels_move_these_bytes() -> None:
    """Forward: logits to fp32 (6), their log-softmax (8). Backward: zeros (4), both read and the gradient written (12),
    to 16 bits (6)."""
    forward, backward = loss_of(scenario())
    logits = TOKENS * VOCAB
    moved = [{x.kind: x.bytes / logits for x in whole.runs} for whole in (forward, backward)]
    assert moved[0] == {"cast": 6.0, "softmax": 8.0, "elementwise": pytest.approx(0.0, abs=1e-3)}
    assert moved[1] == {"elementwise": 4.0, "softmax": 12.0, "cast": 6.0}
    assert [sum(x.kernels for x in whole.runs) for whole in (forward, backward)] == [forward.kernels, backward.kernels]


@pytest.mark.parametrize(
    ("framework", "layout"), [("megatron", {}), ("nanotron", {}), ("eager", {"tp": 2}), ("compiled", {})]
)
def test_other_losses_and_split_vocabularies_are_no_log_softmax(framework: str, layout: dict[str, int]) -> None:
    assert [x.runs for x in loss_of(scenario(framework, **layout))] == [(), ()]
