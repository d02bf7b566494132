"""Families whose own code in Transformers differs from Llama's, described and captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Compute
from sim.inputs.program_file import CapturedOperator
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block

MATMULS = ("gemm", "attention_forward", "attention_backward")


def layer_of(name: str, **training: Any) -> Any:
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "param_dtype": "bf16"}
    return layer_block(make(MODELS[name], {**sizes, **training}), 1)


def _left_out(name: str, op: CapturedOperator) -> bool:
    """Tell whether the time of an RMSNorm's other kernels has that of this one (sim.models.norm: rms_norm_eager): the
    mean's gradient, written to all elements, and the square's, doubled."""
    of_norm = name in ("olmo2", "phi3") and op.phase == "backward" and "norm" in op.module
    return of_norm and (op.name == "aten.div" or (op.name == "aten.mul" and len(op.inputs) == 1))


@pytest.mark.parametrize("name", ["codegen", "cohere", "falcon", "olmo2", "phi3"])
def test_kernels_beside_matmuls_move_what_the_captured_ones_move(tmp_path: Path, name: str) -> None:
    program, layer = capture(tmp_path, name, "sdpa", weights="bf16"), layer_of(name)
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [o for o in program.operators if o.phase == phase and LAYER[name] in o.module and o.launches]
        kernels = [o for o in mine if not ("mm" in o.name or "attention" in o.name or _left_out(name, o))]
        moved = sum(i.bytes for o in kernels for i in computes_of(o))
        described = [i for i in items if isinstance(i, Compute) and i.kind not in MATMULS]
        found = sum(i.bytes for i in described if not i.name.endswith("_accumulate"))  # one backward adds nothing up
        assert found == pytest.approx(moved, rel=0.08)


def test_the_gradients_of_gate_and_up_are_joined_by_one_kernel(tmp_path: Path) -> None:
    program = capture(tmp_path, "phi3", "sdpa", weights="bf16")
    (joined,) = (
        sum(t.bytes for t in (*o.inputs, *o.outputs))
        for o in program.operators
        if o.phase == "backward" and o.name == "aten.cat" and o.module.endswith("layers.1.mlp")
    )
    mine = [i for i in layer_of("phi3").backward if isinstance(i, Compute) and i.name == "swiglu_join_backward"]
    assert [i.bytes for i in mine] == [joined]


def test_gradients_of_heads_that_lie_beside_each_other_are_joined_and_copied(tmp_path: Path) -> None:
    """GPT-NeoX's queries, keys and values; its rope copies nothing then."""
    program, layer = capture(tmp_path, "gpt_neox", "sdpa", weights="bf16"), layer_of("gpt_neox")
    mine = [o for o in program.operators if o.phase == "backward" and o.module.endswith("layers.1.attention")]
    real = [i for o in mine if o.launches and "attention" not in o.name for i in computes_of(o)]
    found = [i for i in layer.backward if isinstance(i, Compute) and i.name.startswith(("rope", "split"))]
    assert sum(i.kernels for i in found) == sum(i.kernels for i in real)
    assert sum(i.bytes for i in found) == pytest.approx(sum(i.bytes for i in real), rel=0.08)  # zeros twice


def test_layer_norms_of_heads_copy_what_they_are_given(tmp_path: Path) -> None:
    """Persimmon's; its rope copies nothing then, and as many instructions run as rows are narrow."""
    program, layer = capture(tmp_path, "persimmon", "sdpa", weights="bf16"), layer_of("persimmon")
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [o for o in program.operators if o.phase == phase and "layers.1.self_attn" in o.module and o.launches]
        real = [i for o in mine if not ("mm" in o.name or "attention" in o.name) for i in computes_of(o)]
        kinds = ("rope", "split", "query_norm", "key_norm", "output_copy", "qkv_bias", "attention_out_bias")
        found = [i for i in items if isinstance(i, Compute) and i.name.startswith(kinds)]
        assert sum(i.kernels for i in found) == sum(i.kernels for i in real)
        assert sum(i.bytes for i in found) == pytest.approx(sum(i.bytes for i in real), rel=0.04)
        assert sum(i.clocks for i in found) == pytest.approx(sum(i.clocks for i in real), rel=0.01)
        assert sum(i.lone_clocks for i in found) == pytest.approx(sum(i.lone_clocks for i in real))


