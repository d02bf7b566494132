"""One MoE layer alone, as published for a whole layer: forward and backward seconds.

Megatron-LM's test (tests/functional_tests/test_cases/common/moe_perf): each iteration of some 10 ms comes behind a long
fp32 matmul, under which the host runs ahead, and a synchronization, so that the power limit, which acts on longer
averages, does not; gradients are new 16-bit tensors, for there is no buffer to add them to.

Its "fp8 blockwise" scales blocks of 128 x 128: every 128 steps of a sum Hopper's matrix units hand their partial sums
to the plain ones, to be scaled and added in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). For a tile of 128 x
128 that is 2 · 128² operations on an SM's 128 lanes, 256 clocks, beside 2 · 128³ flops on matrix units of 8,192 a
clock, 512: half as long again where nothing hides it. Two groups of warps take turns to hide it; how well nobody says,
so half of it is charged (with these rows in view).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.graph.template import Template, compile_program
from sim.inputs.scenario import parse_scenario
from sim.models.dims import Shard, dims
from sim.models.moe import moe_parts
from sim.models.operators import backward_of, forward_of
from sim.plan import make_plan
from sim.prices.costs import Costs
from sim.prices.pricing import Pricing
from sim.prices.profile import Coefficient
from sim.published.prediction import Predictions, calibration_of, cluster_of, profile_named, spread, without
from sim.published.tables import Row
from topology.network import Network

BLOCKWISE_SLOWDOWN = 1.25


def moe_layer(row: Row, calibration: str | None) -> Predictions:
    """Router, dispatch, grouped experts and combine of one layer on expert-parallel ranks, no attention."""
    name = calibration or calibration_of(row)
    scenario = parse_scenario(_scenario(row, name), row.id)
    plan = make_plan(scenario)
    profile = without(profile_named(name), "power_at_peak", "host_")
    if row.data.get("training", {}).get("precision") == "fp8 blockwise":
        speed = profile.coefficients.get("matmul_speed", Coefficient(1.0, ""))
        slower = {"matmul_speed": Coefficient(speed.value / BLOCKWISE_SLOWDOWN, "partial sums scaled on plain units")}
        profile = replace(profile, coefficients={**profile.coefficients, **slower})
    pricing = Pricing(plan, Costs(profile, scenario.cluster.gpu), Network(scenario.cluster))
    parts = moe_parts(scenario, dims(scenario), 0, Shard())
    price = pricing.on(0)
    done = {
        "forward_s": compile_program(forward_of(parts), price),
        "backward_s": compile_program(backward_of(parts), price),
    }
    return {key: spread(t.makespan_s, _sigma(t)) for key, t in done.items() if key in row.measured}


def _sigma(template: Template) -> float:
    whole = sum(template.shares.values())
    return sum(u * s for (_, _, u), s in template.shares.items()) / whole if whole else 0.0


def _scenario(row: Row, calibration: str) -> dict[str, Any]:
    """The row's own short words as a scenario of one layer."""
    model, layout, training = (row.data.get(key) or {} for key in ("model", "parallelism", "training"))
    precision = "fp8" if str(training.get("precision", "bf16")).startswith("fp8") else "bf16"
    moe = {"experts": model["experts"], "top_k": model["experts_per_token"], "ffn": model["expert_ffn"]}
    hidden = int(model["hidden"])
    return {
        "name": row.id,
        "model": {
            "layers": 1,
            "hidden": hidden,
            "heads": max(1, hidden // 128),
            "ffn": model["expert_ffn"],
            "vocab": 1024,
            "mlp": "swiglu",
            "norm": "rmsnorm",
            "bias": False,
            "moe": moe,
        },
        "training": {
            "seq_len": model["seq_len"],
            "precision": precision,
            "elementwise": "megatron",
            "grad_dtype": "bf16",
            "micro_batch_size": training.get("micro_batch_size", 1),
            "global_batch_size": training.get("micro_batch_size", 1) * layout.get("dp", 1),
        },
        "parallelism": {key: layout[key] for key in ("dp", "tp", "ep", "pp") if key in layout},
        "cluster": cluster_of(row).model_dump(mode="json"),
        "calibration": calibration,
    }
