"""Odd but legal steps: a vocabulary of one, a token a sequence, more stages than layers, heads of one element."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.overrides import merge
from tests.sim.metamorphic.laws import run

FREE = {"bandwidth_bytes_per_s": 1e15, "latency_s": 0.0}
NETWORK = {"intra_node": FREE, "inter_node": {"nic_bandwidth_bytes_per_s": 1e15, "latency_s": 0.0}}


@st.composite
def odd(draw: st.DrawFn) -> dict[str, Any]:
    """A step of which any key alone is allowed; together they may be refused."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    return {
        "model": {
            "layers": one(1, 2, 3, 5),
            "hidden": one(8, 64, 1024),
            "heads": one(1, 2, 8),
            "vocab": one(1, 7, 999),
        },
        "cluster": {"preset": one("dgx-h100", "dgx-v100", "gb200-nvl72", "cpu-host", "mi300x-node", "tpu-v5p-torus")},
        "training": {
            "seq_len": one(1, 2, 1024),
            "global_batch_size": one(1, 4, 16),
            "precision": one("fp32", "bf16", "fp16", "fp8"),
            "recompute": one("none", "full", "selective"),
            "framework": one("eager", "megatron", "compiled", "nanotron"),
        },
        "parallelism": {
            "tp": one(1, 2),
            "pp": one(1, 2, 8),
            "dp": one(1, 4),
            "zero": one(0, 1, 2, 3),
            "schedule": one("naive", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe"),
        },
        "calibration": one(None, "roofline"),
    }


@settings(max_examples=60, deadline=None)
@given(scenario=odd())
def test_what_runs_makes_sense(scenario: dict[str, Any]) -> None:
    """Finite and positive times, no utilization above 1, a larger batch that is no quicker, free links no slower."""
    try:
        base = run(**scenario)
    except InputError:
        return
    step_s = base["step_time_s"]
    assert 0.0 < step_s < 1e6
    assert 0.0 <= base["mfu"] <= base["mfu_full_attention"] + 1e-12 <= 1.0 + 1e-9
    assert base["mfu"] <= base["hfu"] + 1e-12 <= 1.0 + 1e-9
    assert 0.0 <= base["bubble_fraction"] <= 1.0
    for key in ("tokens_per_s", "exposed_comm_s", "compute_s", "peak_memory_bytes"):
        assert 0.0 <= base[key] < math.inf, key
    assert base["compute_s"] + base["exposed_comm_s"] <= step_s * (1 + 1e-9)
    free = run(**merge(scenario, {"cluster": NETWORK}))["step_time_s"]
    assert free <= step_s * 1.003
    batch = scenario["training"]["global_batch_size"]
    assert run(**merge(scenario, {"training": {"global_batch_size": 2 * batch}}))["step_time_s"] >= step_s * (1 - 1e-9)