def test_a_window_is_a_mask_of_all_pairs(tmp_path: Path) -> None:
    """torch's function takes all pairs, keys for each query head, and keeps the mask; a named kernel skips pairs."""
    program, layer = capture(tmp_path, "mistral", "sdpa", weights="bf16"), layer_of("mistral")
    mine = [o for o in program.operators if LAYER["mistral"] in o.module and o.launches]
    attention = [i for o in mine if "attention" in o.name for i in computes_of(o)]
    described = [
        i for i in (*layer.forward, *layer.backward) if isinstance(i, Compute) and i.kind.startswith("attention_")
    ]
    assert [(i.kind, i.flops, i.shape) for i in described] == [(i.kind, i.flops, i.shape) for i in attention]
    (mask,) = (o for o in mine if o.name == "aten.where")
    (kept,) = (s.bytes for s in layer.saved if s.name == "attention mask")
    assert kept == sum(t.bytes for t in mask.outputs)
    named = layer_of("mistral", attention_kernel="flash2")
    assert "attention mask" not in {s.name for s in named.saved}
    (run,) = (i for i in named.forward if isinstance(i, Compute) and i.kind == "attention_forward")
    assert run.flops < 0.6 * described[0].flops


def test_falcon_s_causal_mask_is_one_of_all_pairs_for_one_key(tmp_path: Path) -> None:
    program, layer = capture(tmp_path, "falcon", "sdpa", weights="bf16"), layer_of("falcon")
    mine = [o for o in program.operators if LAYER["falcon"] in o.module and o.launches]
    attention = [i for o in mine if "attention" in o.name for i in computes_of(o)]
    computes = [i for i in (*layer.forward, *layer.backward) if isinstance(i, Compute)]
    described = [i for i in computes if i.kind.startswith("attention_")]
    assert [(i.kind, i.flops, i.shape) for i in described] == [(i.kind, i.flops, i.shape) for i in attention]
    for name, put in (("aten.index", "split_index"), ("aten.index_put_", "split_index_put")):
        real = [i for o in mine if o.name == name for i in computes_of(o)]
        (found,) = (i for i in computes if i.name == put)
        assert found.kernels == sum(i.kernels for i in real)
        assert found.bytes == pytest.approx(sum(i.bytes for i in real), rel=1e-3)  # the index itself


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("cohere", 52, 76), ("ernie4_5", 52, 60), ("olmo2", 36, 60), ("llama", 20, 34)]
)
def test_bytes_of_a_turned_element(name: str, forward: int, backward: int) -> None:
    """In fp32: 10 and 15 accesses of 4 bytes, 2 of 2, and casts of 6 bytes; closed forms of `wider_rope`."""
    layer, elements = layer_of(name), BATCH * SEQ * (8 + 2) * 64
    for items, bytes_ in ((layer.forward, forward), (layer.backward, backward)):
        turned = [i for i in items if isinstance(i, Compute) and i.name.startswith("rope")]
        assert sum(i.bytes for i in turned) == bytes_ * elements


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_dbrx_clamps_queries_keys_and_values(phase: str, tmp_path: Path) -> None:
    """One matmul, and the kernels of its result's clamp."""
    program, layer = capture(tmp_path, "dbrx", "sdpa", weights="bf16", balanced=True), layer_of("dbrx")
    whole = BATCH * SEQ * (8 + 2 * 2) * 64
    run = [o for o in program.operators if o.phase == phase and "blocks.1.norm_attn_norm.attn" in o.module]
    names = ("aten.clamp", "aten.gt", "aten.lt", "aten.logical_and_", "aten.where")
    real = [i for o in run if o.name in names for i in computes_of(o)]
    mine = [i for i in getattr(layer, phase) if isinstance(i, Compute) and i.name.startswith("qkv_clamp")]
    mine = [i for i in mine if i.shape == (whole,)]
    assert sum(i.kernels for i in mine) == sum(i.kernels for i in real)
    assert sum(i.bytes for i in mine) == pytest.approx(sum(i.bytes for i in real), rel=1e-5)
    assert sum(i.single_elements for i in mine) == sum(i.single_elements for i in real)
    assert next(s.bytes for s in layer.saved if s.name == "qkv before its clamp") == 2 * whole


def test_gradients_of_dbrx_s_experts_have_the_size_of_all(tmp_path: Path) -> None:
    """Zeros of all experts' weights for each expert and matrix, and their sums."""
    program, layer = capture(tmp_path, "dbrx", "sdpa", weights="bf16", balanced=True), layer_of("dbrx")
    mine = [o for o in program.operators if o.phase == "backward" and "blocks.1.ffn.experts" in o.module and o.launches]
    found = {i.name: i for i in layer.backward if isinstance(i, Compute)}
    put = [i for o in mine if o.name == "aten.select_backward" for i in computes_of(o)]
    assert found["expert_gradients_put"].kernels == sum(i.kernels for i in put)
    assert found["expert_gradients_put"].bytes == pytest.approx(sum(i.bytes for i in put), rel=1e-3)  # the index
    whole = 8 * 256 * 512
    sums = [i for o in mine if o.name in ("aten.add", "aten.add_") for i in computes_of(o) if i.shape == (whole,)]
    assert found["expert_gradients_sum"].kernels == len(sums) == 3 * 7
    assert found["expert_gradients_sum"].bytes == sum(i.bytes for i in sums)


