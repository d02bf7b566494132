"""Small scenarios and profiles that several tests share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sim.core.program import BlockKind
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.prices.profile import BlockPoint, Profile
from sim.programs.data_parallel import make_data_parallel
from sim.ranks.plan import make_plan
from sim.simulation import simulate

SCENARIOS = Path(__file__).parents[2] / "scenarios"
GOOD = """\
name: good
model: {layers: 8, hidden: 256, heads: 8, kv_heads: 4, vocab: 1000}
training:
  seq_len: 128
  global_batch_size: 32
parallelism:
  dp: 2
cluster: dgx-h100
"""
GPT = {
    "layers": 8,
    "hidden": 1024,
    "heads": 8,
    "ffn": 4096,
    "vocab": 1024,
    "mlp": "gelu",
    "norm": "layernorm",
    "bias": True,
    "positions": "none",
}
FREE_LINKS = {
    "preset": "dgx-h100",
    "intra_node": {"bandwidth_bytes_per_s": 1e18, "latency_s": 0.0},
    "inter_node": {"nic_bandwidth_bytes_per_s": 1e18, "latency_s": 0.0},
}


def llama_like(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """A model of these sizes made as Llama is; `more` of its keys are added."""
    style = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, **style, **more}


def scenario_with(
    training: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    model: Any = "llama3-8b",
    cluster: Any = "dgx-h100",
    **sections: Any,
) -> Scenario:
    """A scenario of these sections, of Llama 3 8B on H100s unless said otherwise."""
    if training is not None:
        sections["training"] = training
    return parse_scenario({"model": model, "cluster": cluster, "parallelism": parallelism or {}, **sections})


def case(
    parallelism: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | str | None = None,
    cluster: Any = "dgx-h100",
    calibration: str = "roofline",
) -> Scenario:
    """A GPT of eight small layers on H100s; every argument overrides."""
    model = {**GPT, **model} if isinstance(model, dict) else model or GPT
    training = {"seq_len": 512, "global_batch_size": 8, **(training or {})}
    return scenario_with(training, parallelism, model, cluster, calibration=calibration)


@cache
def shipped_result(name: str, *overrides: str) -> dict[str, Any]:
    """The result of a shipped scenario's step."""
    return simulate(load_scenario(SCENARIOS / f"{name}.yaml", list(overrides))).result


def slow(rank: int, scale: float) -> dict[str, Any]:
    """The faults of one slow rank."""
    return {"stragglers": [{"rank": rank, "compute_scale": scale}]}


def even_profile(scenario: Scenario, layer_s: float = 1e-3) -> Profile:
    """Measured blocks: a layer takes 1, 1 and 1 `layer_s` for forward, input and weight gradient, the ends nothing."""
    from sim.programs.stages import stage_blocks

    plan = make_plan(scenario)
    make_data_parallel(plan)
    blocks = {}
    for part in plan.parts:
        for block in stage_blocks(plan, part, 0):
            seconds = layer_s if block.kind is BlockKind.LAYER else 1e-18
            for phase, factor in (("forward", 1), ("backward", 2), ("input_grad", 1), ("weight_grad", 1)):
                blocks[block.key, phase] = BlockPoint(block.key, phase, 0, seconds * factor, 0.0)
    return Profile(name="even", source="test", blocks=tuple(blocks.values()))
