"""torch's DDP keeps buckets beside the gradients, copies these into them and back (torch/csrc/distributed/c10d)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Compute, Phase
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.parameters import count_parameters
from sim.programs.data_parallel import make_data_parallel
from sim.programs.stages import stage_blocks
from sim.programs.weave import weave_backward
from sim.ranks.plan import make_plan
from sim.simulation import simulate

BACKWARD = frozenset((Phase.INPUT_GRAD, Phase.WEIGHT_GRAD))


def scenario(framework: str, **layout: Any) -> Scenario:
    """GPT-2 in fp32 on eight GPUs, unless the layout says otherwise."""
    training = {"seq_len": 128, "global_batch_size": 16, "param_dtype": "fp32", "framework": framework}
    return parse_scenario(
        {"model": "gpt2", "training": training, "parallelism": {"dp": 8, **layout}, "cluster": "dgx-h100"}
    )


def copied_bytes(own: Scenario, last: bool) -> float:
    plan = make_plan(own)
    blocks = stage_blocks(plan, plan.parts[0], 0)
    woven = weave_backward(blocks, make_data_parallel(plan), BACKWARD, last)
    return sum(i.bytes for items in woven for i in items if isinstance(i, Compute) and i.name == "join gradients")


@pytest.mark.parametrize("framework", ["compiled", "transformers", "composer"])
def test_every_gradient_is_copied_there_and_back_once_a_step(framework: str) -> None:
    own = scenario(framework)
    assert copied_bytes(own, last=True) == pytest.approx(4 * 4 * count_parameters(own.model).total)
    assert copied_bytes(own, last=False) == 0


@pytest.mark.parametrize(("framework", "layout"), [("eager", {}), ("compiled", {"dp": 1}), ("compiled", {"zero": 3})])
def test_no_buckets_without_ddp(framework: str, layout: dict[str, Any]) -> None:
    own = scenario(framework, **layout)
    assert copied_bytes(own, last=True) == 0


def test_buckets_lie_beside_the_gradients() -> None:
    own = scenario("compiled")
    (rank,) = simulate(own).result["memory"]
    assert rank["gradients"] == pytest.approx(2 * 4 * count_parameters(own.model).total)
