"""Norms in all-reduces, and inputs in 8 bits that norms and activations write, as vLLM's torch.compile fuses them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import parse_scenario
from sim.models.layers import layer_specs
from sim.models.serving.operators import ServingDims
from sim.serve.prices.dims import serving_dims
from tests.sim.serve.serving_cases import ONE

BEHIND_NORMS = ("attention_norm", "qkv_quantize", "mlp_norm", "mlp_up_quantize")
PLAIN = ("attention_norm", "qkv_quantize", "attention_out_quantize", "mlp_norm", "mlp_up_quantize", "mlp_down_quantize")


def dims(
    engine: str, tp: int = 1, cluster: Any = "dgx-h100", model: str = "llama3-8b", **inference: Any
) -> ServingDims:
    """Sizes of a rank that serves in fp8."""
    section = {"engine": engine, "precision": "fp8", "requests": ONE, **inference}
    layout = {"tp": tp, **inference.pop("layout", {})}
    section.pop("layout", None)
    data = {"model": model, "cluster": cluster, "parallelism": layout, "inference": section}
    return serving_dims(parse_scenario(data))


def small_kernels(d: ServingDims, tokens: int = 8) -> tuple[str, ...]:
    """Norms and quantizations of the first layer, in order."""
    program = layer_specs(d.model)[0].serve_tokens(d, tokens)
    names = [item.name for item in program if isinstance(item, Compute)]
    return tuple(name for name in names if name.endswith(("_norm", "_quantize")))


@pytest.mark.parametrize(
    ("engine", "more", "found"),
    [
        ("vllm-v1", {}, PLAIN),
        ("vllm-0.11", {}, ("attention_norm", "attention_out_quantize", "mlp_norm")),
        ("vllm-0.28", {"cuda_graphs": False}, PLAIN),
        ("sglang-0.5.20", {}, PLAIN),
        ("trtllm-1.3", {}, BEHIND_NORMS),
        ("trtllm-1.3", {"cuda_graphs": False}, BEHIND_NORMS),
        ("trtllm-1.3", {"lora": {"rank": 8, "adapters": 2}}, PLAIN),
        # Llama's all-reduces norm, and quantize, in models wider than 4,096.
        ("trtllm-1.3", {"tp": 2}, BEHIND_NORMS),
        ("trtllm-1.3", {"tp": 2, "model": "llama3-70b"}, ()),
        (
            "trtllm-1.3",
            {"tp": 2, "model": "qwen3-32b"},
            ("attention_norm", "qkv_quantize", "mlp_norm", "mlp_up_quantize"),
        ),
        # The sum norms, and what it has normed is quantized by itself; the activation still quantizes.
        ("vllm-0.28", {"tp": 2}, ("qkv_quantize", "attention_out_quantize", "mlp_up_quantize")),
        ("vllm-0.14", {"tp": 2}, ("attention_norm", "attention_out_quantize", "mlp_norm")),
        ("vllm-0.19", {"tp": 2, "layout": {"dp": 2}}, ("attention_norm", "attention_out_quantize", "mlp_norm")),
        ("vllm-0.28", {"tp": 2, "layout": {"dp": 2}}, ("qkv_quantize", "attention_out_quantize", "mlp_up_quantize")),
        ("vllm-0.28", {"tp": 2, "cluster": "dgx-a100", "precision": "bf16"}, ("attention_norm", "mlp_norm")),
        ("vllm-0.28", {"tp": 2, "precision": "bf16"}, ()),
        ("vllm-0.28", {"tp": 2, "precision": "nvfp4", "cluster": "dgx-b200"}, ("attention_out_quantize",)),
        (
            "vllm-0.28",
            {"precision": "nvfp4", "cluster": "dgx-b200"},
            ("attention_norm", "qkv_quantize", "attention_out_quantize", "mlp_norm", "mlp_up_quantize"),
        ),
        ("vllm-0.14", {"precision": "nvfp4", "cluster": "dgx-b200"}, PLAIN),
    ],
)
def test_which_small_kernels_a_layer_has(engine: str, more: dict[str, Any], found: tuple[str, ...]) -> None:
    assert small_kernels(dims(engine, **more)) == found


def test_a_large_sum_norms_nothing() -> None:
    """On 8 H100 up to half a MiB: 64 tokens of 4,096 numbers in 16 bits."""
    d = dims("vllm-0.28", tp=8)
    assert "mlp_norm" not in small_kernels(d, 64)
    assert "mlp_norm" in small_kernels(d, 65)


def test_experts_sums_norm_nothing() -> None:
    """The norm before experts follows attention's sum, the norm before attention experts'."""
    d = dims("vllm-0.28", tp=2, model="mixtral-8x7b", precision="bf16")
    assert small_kernels(d) == ("attention_norm",)


@pytest.mark.parametrize(
    ("engine", "more", "found"),
    [
        ("vllm-0.28", {}, ("attention_norm",)),
        ("vllm-0.29", {}, ()),
        ("vllm-0.29", {"cuda_graphs": False}, ()),
        ("vllm-0.29", {"layout": {"dp": 2, "ep": 16}}, ("attention_norm",)),
        ("vllm-0.29", {"model": "deepseek-v3"}, ("attention_norm",)),
    ],
)
def test_own_code_of_deepseek_v32_norms_behind_experts(engine: str, more: dict[str, Any], found: Any) -> None:
    """vLLM, models/deepseek_v32/nvidia/model.py: fused_allreduce_rms_norm."""
    d = dims(engine, **{"tp": 8, "model": "deepseek-v3.2", "cluster": "dgx-h200", "precision": "bf16", **more})
    program = layer_specs(d.model)[-1].serve_tokens(d, 8)
    names = [item.name for item in program if isinstance(item, Compute)]
    assert tuple(name for name in names if name in ("attention_norm", "mlp_norm")) == found


@pytest.mark.parametrize(("engine", "mib"), [("vllm-0.19", 2), ("vllm-0.28", 2), ("vllm-0.29", 4), ("vllm-0.33", 4)])
def test_sums_of_eight_ranks_of_10_3_norm_more_since_0_29(engine: str, mib: int) -> None:
    """vLLM, allreduce_rms_fusion.py of 0.28 and 0.29: FI_ALLREDUCE_FUSION_MAX_SIZE_MB."""
    d = dims(engine, tp=8, cluster={"gpu": "b300-sxm", "gpus_per_node": 8}, precision="bf16")
    assert d.norm_in_sum_bytes == mib * 2**20


@pytest.mark.parametrize(
    ("model", "more", "found"),
    [
        ("qwen3-30b-a3b", {}, ()),
        ("qwen3-30b-a3b", {"engine": "sglang-0.5"}, ("attention_norm", "mlp_norm")),
        ("qwen3-30b-a3b", {"cuda_graphs": False}, ()),  # in the layers' code, not torch.compile's
        ("mixtral-8x7b", {}, ("attention_norm", "mlp_norm")),  # is none of the models that SGLang fuses
        ("llama3-8b", {}, ("attention_norm", "mlp_norm")),
        ("qwen3-30b-a3b", {"layout": {"dp": 2, "ep": 4}}, ("attention_norm", "mlp_norm")),
        ("qwen3-30b-a3b", {"cluster": "dgx-a100"}, ("attention_norm", "mlp_norm")),
    ],
)
def test_sglang_norms_in_the_sums_of_some_models(model: str, more: dict[str, Any], found: tuple[str, ...]) -> None:
    """Of up to 2,048 tokens, behind attention and behind experts."""
    d = dims(**{"engine": "sglang-0.5.10", "tp": 2, "model": model, "precision": "bf16", **more})
    assert small_kernels(d, 2048) == found
    assert "mlp_norm" in small_kernels(d, 2049)


def test_tensorrt_llm_norms_in_the_sums_of_its_own_kernels() -> None:
    """On 4 GPUs below 1 MB: 122 tokens of 4,096 numbers in 16 bits, of Qwen3 235B."""
    d = dims("trtllm-1.0", tp=4, model="qwen3-235b-a22b", precision="bf16")
    assert small_kernels(d, 122) == ()
    assert small_kernels(d, 123) == ("attention_norm", "mlp_norm")


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "fused"),
    [
        ("vllm-0.28", "qwen3-next-80b-a3b", "h100-sxm", False),
        ("trtllm-1.3", "qwen3-next-80b-a3b", "h100-sxm", False),
        ("sglang-0.5.10", "qwen3-next-80b-a3b", "h100-sxm", False),
        ("sglang-0.5.11", "qwen3-next-80b-a3b", "h100-sxm", True),
        ("sglang-0.5.20", "qwen3-next-80b-a3b", "h100-sxm", True),
        ("sglang-0.5.10", "deepseek-v3.2", "h200-sxm", False),
        ("sglang-0.5.11", "deepseek-v3.2", "h200-sxm", True),
        ("sglang-0.5.10", "qwen3-30b-a3b", "h20", False),
        ("sglang-0.5.11", "qwen3-30b-a3b", "h20", False),
        ("sglang-0.5.14", "qwen3-30b-a3b", "h20", True),
        ("trtllm-1.3", "qwen3-30b-a3b", "h20", True),
        ("vllm-0.28", "qwen3-30b-a3b", "h20", True),
    ],
)
def test_norms_of_some_models_and_gpus_by_release(engine: str, model: str, gpu: str, fused: bool) -> None:
    d = dims(engine, tp=8, model=model, cluster={"gpu": gpu, "gpus_per_node": 8}, precision="bf16")
    assert (d.norm_in_sum_bytes > 0) == fused


@pytest.mark.parametrize(
    ("engine", "cluster", "more", "found"),
    [
        ("vllm-0.11", "dgx-h200", {}, ()),
        ("vllm-0.14", "dgx-h200", {}, ("norms",)),
        ("vllm-0.19", "dgx-h200", {"cuda_graphs": False}, ()),
        ("vllm-0.28", "dgx-h200", {}, ("norms", "activations")),
        ("vllm-0.28", "dgx-b200", {}, ()),
        ("vllm-0.28", "dgx-h200", {"model": "deepseek-v4-flash"}, ()),  # torch.compile has no part in it
        ("vllm-0.28", "dgx-h200", {"model": "deepseek-v3.2"}, ("norms", "activations")),
        ("vllm-0.29", "dgx-h200", {"model": "deepseek-v3.2"}, ()),
        ("sglang-0.5.20", "dgx-h200", {}, ()),
        ("trtllm-1.3", "dgx-h200", {}, ()),
    ],
)
def test_what_quantizes_beside_a_checkpoints_blocks(
    engine: str, cluster: str, more: dict[str, Any], found: tuple[str, ...]
) -> None:
    assert dims(engine, **{"model": "deepseek-v3", "tp": 8, "cluster": cluster, **more}).quantizing == found


def test_a_norm_before_blocks_writes_the_latents_input_and_that_of_a_dense_mlp() -> None:
    """Of more tokens than the all-reduce norms; the latents' own norms and the output write 16 bits."""
    before = small_kernels(dims("vllm-0.11", model="deepseek-v3", tp=8, cluster="dgx-h200"), 512)
    after = small_kernels(dims("vllm-0.28", model="deepseek-v3", tp=8, cluster="dgx-h200"), 512)
    fused = ("latents_down_quantize", "mlp_up_quantize", "mlp_down_quantize")
    assert tuple(name for name in before if name not in fused) == after