def test_experts_copies_are_issued_as_captured(tmp_path: Path) -> None:
    """Kernels of an accumulation by index, which torch's C++ issues in a loop, and the joined halves."""
    program, layer = capture(tmp_path, "qwen3_moe", "sdpa", weights="bf16"), layer_of("qwen3_moe")
    experts = [o for o in program.operators if "layers.1.mlp.experts" in o.module and o.launches]
    real = [i for o in experts if o.phase == "backward" for i in computes_of(o)]
    mine = [i for i in layer.backward if isinstance(i, Compute)]
    further = sum(i.kernels for i in mine if i.within_call)
    assert further == sum(i.kernels for i in real if i.within_call) > 0
    assert not [i for i in (*mine, *real) if i.looped]
    (joined,) = (sum(t.bytes for t in (*o.inputs, *o.outputs)) for o in experts if o.name == "aten.cat")
    assert [i.bytes for i in mine if "_join_" in i.name] == [joined]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("deepseek_v2", "mlp.gate"),
        ("hunyuan_v1_moe", "mlp.gate"),
        ("lfm2_moe", "feed_forward.gate"),
        ("olmoe", "mlp.gate"),
        ("qwen3_moe", "mlp.gate"),
    ],
)
def test_a_router_has_the_kernels_that_run(tmp_path: Path, name: str, module: str) -> None:
    """Of matmuls and casts of tokens the dtype; of all others their number."""
    program, layer = capture(tmp_path, name, "sdpa", weights="bf16"), layer_of(name)
    run = [o for o in program.operators if f"layers.1.{module}" in o.module and o.launches]
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [i for i in items if isinstance(i, Compute) and i.name.split("_")[0] == "router" and i.kernels]
        real = [i for o in run if o.phase == phase for i in computes_of(o)]
        assert {i.dtype for i in mine if i.kind == "gemm"} == {i.dtype for i in real if i.kind == "gemm"}
        summed = [i for i in mine if not i.name.endswith("_sum")]
        of_tokens = [o for o in run if o.phase == phase and o.name in ("aten.add", "aten.add_")]
        joined = [o for o in of_tokens if o.outputs[0].elements == BATCH * SEQ * 512]
        assert sum(i.kernels for i in summed) == sum(i.kernels for i in real) - len(joined)


def test_xielu_s_kernels_with_numbers_of_their_own_are_not_vectorized(tmp_path: Path) -> None:
    program, layer = capture(tmp_path, "apertus", "sdpa", weights="bf16"), layer_of("apertus")
    run = [o for o in program.operators if "layers.1.mlp.act_fn" in o.module and o.launches]
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        (mine,) = (i for i in items if isinstance(i, Compute) and i.name.endswith("_singly") and "xielu" in i.name)
        real = [i for o in run if o.phase == phase for i in computes_of(o) if i.single_elements > BATCH * SEQ]
        assert (mine.kernels, mine.single_elements) == (len(real), sum(i.single_elements for i in real))
        assert mine.bytes == pytest.approx(sum(i.bytes for i in real), rel=1e-3)


def test_falcon_s_biases_are_added_by_kernels_of_their_own(tmp_path: Path) -> None:
    """`FalconLinear` multiplies and adds; in ALiBi's models the mask is one of numbers, which no layer makes anew."""
    program, layer = capture(tmp_path, "falcon_rw", "sdpa", weights="bf16"), layer_of("falcon_rw")
    linear = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    run = [o for o in program.operators if "h.1." in o.module and o.phase == "forward" and o.launches]
    real = [i for o in run if o.name == "aten.add" and o.module.endswith(linear) for i in computes_of(o)]
    mine = [i for i in layer.forward if isinstance(i, Compute) and i.name.endswith("_bias")]
    assert sorted(i.single_elements for i in mine) == sorted(i.single_elements for i in real)
    assert sum(i.bytes for i in mine) == pytest.approx(sum(i.bytes for i in real), rel=0.01)
    assert not [i for i in layer.forward if i.name == "attention_mask"]


def test_a_warning_names_the_kernel_that_skips_what_falcon_s_mask_hides() -> None:
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "param_dtype": "bf16"}
    (warning,) = (w for w in make(MODELS["falcon"], sizes).warnings if "causal mask" in w)
    assert "flash2" in warning
    assert not [w for w in make(MODELS["falcon"], sizes | {"attention_kernel": "flash2"}).warnings if "causal" in w]


