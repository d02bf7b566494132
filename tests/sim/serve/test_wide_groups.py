"""Decode attention of many query heads for each KV head (Falcon 7B has 71 and one)."""

from __future__ import annotations

import pytest

from sim.inputs.scenario import Scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.iteration_parts import Key, Work
from tests.sim.cases import scenario_with


def served(heads: int, engine: str, kv_heads: int = 1) -> Scenario:
    model = {"layers": 2, "hidden": heads * 128, "heads": heads, "kv_heads": kv_heads, "ffn": 4096, "vocab": 1024}
    section = {"engine": engine, "requests": {"prompt_len": 100, "output_len": 20}}
    return scenario_with(model=model, cluster="dgx-h100", inference=section)


def decode_s(heads: int, engine: str, kv_heads: int = 1) -> float:
    """128 sequences of 8,192 tokens in one layer."""
    scenario = served(heads, engine, kv_heads)
    costs = iteration_costs(scenario, load_profile(scenario.calibration))
    return costs.priced(Key(Work.DECODE, 0, 128, 8192, 1)).seconds


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.28", "sglang-0.5"])
def test_a_kv_head_is_read_once_for_all_its_query_heads(engine: str) -> None:
    """As for 32 query heads: within the reads of queries and results, however many more there are."""
    few = decode_s(32, engine)
    for heads in (48, 64, 71, 128):
        assert decode_s(heads, engine) == pytest.approx(few, rel=0.1)
    assert decode_s(128, engine, 2) == pytest.approx(decode_s(64, engine, 2), rel=0.1)


def test_the_measured_library_reads_it_for_each_beyond_32() -> None:
    assert decode_s(64, "trtllm-1.0") > 2 * decode_s(32, "trtllm-1.0")
