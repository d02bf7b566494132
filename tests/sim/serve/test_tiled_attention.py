"""Single tokens beside prompts where each query head has a tile of its own (FlashAttention 2)."""

from __future__ import annotations

import pytest

from sim.inputs.scenario import parse_scenario
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.iteration_shares import priced_together
from sim.serve.prices.load import Load

SEQUENCES, KEYS, CHUNK = 128, 1024, 512
ALONE = Load(SEQUENCES, SEQUENCES, SEQUENCES * KEYS, (), SEQUENCES)
PROMPT = Load(CHUNK, prefills=((CHUNK, CHUNK, 1),), samples=1)
BOTH = Load(SEQUENCES + CHUNK, SEQUENCES, SEQUENCES * KEYS, PROMPT.prefills, SEQUENCES + 1)


def costs(gpu: str, engine: str = "vllm-0.11", model: str = "llama3-8b", **inference: object) -> IterationCosts:
    requests = {"prompt_len": 8, "output_len": 2, "count": 1}
    cluster = {"preset": "dgx-h100", "gpu": gpu}
    served = {"engine": engine, "requests": requests, "precision": "bf16"} | inference
    scenario = parse_scenario({"model": model, "cluster": cluster, "inference": served})
    return iteration_costs(scenario, load_profile(scenario.calibration))


def times_as_long(own: IterationCosts) -> float:
    """How many times as long single tokens attend beside a prompt."""
    return (own.attention_s(BOTH, 0) - own.attention_s(PROMPT, 0)) / own.attention_s(ALONE, 0)


@pytest.mark.parametrize("engine", ["vllm-0.8", "vllm-v1", "vllm-0.11", "vllm-0.14", "vllm-0.33"])
@pytest.mark.parametrize("gpu", ["a100-sxm", "rtx4090"])
def test_tokens_beside_a_prompt_take_their_tiles_products(gpu: str, engine: str) -> None:
    own = costs(gpu, engine)
    m = own.plan.scenario.model
    tiled = own.priced(Key(Work.TILED, 0, SEQUENCES, KEYS, 1)).seconds
    flops = 4.0 * SEQUENCES * m.heads * 64 * KEYS * m.head_dim
    peak = own.plan.scenario.cluster.gpu.peak_flops_per_s["bf16"]
    assert 1.0 < tiled / (flops / peak) < 3.0
    assert own.attention_s(BOTH, 0) - own.attention_s(PROMPT, 0) == pytest.approx(tiled)
    assert times_as_long(own) > 1.5


@pytest.mark.parametrize(
    ("gpu", "engine"),
    [("h100-sxm", "vllm-0.11"), ("b200-sxm", "vllm-0.11"), ("a100-sxm", "vllm-0.6"), ("a100-sxm", "sglang-0.5")],
)
def test_other_kernels_compute_them_as_alone(gpu: str, engine: str) -> None:
    assert times_as_long(costs(gpu, engine)) == pytest.approx(1.0)


def test_vllm_0_8_has_flash_attention_2_on_a_b200() -> None:
    """platforms/cuda.py, get_attn_backend_cls: FlashInfer is the default there since 0.9.1 (pull request 19118)."""
    assert times_as_long(costs("b200-sxm", "vllm-0.8")) > 1.2 > times_as_long(costs("b200-sxm", "vllm-v1"))


def test_a_cache_in_eight_bits_and_attention_sinks_have_another_kernel() -> None:
    assert times_as_long(costs("l40s", kv_cache={"dtype": "fp8"})) == pytest.approx(1.0)
    assert times_as_long(costs("a100-sxm", model="gpt-oss-20b")) == pytest.approx(1.0)


def test_layers_with_a_sliding_window_have_tiles_without_prompts_beside_them() -> None:
    """flash_api.cpp, mha_varlen_fwd: heads of a group are joined only where window_size_left < 0."""
    for gpu, engine, tiled in (("a100-sxm", "vllm-0.11", True), ("h100-sxm", "vllm-0.11", False)):
        own = costs(gpu, engine, "gemma3-27b")
        for spec, attention in enumerate(own.attentions):
            assert isinstance(attention, GroupedQueryAttention)
            works = {own.decode_work(prompts, 1, spec) for prompts in (False, True)}
            expected = {Work.TILED} if attention.window else {Work.TILED, Work.DECODE}
            assert works == (expected if tiled else {Work.DECODE})
        assert len({a.window for a in own.attentions if isinstance(a, GroupedQueryAttention)}) == 2


def test_what_a_window_hides_takes_no_tile() -> None:
    own = costs("a100-sxm", model="gemma3-27b")
    spec = next(i for i, a in enumerate(own.attentions) if isinstance(a, GroupedQueryAttention) and a.window)
    within, far = (own.priced(Key(Work.TILED, spec, SEQUENCES, keys, 1)).seconds for keys in (1024, 65536))
    assert far == pytest.approx(within, rel=0.01)
    assert within > own.priced(Key(Work.DECODE, spec, SEQUENCES, 1024, 1)).seconds


def test_each_head_alone_is_bound_by_its_cache() -> None:
    """Without groups of query heads an A100 reads keys more slowly than it multiplies a tile with them."""
    assert times_as_long(costs("a100-sxm", model="llama2-7b")) == pytest.approx(1.0)


def test_drafted_tokens_fill_the_rows_of_one_tile() -> None:
    own = costs("a100-sxm")
    each = [own.priced(Key(Work.TILED, 0, SEQUENCES, KEYS, queries)).seconds for queries in (1, 5, 64, 65)]
    assert each[0] == pytest.approx(each[1]) == pytest.approx(each[2])
    assert each[3] == pytest.approx(2 * each[0])
    checked = Load(5 * SEQUENCES, SEQUENCES, SEQUENCES * KEYS, (), 5 * SEQUENCES, queries=5)
    assert own.attention_s(checked, 0) == pytest.approx(each[1])


def test_shares_sum_up_to_the_iteration() -> None:
    own = costs("a100-sxm")
    parts = priced_together(own, [(BOTH, 3)])
    assert sum(parts.shares.values()) == pytest.approx(3 * own.stage_seconds(BOTH)[0], rel=0.02)
