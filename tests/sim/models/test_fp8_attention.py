"""Attention of 8-bit numbers and activations' inputs kept in them (Transformer Engine, Megatron-Core): kernels, bytes,
messages and speed in closed form; frozen weights that are transposed in each backward."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Item, Phase
from sim.inputs.scenario import Scenario
from sim.models.activations.kernels import activation
from sim.models.attention.context_parallel import attention_core
from sim.models.dims import Shard, dims
from sim.models.layers import attention_spec
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.operators import Operator
from sim.prices.attention_speed import AttentionPeak
from sim.simulation import simulate
from tests.sim.cases import scenario_with

SEQ, HEADS, KV_HEADS, WIDTH = 4096, 32, 8, 128  # of Llama 3 8B
QUERIES, KEYS = SEQ * HEADS * WIDTH, SEQ * KV_HEADS * WIDTH


def scenario(layout: dict[str, Any] | None = None, cluster: str = "dgx-h100", **training: Any) -> Scenario:
    keys = {"seq_len": SEQ, "global_batch_size": 8, "precision": "fp8", "framework": "megatron"} | training
    return scenario_with(keys, layout or {"tp": 1}, model="llama3-8b", cluster=cluster)


def core(layout: dict[str, Any] | None = None, cluster: str = "dgx-h100", **training: Any) -> Operator:
    s = scenario(layout, cluster, **training)
    d = dims(s)
    spec = attention_spec(s.model)
    assert isinstance(spec, GroupedQueryAttention)
    return attention_core(s, d, Shard(), spec.core(d))


def computed(items: tuple[Item, ...]) -> dict[str, Compute]:
    return {i.name.partition(":")[0]: i for i in items if isinstance(i, Compute)}


def test_kernels_and_bytes() -> None:
    found = core(fp8_dot_product_attention=True)
    ahead, back = computed(found.forward), computed(found.backward)
    assert list(ahead) == ["attention_cast", "attention", "attention_output_cast"]
    assert list(back) == ["attention_grad_cast", "attention_backward", "attention_backward_cast"]
    assert ahead["attention"].dtype == back["attention_backward"].dtype == "fp8"
    # Queries, keys and values are read in 2 bytes and written in 1; the result the other way round.
    assert ahead["attention_cast"].bytes == 3 * (QUERIES + 2 * KEYS)
    assert ahead["attention_output_cast"].bytes == back["attention_grad_cast"].bytes == 3 * QUERIES
    assert back["attention_backward_cast"].bytes == 3 * (QUERIES + 2 * KEYS)
    usual = computed(core().forward)["attention"]
    assert ahead["attention"].flops == usual.flops
    statistics = 4.0 * SEQ * HEADS
    assert ahead["attention"].bytes - statistics == (usual.bytes - statistics) / 2


def test_one_scale_for_each_tensor_takes_another_read() -> None:
    """Current scaling reads a tensor for its largest value before it casts it."""
    for changes in ({"fp8_recipe": "tensorwise"}, {"precision": "nvfp4"}):
        cluster = "dgx-b200" if "precision" in changes else "dgx-h100"
        found = core(fp8_dot_product_attention=True, cluster=cluster, **changes)
        cast = computed(found.forward)["attention_cast"]
        assert cast.bytes == (2 * 2 + 1) * (QUERIES + 2 * KEYS)
        assert cast.kernels == 3 * 2


def test_what_is_kept_is_in_8_bits() -> None:
    kept = {s.name: s.bytes for s in core(fp8_dot_product_attention=True).saved}
    usual = {s.name: s.bytes for s in core().saved}
    for name in ("query", "key", "value", "output"):
        assert kept[name] == usual[name] / 2 > 0
    assert kept["log-sum-exp"] == usual["log-sum-exp"]


def test_a_ring_sends_8_bits() -> None:
    """Forward half of the bytes. Backward keys and values, then dK and dV of all ranks by one all-to-all, beside the
    last block (`dkv_send_buffer` of AttnFuncWithCPAndKVP2P), where 16 bits travel with the keys."""
    narrow, usual = (core({"cp": 2}, fp8_dot_product_attention=on) for on in (True, False))
    sent = [[i for i in items if isinstance(i, Comm)] for items in (narrow.forward, narrow.backward, usual.backward)]
    (forward,), (keys, gradients), (other_keys, other_gradients) = sent
    assert (keys.kind, gradients.kind) == ("send_recv", "all_to_all")
    assert forward.bytes == keys.bytes == other_keys.bytes / 2 == other_gradients.bytes / 2
    assert gradients.bytes == 2 * keys.bytes  # a part for each of two ranks


@pytest.mark.parametrize("method", ["all_to_all"])
def test_context_parallelism_sends_8_bits(method: str) -> None:
    layout = {"cp": 2, "cp_method": method}
    narrow, usual = (core(layout, fp8_dot_product_attention=on) for on in (True, False))
    for one, other in ((narrow.forward, usual.forward), (narrow.backward, usual.backward)):
        sent, whole = (sum(i.bytes for i in items if isinstance(i, Comm)) for items in (one, other))
        assert sent == whole / 2 > 0


def test_what_the_matmuls_do_not_take_stays() -> None:
    peak = AttentionPeak(1000.0, 2000.0)
    assert 1 / peak.reached(0.75) == pytest.approx(1 / 750 - 1 / 1000 + 1 / 2000)
    assert peak.reached(0.75) / 750 == pytest.approx(1.6)
    assert peak.reached(1.0) == pytest.approx(2000.0)
    assert AttentionPeak(1000.0, 1000.0).reached(0.6) == pytest.approx(600.0)


def test_a_step_is_shorter_and_smaller() -> None:
    usual, narrow = (simulate(scenario(fp8_dot_product_attention=on), engine="static") for on in (False, True))
    assert 0.85 < narrow.step_time_s / usual.step_time_s < 0.999
    assert narrow.outcome.peak_memory_bytes < usual.outcome.peak_memory_bytes


def test_the_input_of_an_activation_is_cast_there_and_back() -> None:
    ffn = 14336
    usual, kept = (
        activation(dims(scenario(activation_func_fp8_input_store=on)), "swiglu", SEQ * ffn) for on in (False, True)
    )
    narrow, *ahead = kept.forward
    wide, *back = kept.backward
    assert isinstance(narrow, Compute)
    assert isinstance(wide, Compute)
    assert (tuple(ahead), tuple(back)) == (usual.forward, usual.backward)
    assert (narrow.bytes, narrow.phase) == (3 * 2 * SEQ * ffn, Phase.FORWARD)
    assert (wide.bytes, wide.phase, wide.single_elements) == (3 * 2 * SEQ * ffn, Phase.INPUT_GRAD, 2 * SEQ * ffn)
    assert sum(s.bytes for s in kept.saved) == sum(s.bytes for s in usual.saved) / 2


@pytest.mark.parametrize(
    ("cluster", "recipe", "each"),
    [("dgx-h100", "delayed", 2.0), ("dgx-h100", "blockwise", 0.0), ("dgx-b200", "delayed", 0.0)],
)
def test_frozen_weights_are_transposed_in_each_backward(cluster: str, recipe: str, each: float) -> None:
    """One copy is kept. Hopper reads columns of a tensor of one scale only from a transposed copy."""
    s = scenario(cluster=cluster, lora={"rank": 16}, fp8_recipe=recipe, fp8_param_gather=True)
    spec = attention_spec(s.model)
    assert isinstance(spec, GroupedQueryAttention)
    block = spec.train(s, dims(s), Shard())[0]
    turned = sum(i.bytes for i in block.backward if isinstance(i, Compute) and "weight_transpose" in i.name)
    assert turned == each * 4096 * (4096 + 2 * 1024)


@pytest.mark.parametrize(
    ("key", "changes", "needed"),
    [
        ("fp8_dot_product_attention", {"precision": "bf16"}, "training.precision fp8, mxfp8 or nvfp4"),
        (
            "fp8_dot_product_attention",
            {"framework": "compiled"},
            "framework megatron, ",
        ),
        ("fp8_dot_product_attention", {"attention": "unfused"}, "training.attention fused"),
        (
            "activation_func_fp8_input_store",
            {"framework": "eager"},
            "framework megatron, megatron_bridge, nemo, compiled",
        ),
    ],
)
def test_where_there_is_none(key: str, changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=f"training.{key}: found true; needs {needed}"):
        scenario(**{key: True, **changes})
