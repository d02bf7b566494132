"""What Composer does behind a step: it reports losses and counts, and gathers metrics number by number."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.programs.step_metrics import metric_items
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from sim.variants.frameworks.records import FRAMEWORKS

OF_LOOPS = ("host", "metric_zeros", "metric_copies")


def scenario(dp: int, framework: str = "composer", **layout: Any) -> Scenario:
    model = {"layers": 2, "hidden": 512, "heads": 4, "ffn": 2048, "vocab": 4096, "mlp": "gelu", "norm": "layernorm"}
    training = {"seq_len": 128, "global_batch_size": dp, "param_dtype": "fp32", "framework": framework}
    parallelism = {"dp": dp, "zero": 3, **layout}
    return parse_scenario({"model": model, "training": training, "parallelism": parallelism, "cluster": "dgx-h100"})


def items(own: Scenario) -> list[Comm | Compute]:
    made = metric_items(make_plan(own), own.for_training)
    return [i for i in made if isinstance(i, Comm | Compute)]


def test_two_sums_of_two_metrics() -> None:
    """torchmetrics: for each sum a barrier, zeros, a gather, and copies, which are stacked and added;
    before them the loss, samples and tokens, and seconds."""
    messages = [i for i in items(scenario(16)) if isinstance(i, Comm)]
    assert [m.bytes for m in messages] == [4.0] * 3 + [4.0, 64.0] * 4
    assert all(m.blocking and m.group == "dp_cp" for m in messages)
    assert [i.kernels for i in items(scenario(16)) if isinstance(i, Compute)] == [16, 18] * 4


def test_others_and_a_lone_rank_gather_nothing() -> None:
    assert not items(scenario(1))
    assert not [name for name, record in FRAMEWORKS.items() if record.metric_losses and name != "composer"]
    assert not items(scenario(16, "eager"))


@pytest.mark.parametrize("layout", [{}, {"shard_size": 8}, {"zero": 0}, {"zero": 2}])
def test_the_host_s_loops_grow_with_the_ranks(layout: dict[str, Any]) -> None:
    """A rank more is eight launches more, of 9 us each."""

    def at_the_end_s(dp: int) -> float:
        rows = simulate(scenario(dp, **layout)).result["time_by_operator"][0]["operators"]
        return sum(r["seconds"] for r in rows if r["phase"] == "optimizer" and r["operator"] in OF_LOOPS)

    assert at_the_end_s(512) - at_the_end_s(128) == pytest.approx(8 * 384 * 9e-6, rel=0.2)