@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "torch"), (0.1, "torch_2024"), (0.125, "torch")])
def test_torch_takes_cudnn_s_attention_where_dropout_is_a_multiple_of_a_sixteenth(dropout: float, kernel: str) -> None:
    """ATen/native/transformers/cuda/sdp_utils.cpp: check_cudnn_dropout; FlashAttention-2 runs otherwise."""
    layer = layer_block(make(MODELS["llama"] | {"dropout": dropout}, {"seq_len": SEQ, "framework": "transformers"}), 1)
    found = {i.kernel for i in (*layer.forward, *layer.backward) if isinstance(i, Compute) and i.kind in MATMULS[1:]}
    assert found == {kernel}


@pytest.mark.parametrize(
    ("training", "kernel"),
    [
        ({}, "torch"),
        ({"software_date": "2026-02"}, "efficient"),
        ({"software_date": "2024-01"}, "efficient"),
        ({"software_date": "2026-02", "attention_kernel": "flash2"}, "flash2"),
        ({"software_date": "2026-02", "param_dtype": "fp32", "precision": "fp32"}, ""),
    ],
)
def test_torch_takes_its_memory_efficient_attention_for_a_mask(training: dict[str, Any], kernel: str) -> None:
    """cuda/sdp_utils.cpp, check_for_attn_mask: FlashAttention has no mask; cuDNN's, first since torch 2.11, has one."""
    layer = layer_of("falcon", **training)  # its causal mask is a tensor
    found = {i.kernel for i in (*layer.forward, *layer.backward) if isinstance(i, Compute) and i.kind in MATMULS[1:]}
    assert found == {kernel}


@pytest.mark.parametrize(("dropout", "kernel"), [(0.1, "efficient"), (0.125, "torch")])
def test_dropout_that_cudnn_lacks_and_a_mask_leave_the_memory_efficient_kernel(dropout: float, kernel: str) -> None:
    layer = layer_block(make(MODELS["falcon"] | {"dropout": dropout}, {"seq_len": SEQ, "framework": "transformers"}), 1)
    found = {i.kernel for i in (*layer.forward, *layer.backward) if isinstance(i, Compute) and i.kind in MATMULS[1:]}
    assert found == {kernel}


@pytest.mark.parametrize(
    ("size", "date", "kernel"),
    [(128, None, "torch"), (160, None, "torch_2024"), (256, None, "torch"), (160, "2026-02", "torch_2024")],
)
def test_torch_takes_flash_attention_for_heads_that_cudnn_s_backward_lacks(
    size: int, date: str | None, kernel: str
) -> None:
    """cuda/sdp_utils.cpp: check_cudnn_tensor_shapes."""
    training = {"seq_len": SEQ, "framework": "transformers", "software_date": date}
    layer = layer_block(make(MODELS["llama"] | {"head_dim": size}, training), 1)
    found = {i.kernel for i in (*layer.forward, *layer.backward) if isinstance(i, Compute) and i.kind in MATMULS[1:]}
    assert found == {kernel}


def test_ernie_s_rope_casts_before_its_products_alone(tmp_path: Path) -> None:
    """Of both parts, behind a negation in 16 bits; forward it copies the angles anew."""
    program, layer = capture(tmp_path, "ernie4_5", "sdpa", weights="bf16"), layer_of("ernie4_5")
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [o for o in program.operators if o.phase == phase and o.module.endswith("layers.1.self_attn")]
        real = [i for o in mine if o.launches and "attention" not in o.name for i in computes_of(o)]
        found = [i for i in items if isinstance(i, Compute) and i.name.startswith(("rope", "cosine_copies"))]
        assert sum(i.kernels for i in found) == sum(i.kernels for i in real)
        assert sum(i.bytes for i in found) == pytest.approx(sum(i.bytes for i in real), rel=0.08)
        assert sum(i.single_elements for i in found) == pytest.approx(sum(i.single_elements for i in real), rel=0.2)


def test_products_of_numbers_of_two_dtypes_cast_each_number() -> None:
    """OLMo's queries and keys of 16 bits times fp32 cosines and sines: two products of each tensor."""
    layer, elements = layer_of("olmo2"), BATCH * SEQ * (8 + 2) * 64
    (products,) = (i for i in layer.forward if isinstance(i, Compute) and i.name == "rope_products")
    assert (products.kernels, products.casts, products.single_elements) == (4, 3, 2 * elements)
    assert products.bytes == 2 * (2 + 4) * elements