def test_a_norm_writes_no_shared_experts_input() -> None:
    """Their router reads it in 16 bits."""
    d = dims("vllm-0.28", model="deepseek-v3", tp=8, cluster="dgx-h200")
    program = layer_specs(d.model)[-1].serve_tokens(d, 512)
    assert "mlp_up_quantize" in [item.name for item in program if isinstance(item, Compute)]


def test_gpus_without_nvlink_sum_and_norm_apart() -> None:
    workstation = {"gpu": "rtx-pro-6000-server", "gpus_per_node": 8}
    assert dims("vllm-0.28", tp=2, cluster=workstation).norm_in_sum_bytes == 0
    assert dims("vllm-0.28", tp=2, cluster="dgx-b200").norm_in_sum_bytes == 64 * 2**20


@pytest.mark.parametrize(
    ("engine", "gpu", "mib"),
    [
        ("vllm-0.14", "b300-sxm", 0),
        ("vllm-0.19", "b300-sxm", 2),
        ("vllm-0.28", "b200-sxm", 1),
        ("vllm-0.28", "gb300", 2),
    ],
)
def test_gpus_of_capability_10_3_have_sizes_of_their_own(engine: str, gpu: str, mib: float) -> None:
    """vLLM's allreduce_rms_fusion.py: 8 ranks sum and norm up to 2 MiB there, 1 MiB on 10.0."""
    assert dims(engine, tp=8, cluster={"gpu": gpu, "gpus_per_node": 8}).norm_in_sum_bytes == mib * 2**20
