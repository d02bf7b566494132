"""Kernels of latent attention while serving: which there are, and what they move, by engine and release."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.program import Compute, Program
from sim.inputs.scenario import parse_scenario
from sim.models.layers import layer_specs
from sim.models.layers.latent import LatentAttention
from sim.models.serving.operators import ServingDims
from sim.serve.memory import absorbed_bytes
from sim.serve.prices.dims import serving_dims

HEADS, PLAIN, ROPE, VALUE, RANK, QUERY_RANK, HIDDEN = 128, 128, 64, 128, 512, 1536, 7168  # DeepSeek V3
REQUESTS = {"prompt_len": 8, "output_len": 2, "count": 1}


def dims(
    engine: str = "bundled", cluster: str = "dgx-h200", model: str = "deepseek-v3", **parallelism: int
) -> ServingDims:
    inference = {"engine": engine, "requests": REQUESTS, "precision": "bf16"}
    section: dict[str, Any] = {"model": model, "cluster": cluster, "parallelism": parallelism, "inference": inference}
    return serving_dims(parse_scenario(section))


def attention(d: ServingDims) -> LatentAttention:
    found = layer_specs(d.model)[-1].attention
    assert isinstance(found, LatentAttention)
    return found


def moved(program: Program) -> dict[str, float]:
    """Bytes of each operator."""
    return {item.name: item.bytes for item in program if isinstance(item, Compute)}


def test_one_matmul_gives_both_latents_and_each_is_normed() -> None:
    d = dims(tp=8, ep=8)
    found = moved(attention(d).serve(d, 100))
    assert list(found) == ["latents_down", "query_up", "query_norm", "kv_norm", "rope_cache", "attention_out"]
    width = QUERY_RANK + RANK + ROPE
    assert found["latents_down"] == 2 * (100 * (HIDDEN + width) + HIDDEN * width)
    assert (found["query_norm"], found["kv_norm"]) == (2 * 2 * 100 * QUERY_RANK, 2 * 2 * 100 * RANK)


def test_rope_turns_its_part_of_queries_alone() -> None:
    """And reads and writes what is cached."""
    d = dims(tp=8, ep=8)
    assert moved(attention(d).serve(d, 100))["rope_cache"] == 2 * 2 * 100 * (HEADS // 8 * ROPE + RANK + ROPE)


@pytest.mark.parametrize(
    ("engine", "one"),
    [
        *[("vllm-0.8", False), ("vllm-v1", False), ("vllm-0.11", True), ("vllm-0.28", True)],
        *[("sglang", False), ("sglang-0.4.6", True), ("sglang-0.5.20", True), ("trtllm-1.0", True)],
    ],
)
def test_down_projections_by_release(engine: str, one: bool) -> None:
    d = dims(engine, tp=8, ep=8)
    found = moved(attention(d).serve(d, 100))
    assert ("latents_down" in found, "kv_down" in found) == (one, not one)


def test_queries_without_a_latent_leave_one_norm() -> None:
    """DeepSeek-V2-Lite: nothing to merge."""
    d = dims(tp=8, ep=8)
    found = list(moved(replace(attention(d), query_rank=None).serve(d, 100)))
    assert found == ["query", "kv_down", "kv_norm", "rope_cache", "attention_out"]


@pytest.mark.parametrize(
    ("engine", "cluster", "joins"),
    [
        *[("vllm-0.11", "dgx-h200", True), ("vllm-0.14", "dgx-h200", False), ("vllm-0.28", "dgx-b200", True)],
        *[("sglang-0.5", "dgx-h200", False), ("sglang-0.5", "dgx-a100", True), ("trtllm-1.3", "dgx-h200", False)],
    ],
)
def test_where_decode_joins_queries(engine: str, cluster: str, joins: bool) -> None:
    d = dims(engine, cluster, tp=8, ep=8)
    found = moved(attention(d).decode(d, 32, 4096))
    expected = 2 * 2 * 32 * HEADS // 8 * (RANK + ROPE)
    assert found.get("latent_queries_join", 0) == (expected if joins else 0)


def test_keys_of_prompts_are_joined_and_cached_latents_gathered() -> None:
    d = dims("trtllm-1.3", tp=8, ep=8)
    found, h = moved(attention(d).prefill(d, 2, 512, 2048)), HEADS // 8
    assert list(found) == ["latent_context_gather", "kv_up_quantize", "kv_up", "latent_keys_join", "prefill"]
    assert found["latent_keys_join"] == 2 * 2 * 2048 * (h * (PLAIN + ROPE) + h * PLAIN + ROPE)  # of two chunks
    assert found["latent_context_gather"] == 2 * 2 * 2 * 1536 * (RANK + ROPE)
    assert "latent_context_gather" not in moved(attention(d).prefill(d, 2, 512, 512))


def test_vllm_merges_what_chunks_see_before_them() -> None:
    d = dims("vllm-0.28", tp=8, ep=8)
    found = moved(attention(d).prefill(d, 2, 512, 2048))
    assert found["latent_context_merge"] == 3 * 2 * 2 * 512 * HEADS // 8 * VALUE
    assert "latent_context_merge" not in moved(attention(d).prefill(d, 2, 512, 512))


@pytest.mark.parametrize(
    ("engine", "cluster", "q_len", "kv_len", "absorbed"),
    [
        ("sglang", "dgx-h200", 4096, 4096, False),
        ("sglang", "dgx-h200", 1024, 16384, True),
        ("sglang-0.5", "dgx-h200", 1024, 1024, False),
        ("sglang-0.5", "dgx-h200", 1024, 9000, True),
        ("sglang-0.5", "dgx-h200", 1024, 9216, False),
        ("sglang-0.5", "dgx-a100", 1024, 9216, True),
        ("sglang-0.5.10", "dgx-h200", 2048, 2048, True),
        ("sglang-0.5.10", "dgx-h200", 2049, 2049, False),
        ("sglang-0.5.10", "dgx-b200", 2049, 4096, False),
        ("vllm-0.28", "dgx-h200", 1024, 2048, False),
        ("trtllm-1.3", "dgx-h200", 1024, 2048, False),
    ],
)
def test_prompts_that_attend_in_the_latents_width(
    engine: str, cluster: str, q_len: int, kv_len: int, absorbed: bool
) -> None:
    """SGLang: behind some cached tokens, but few, and in graphs of prompts."""
    d = dims(engine, cluster, tp=8, ep=8)
    found = attention(d).prefill(d, 1, q_len, kv_len)
    assert ("kv_up" not in moved(found)) == absorbed
    core = next(item for item in found if isinstance(item, Compute) and item.name == "prefill")
    widths = 2 * RANK + ROPE if absorbed else PLAIN + ROPE + VALUE
    pairs = q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2
    assert core.flops == pytest.approx(2.0 * HEADS // 8 * pairs * widths, rel=1e-3)


def test_replicas_that_share_experts_have_no_graphs_of_prompts() -> None:
    d = dims("sglang-0.5.10", dp=8, ep=8)
    assert (d.latents.absorbed_tokens, d.latents.absorbed_context) == (0, 8192)


def test_selected_keys_are_attended_to_as_before() -> None:
    d = dims("sglang-0.5.20", model="deepseek-v3.2", tp=8, ep=8)
    assert (d.latents.absorbed_tokens, d.latents.absorbed_context) == (0, 0)


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("sglang-0.5.20", {"index_key_quantize": 71680, "index_key": 8, "index_weights": 16}),
        ("vllm-0.19", {"index_key_quantize": 71680, "index_key": 8, "index_weights": 16}),
        ("vllm-0.28", {"index_key_weights": 16}),
    ],
)
def test_weights_of_an_indexers_heads_stay_in_16_bits(engine: str, found: dict[str, int]) -> None:
    """vLLM, deepseek_v2.py, Indexer: quant_config=None; merged with the key's since 0.24. Others are in fp8."""
    inference = {"engine": engine, "requests": REQUESTS}
    section = {"model": "deepseek-v3.2", "cluster": "dgx-h200", "parallelism": {"tp": 8}, "inference": inference}
    d = serving_dims(parse_scenario(section))
    assert d.linear == "fp8"
    items = [item for item in attention(d).serve(d, 10) if isinstance(item, Compute) and "index_" in item.name]
    index = {item.name: item for item in items if "query" not in item.name}
    bits = {name: {"fp8": 8, "bf16": 16}.get(item.dtype) for name, item in index.items()}
    assert {name: bits[name] if "quantize" not in name else HIDDEN * 10 for name in index} == found


