"""Megatron-LM's switches of number formats, fusions and workspaces as keys of a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted
from tests.sim.convert.launch_files import EXPERTS, MEGATRON

SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 4096"


@pytest.mark.parametrize(("low", "attention"), [("--fp8-format hybrid", True), ("--bf16", None)])
def test_attention_and_activations_in_8_bits(tmp_path: Path, low: str, attention: bool | None) -> None:
    """Without 8-bit matmuls Megatron-Core's attention stays in 16 bits, and what is stored does not."""
    flags = f"{low} --fp8-dot-product-attention --activation-func-fp8-input-store"
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    training = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]
    assert training.get("fp8_dot_product_attention") == attention
    assert training["activation_func_fp8_input_store"] is True


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ("--fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16", (1, 1)),
        ("--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0", (0, 1)),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --num-layers-at-end-in-bf16 4", (None, None)),  # without the switch
        ("--first-last-layers-bf16", (None, None)),  # 16 bits everywhere
    ],
)
def test_layers_in_sixteen_bits(tmp_path: Path, flags: str, ends: tuple[int | None, int | None]) -> None:
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-b200")
    t = data["training"]
    assert (t.get("num_layers_at_start_in_bf16"), t.get("num_layers_at_end_in_bf16")) == ends
    assert "in-bf16" not in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--cross-entropy-loss-fusion", {"cross_entropy": "native"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"cross_entropy": "fused"}),
        ("--cross-entropy-fusion-impl te", {"cross_entropy": "unfused"}),
        ("--no-gradient-accumulation-fusion", {"gradient_accumulation_fusion": False}),
        ("--no-rope-fusion", {"apply_rope_fusion": False, "bias_activation_fusion": None}),
        ("--no-bias-swiglu-fusion", {"bias_activation_fusion": False, "apply_rope_fusion": None}),
        ("--no-bias-gelu-fusion", {"bias_activation_fusion": None}),
        ("--no-bias-dropout-fusion", {"bias_dropout_fusion": False}),
        (EXPERTS, {"moe_grouped_gemm": False}),
        (f"{EXPERTS} --moe-grouped-gemm", {"moe_grouped_gemm": None}),
        (EXPERTS, {"moe_router_fusion": None, "moe_shared_expert_overlap": None}),
        (f"{EXPERTS} --moe-router-fusion", {"moe_router_fusion": True}),
        (f"{SHARED} --moe-shared-expert-overlap", {"moe_shared_expert_overlap": True}),
        (f"{SHARED} --moe-shared-expert-overlap --moe-token-dispatcher-type flex", {"moe_shared_expert_overlap": True}),
        (f"{EXPERTS} --moe-shared-expert-overlap", {"moe_shared_expert_overlap": None}),
    ],
)
def test_fusions_that_a_script_sets_or_leaves_at_their_defaults(
    tmp_path: Path, flags: str, expected: dict[str, Any]
) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
    training = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]
    assert {key: training.get(key) for key in expected} == expected


@pytest.mark.parametrize("what", ["quantization", "fp8"])
def test_maps_that_routers_fill_up(tmp_path: Path, what: str) -> None:
    """The older name of the flag, too; without 8-bit matmuls neither does anything."""
    for low, filled in (("--fp8-format hybrid", True), ("", None)):
        flags = f"{EXPERTS} {low} --moe-router-padding-for-{what}"
        text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
        data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
        assert data["training"].get("moe_router_padding_for_quantization") is filled
        assert ("--moe-router-padding-for" in said) is (filled is None)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "transformer_engine --cuda-graph-scope attn moe_router moe_preprocess",
            ["attn", "moe_router", "moe_preprocess"],
        ),
        ("transformer_engine --cuda-graph-modules moe_router", ["moe_router"]),
        ("local --cuda-graph-scope moe_router", ["moe_router", "moe_preprocess"]),  # which captures both or none
        ("local --cuda-graph-scope full", None),
    ],
)
def test_parts_that_graphs_hold(tmp_path: Path, flags: str, parts: list[str] | None) -> None:
    text = MEGATRON.replace("--cuda-graph-scope full", f"{EXPERTS} --cuda-graph-impl {flags}")
    training = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]
    assert (training["cuda_graphs"], training.get("cuda_graph_scope")) == ("layers", parts)


INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", (True, True)),
        ("--overlap-moe-expert-parallel-comm", (True, False)),
        ("--delay-wgrad-compute", (None, None)),
    ],
)
def test_weight_gradients_that_wait_for_exchanges(tmp_path: Path, flags: str, expected: tuple[Any, Any]) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {EXPERTS} {INTERLEAVED} {flags}")
    layout = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["parallelism"]
    assert (layout.get("ep_overlap"), layout.get("delay_wgrad_compute")) == expected


def test_workspaces_that_the_environment_sets(tmp_path: Path) -> None:
    text = MEGATRON.replace("torchrun", "export CUBLAS_WORKSPACE_CONFIG=:4096:8\ntorchrun", 1)
    assert text != MEGATRON
    training = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]
    assert training["cublas_workspace_config"] == ":4096:8"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fsdp-double-buffer", True),
        ("--nccl-ub", True),
        ("", None),
    ],
)
def test_double_buffers_of_megatrons_fsdp(tmp_path: Path, flags: str, expected: bool | None) -> None:
    """Megatron-Core sets them with NCCL's user buffers (param_and_grad_buffer.py), which are not simulated."""
    fsdp = f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params {flags}"
    text = MEGATRON.replace("PP=2 ", "PP=1 ").replace("    --sequence-parallel", f"    {fsdp} --sequence-parallel")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["zero"], data["parallelism"].get("fsdp_double_buffer")) == (3, expected)
    assert ("fsdp-double-buffer" in said, "nccl-ub" in said) == (False, flags == "--nccl-ub")


DEFERS = "--defer-embedding-wgrad-compute --wgrad-deferral-limit 22"
EARLY = "--overlap-param-gather-with-optimizer-step"


@pytest.mark.parametrize(
    ("flags", "limit", "left"),
    [
        ("", None, False),
        (DEFERS, 22, False),
        ("--defer-embedding-wgrad-compute", 0, False),
        ("--wgrad-deferral-limit 22", None, True),
        (f"{DEFERS} --no-gradient-accumulation-fusion", None, True),
        (f"{DEFERS} --mtp-num-layers 0", 22, False),
    ],
)
def test_weight_gradients_in_the_flush(tmp_path: Path, flags: str, limit: int | None, left: bool) -> None:
    """What Megatron-Core refuses, and what is not simulated, is left to a note."""
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"].get("wgrad_deferral_limit") == limit
    assert ("wgrad-deferral-limit" in said) is left


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (EARLY, None),  # needs virtual stages
        (f"{EARLY} --num-virtual-stages-per-pipeline-rank 2 --overlap-param-gather", True),
        (f"{EARLY} --num-virtual-stages-per-pipeline-rank 2", None),
    ],
)
def test_gathers_beside_the_optimizer(tmp_path: Path, flags: str, expected: bool | None) -> None:
    base = MEGATRON.replace("--overlap-param-gather", "").replace("--use-distributed-optimizer", "")
    text = base.replace("    --sequence-parallel", f"    {flags} --use-distributed-optimizer --sequence-parallel")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"].get("overlap_param_gather_with_optimizer_step") == expected
    assert (EARLY in said) is (expected is None)