def test_memory_has_them_in_16_bits() -> None:
    """64 heads' weights of 7,168 numbers, beside the key's and the queries' in 8."""
    d = dims(model="deepseek-v3.2", tp=8)
    spec = layer_specs(d.model)[-1]
    assert spec.attention is not None
    matrices = spec.attention.matrices(8)
    assert [m.elements for m in matrices if m.sixteen_bit] == [64 * HIDDEN]
    elements = spec.served_elements(d)
    assert elements.rest >= 64 * HIDDEN


@pytest.mark.parametrize(("engine", "joins"), [("trtllm-1.0", True), ("vllm-0.28", False), ("bundled", False)])
def test_tensorrt_llm_joins_what_it_caches(engine: str, joins: bool) -> None:
    """`latent_cache` of _torch/modules/attention.py: a latent and its rope key, read and written."""
    d = dims(engine, tp=8, ep=8)
    assert moved(attention(d).serve(d, 100)).get("latents_join") == (2 * 2 * 100 * (RANK + ROPE) if joins else None)


@pytest.mark.parametrize(
    ("engine", "cluster", "narrow"),
    [("trtllm-1.3", "dgx-h200", True), ("trtllm-1.3", "dgx-b200", False), ("sglang-0.5.20", "dgx-h200", False)],
)
def test_absorbed_projections_of_fp8_blocks(engine: str, cluster: str, narrow: bool) -> None:
    """In fp8 on Hopper by TensorRT-LLM, out of 16 bits by others: its copy of them has the keys' part alone."""
    d = dims(engine, cluster, tp=8, ep=8)
    own, h = attention(d), HEADS // 8
    found = [item for item in own.decode(d, 32, 4096) if isinstance(item, Compute)]
    names = [item.name for item in found if item.name != "attention"]
    plain = ["query_absorb", "value_expand"]
    assert names == (["query_absorb_quantize", plain[0], "value_expand_quantize", plain[1]] if narrow else plain)
    (absorb,) = [item for item in found if item.name == "query_absorb"]
    assert absorb.dtype == ("fp8" if narrow else "bf16")
    assert absorb.flops == 2 * 32 * h * PLAIN * RANK
    kept = h * RANK * (PLAIN if narrow else 2 * (PLAIN + VALUE))
    assert absorbed_bytes(d, layer_specs(d.model)[-1]) == kept


@pytest.mark.parametrize(
    ("engine", "cluster", "widens"),
    [("sglang-0.5", "mi300x-node", True), ("sglang-0.5", "dgx-h200", False), ("vllm-0.28", "mi300x-node", False)],
)
def test_sglang_makes_16_bits_of_absorbed_projections_before_each_product_on_an_mi300x(
    engine: str, cluster: str, widens: bool
) -> None:
    """`w_kc.to(torch.bfloat16) * w_scale`: two kernels more for each of both, and the weights stay in 8 bits."""
    d = dims(engine, cluster, tp=8, ep=8)
    found = moved(attention(d).decode(d, 32, 4096))
    extra = {name: size for name, size in found.items() if name.endswith(("_widen", "_scale"))}
    h = HEADS // 8
    keys, values = h * PLAIN * RANK, h * VALUE * RANK
    of_keys = {"query_absorb_widen": 3 * keys, "query_absorb_scale": 4 * keys}
    of_values = {"value_expand_widen": 3 * values, "value_expand_scale": 4 * values}
    assert extra == (of_keys | of_values if widens else {})
    kept = absorbed_bytes(d, layer_specs(d.model)[-1])
    assert kept == (1 if widens else 2) * h * RANK * (PLAIN + VALUE)
