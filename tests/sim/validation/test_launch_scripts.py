"""What launch scripts set for a row that leaves it out, by model, GPU, precision and release."""

from __future__ import annotations

from typing import Any

import pytest

from sim.validation.launch_scripts import with_launch_script
from sim.validation.script_records import DEEPSEEK_V3, GPT_OSS_120B, KIMI_K2, QWEN3_30B, QWEN3_235B, Sizes

MODULES = ("mla_up_proj", "layernorm", "moe_act")


def row(model: Sizes, cluster: str, precision: str, date: str, **layout: int) -> dict[str, Any]:
    return {
        "model": {"layers": model.layers, "hidden": model.hidden, "moe": {"experts": model.experts}},
        "training": {"framework": "megatron_bridge", "software_date": date, "precision": precision},
        "parallelism": {"schedule": "interleaved_1f1b", **layout},
        "cluster": {"preset": cluster},
    }


def modules(*names: str) -> dict[str, Any]:
    return {"mode": "selective", "modules": list(names)}


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "date", "recompute", "graphs"),
    [
        (DEEPSEEK_V3, "gb200-nvl72", "nvfp4", "2026-08", modules("mlp"), "layers"),
        (DEEPSEEK_V3, "gb200-nvl72", "nvfp4", "2026-04", modules("mlp"), "layers"),
        (DEEPSEEK_V3, "gb200-nvl72", "nvfp4", "2026-02", modules("mla_up_proj"), "layers"),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2026-04", modules("mlp"), "layers"),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2026-06", modules("mla_up_proj"), "step"),
        (DEEPSEEK_V3, "gb200-nvl72", "bf16", "2026-06", modules("mla_up_proj"), "layers"),
        (DEEPSEEK_V3, "dgx-b300", "bf16", "2026-02", modules("mla_up_proj"), None),
        (DEEPSEEK_V3, "dgx-b300", "bf16", "2026-04", modules("mla_up_proj"), "layers"),
        (DEEPSEEK_V3, "gb300-nvl72", "nvfp4", "2026-08", "none", "step"),
        (DEEPSEEK_V3, "dgx-b200", "nvfp4", "2026-08", modules(*MODULES), None),
        (KIMI_K2, "dgx-h100", "fp8", "2026-06", modules("mla_up_proj", "mlp"), None),
        (KIMI_K2, "gb200-nvl72", "mxfp8", "2026-06", modules("mla_up_proj"), "layers"),
        (KIMI_K2, "gb300-nvl72", "bf16", "2026-08", modules("mla_up_proj"), None),
        (KIMI_K2, "gb300-nvl72", "mxfp8", "2026-08", "none", "step"),
    ],
)
def test_what_runs_again_and_what_graphs_hold(
    model: Sizes, cluster: str, precision: str, date: str, recompute: Any, graphs: str | None
) -> None:
    """Megatron-Bridge 0.6.2: perf_recipes/deepseek; scripts/performance/configs: kimi, and deepseek since pull request
    3031."""
    training = with_launch_script(row(model, cluster, precision, date, pp=4, ep=64))["training"]
    assert (training["recompute"], training.get("cuda_graphs")) == (recompute, graphs)


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "date", "found"),
    [
        (DEEPSEEK_V3, "dgx-h100", "fp8", "2025-09", "deepep"),
        (DEEPSEEK_V3, "dgx-h100", "fp8", "2026-02", "hybridep"),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2025-09", None),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2025-11", "hybridep"),
        (DEEPSEEK_V3, "dgx-b200", "mxfp8", "2025-11", None),
        (DEEPSEEK_V3, "vr200-nvl72", "bf16", "2026-08", "hybridep"),
        (QWEN3_235B, "dgx-h100", "fp8", "2026-08", None),
        (QWEN3_235B, "dgx-b200", "bf16", "2026-08", None),
        (QWEN3_235B, "dgx-b300", "bf16", "2026-04", None),
        (QWEN3_235B, "dgx-b300", "bf16", "2026-08", "hybridep"),
        (QWEN3_30B, "gb200-nvl72", "mxfp8", "2025-11", None),
        (QWEN3_30B, "gb200-nvl72", "mxfp8", "2026-02", "hybridep"),
        (GPT_OSS_120B, "gb200-nvl72", "bf16", "2026-04", "hybridep"),
        (GPT_OSS_120B, "gb200-nvl72", "bf16", "2026-06", None),
        (GPT_OSS_120B, "gb200-nvl72", "mxfp8", "2026-06", "hybridep"),
        (KIMI_K2, "dgx-b200", "bf16", "2026-08", None),
    ],
)
def test_who_takes_tokens_to_experts(model: Sizes, cluster: str, precision: str, date: str, found: str | None) -> None:
    """Megatron-Bridge's presets: `enable_deepep`, later `moe_flex_dispatcher_backend`, where the type is flex."""
    made = with_launch_script(row(model, cluster, precision, date, pp=4, virtual_stages=4, ep=64))
    assert made["parallelism"].get("ep_dispatcher") == found
    beside = made["training"].get("moe_shared_expert_overlap")
    assert beside is (True if model == DEEPSEEK_V3 and found is None else None)


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "date", "layout", "found"),
    [
        (QWEN3_30B, "gb200-nvl72", "mxfp8", "2026-08", (1, 1), (True, None)),
        (QWEN3_30B, "gb200-nvl72", "mxfp8", "2026-06", (1, 1), (True, None)),
        (QWEN3_30B, "dgx-b200", "mxfp8", "2026-04", (1, 1), (None, None)),
        (QWEN3_235B, "dgx-b300", "mxfp8", "2026-06", (8, 3), (True, None)),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2026-06", (4, 4), (None, True)),
        (DEEPSEEK_V3, "gb300-nvl72", "mxfp8", "2026-06", (2, 8), (True, True)),
        (DEEPSEEK_V3, "gb300-nvl72", "nvfp4", "2026-06", (2, 8), (None, None)),
        (DEEPSEEK_V3, "dgx-b300", "mxfp8", "2026-06", (8, 2), (True, True)),
        (DEEPSEEK_V3, "dgx-b300", "mxfp8", "2026-06", (8, 1), (None, None)),
        (GPT_OSS_120B, "gb300-nvl72", "mxfp8", "2026-06", (1, 1), (True, None)),
        (GPT_OSS_120B, "dgx-b300", "mxfp8", "2026-06", (1, 1), (True, None)),
        (QWEN3_235B, "dgx-b200", "mxfp8", "2026-08", (8, 3), (True, None)),
        (QWEN3_235B, "gb300-nvl72", "nvfp4", "2026-08", (4, 12), (None, None)),
        (DEEPSEEK_V3, "gb200-nvl72", "mxfp8", "2026-08", (4, 4), (None, True)),
        (DEEPSEEK_V3, "gb300-nvl72", "mxfp8", "2026-08", (2, 8), (True, True)),
        (DEEPSEEK_V3, "gb300-nvl72", "nvfp4", "2026-08", (2, 8), (True, None)),
        (GPT_OSS_120B, "gb200-nvl72", "mxfp8", "2026-08", (1, 1), (True, True)),
        (GPT_OSS_120B, "dgx-b300", "mxfp8", "2026-08", (1, 1), (None, None)),
    ],
)
def test_attention_and_the_output_in_8_bits(
    model: Sizes, cluster: str, precision: str, date: str, layout: tuple[int, int], found: tuple[Any, Any]
) -> None:
    """perf_recipes of 0.6.2: `mixed_precision.fp8_dot_product_attention`, `fp8_output_proj`. Before: pull requests
    3983, 4173, 4249, 4458 and 4606."""
    pp, stages = layout
    training = with_launch_script(row(model, cluster, precision, date, pp=pp, virtual_stages=stages, ep=8, zero=1))
    training = training["training"]
    assert (training.get("fp8_dot_product_attention"), training.get("fp8_output_proj")) == found


@pytest.mark.parametrize(
    ("precision", "recipe", "zero", "found"),
    [
        ("fp8", None, 1, True),
        ("fp8", "tensorwise", 1, True),
        ("fp8", "blockwise", 1, None),
        ("mxfp8", None, 1, True),
        ("mxfp8", None, 3, None),
        ("bf16", None, 1, None),
    ],
)
def test_parameters_in_8_bits(precision: str, recipe: str | None, zero: int, found: bool | None) -> None:
    """training/mixed_precision.py since 0.2: `fp8_param_gather`, but for scales of blocks."""
    one = row(QWEN3_30B, "dgx-h100", precision, "2025-09", pp=1, ep=8, zero=zero)
    one["training"] |= {} if recipe is None else {"fp8_recipe": recipe}
    assert with_launch_script(one)["training"].get("fp8_param_gather") is found


def test_deepseeks_gradients_are_reduced_behind_the_backward_on_h100() -> None:
    """configs/deepseek: `comm_overlap.overlap_grad_reduce = False` on H100; recipes/deepseek: states in bf16."""
    for cluster, found in (("dgx-h100", "after_backward"), ("gb200-nvl72", None)):
        made = with_launch_script(row(DEEPSEEK_V3, cluster, "bf16", "2025-11", pp=4, ep=64, zero=1))
        assert (made["parallelism"].get("dp_sync"), made["training"]["optimizer_dtype"]) == (found, "bf16")
        assert made["training"]["master_weights"] == "remainders"  # Transformer Engine's `store_param_remainders`


def test_deepseek_with_fsdp_waits_on_the_host_and_is_not_graphed() -> None:
    """perf_recipes/deepseek/common.py: `_apply_deepseek_v3_64gpu_gb300_fsdp_configs`."""
    made = with_launch_script(row(DEEPSEEK_V3, "gb300-nvl72", "mxfp8", "2026-08", pp=1, ep=64, zero=3))
    training = made["training"]
    assert training["activation_offload"] == {"modules": ["core_attn", "attn_proj"]}
    assert training["recompute"] == modules("layernorm", "mla_up_proj", "moe_act")
    assert (training["cuda_graphs"], training["fused_experts"]) == ("none", False)
    assert made["parallelism"]["ep_overlap"] is False


@pytest.mark.parametrize(
    ("precision", "layout", "found"),
    [
        ("bf16", {"pp": 2, "virtual_stages": 12}, (None, True)),
        ("bf16", {"pp": 1}, ("layers", True)),
        ("fp8", {"pp": 1}, (None, None)),
    ],
)
def test_qwen3_30b_on_h100(precision: str, layout: dict[str, int], found: tuple[Any, Any]) -> None:
    """perf_recipes/qwen/h100; before, 12 virtual stages whose exchanges hide."""
    made = with_launch_script(row(QWEN3_30B, "dgx-h100", precision, "2026-08", ep=8, **layout))
    assert (made["training"].get("cuda_graphs"), made["parallelism"].get("ep_overlap")) == found


@pytest.mark.parametrize(
    ("precision", "pp", "stages", "recompute", "graphs", "paired"),
    [
        ("mxfp8", 2, 8, "none", "step", True),
        ("nvfp4", 2, 8, "none", "step", True),
        ("fp8", 2, 8, modules("mla_up_proj"), None, None),
        ("mxfp8", 4, 4, modules("mla_up_proj"), "step", True),
        ("nvfp4", 4, 4, modules("mlp"), "layers", None),
        ("bf16", 4, 4, modules("moe_act"), "layers", None),
    ],
)
def test_scripts_of_vera_rubin(
    precision: str, pp: int, stages: int, recompute: Any, graphs: str | None, paired: bool | None
) -> None:
    """perf_recipes/deepseek/vr200 of Megatron-Bridge 0.6.2."""
    layout = {"pp": pp, "virtual_stages": stages, "ep": 32}
    made = with_launch_script(row(DEEPSEEK_V3, "vr200-nvl72", precision, "2026-08", **layout))
    assert (made["training"]["recompute"], made["training"].get("cuda_graphs")) == (recompute, graphs)
    assert made["parallelism"].get("ep_overlap") is paired


@pytest.mark.parametrize(
    ("cluster", "date", "pp", "stages", "found"),
    [
        ("gb200-nvl72", "2026-08", 8, 3, ("step", True)),
        ("gb300-nvl72", "2026-08", 4, 12, ("step", True)),
        ("gb200-nvl72", "2026-06", 8, 3, ("layers", None)),
        ("gb200-nvl72", "2026-08", 8, 1, ("layers", None)),  # the preset for 64 GPUs
    ],
)
def test_four_bits_of_qwen3_are_captured_whole(
    cluster: str, date: str, pp: int, stages: int, found: tuple[str, bool | None]
) -> None:
    """perf_recipes/qwen of 0.6.2: `_enable_hybridep_full_iteration_nvfp4`, with virtual stages alone."""
    made = with_launch_script(row(QWEN3_235B, cluster, "nvfp4", date, pp=pp, virtual_stages=stages, ep=32))
    assert (made["training"]["cuda_graphs"], made["parallelism"].get("ep_overlap")) == found


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "date", "layout", "found"),
    [
        (DEEPSEEK_V3, "dgx-b200", "mxfp8", "2026-04", (8, 2), ("layers", True, "deepep")),
        (DEEPSEEK_V3, "dgx-b200", "nvfp4", "2026-06", (8, 2), (None, True, "deepep")),
        (DEEPSEEK_V3, "dgx-b200", "mxfp8", "2026-04", (16, 1), (None, None, "hybridep")),
        (DEEPSEEK_V3, "dgx-b300", "mxfp8", "2026-06", (8, 2), ("step", True, "hybridep")),
        (DEEPSEEK_V3, "dgx-b300", "mxfp8", "2026-06", (8, 1), ("layers", None, "hybridep")),
        (QWEN3_235B, "dgx-b200", "mxfp8", "2025-09", (8, 4), (None, None, None)),
        (QWEN3_30B, "dgx-b200", "mxfp8", "2025-09", (1, 1), ("step", None, None)),
        (QWEN3_235B, "dgx-b200", "mxfp8", "2025-11", (8, 2), (None, True, None)),
        (QWEN3_235B, "dgx-b200", "bf16", "2026-02", (8, 4), (None, None, None)),
        (QWEN3_235B, "dgx-b300", "bf16", "2026-02", (8, 4), (None, True, None)),
        (QWEN3_30B, "dgx-h100", "bf16", "2026-02", (2, 12), ("layers", True, None)),
        (QWEN3_30B, "dgx-h100", "fp8", "2026-02", (2, 12), (None, True, None)),
    ],
)
def test_pairs_graphs_and_dispatchers_by_release(
    model: Sizes, cluster: str, precision: str, date: str, layout: tuple[int, int], found: tuple[Any, ...]
) -> None:
    """configs/deepseek (pull requests 3368 and 4458) and configs/qwen (1760, 2669) as each release has them."""
    made = with_launch_script(
        row(model, cluster, precision, date, pp=layout[0], virtual_stages=layout[1], ep=8, zero=1)
    )
    parallelism = made["parallelism"]
    graphs = made["training"].get("cuda_graphs")
    assert (graphs, parallelism.get("ep_overlap"), parallelism.get("ep_dispatcher")) == found


@pytest.mark.parametrize(
    ("model", "cluster", "date", "layout", "attention"),
    [
        (QWEN3_30B, "dgx-b200", "2026-02", (1, 1), False),
        (QWEN3_30B, "dgx-b200", "2026-04", (1, 1), True),
        (QWEN3_235B, "gb300-nvl72", "2026-02", (4, 12), False),
        (QWEN3_235B, "gb300-nvl72", "2026-02", (4, 1), True),
    ],
)
def test_graphs_with_and_without_attention(
    model: Sizes, cluster: str, date: str, layout: tuple[int, int], attention: bool
) -> None:
    """configs/qwen of February and of March 2026: `cuda_graph_scope`."""
    made = with_launch_script(row(model, cluster, "bf16", date, pp=layout[0], virtual_stages=layout[1], ep=8))
    assert ("attn" in made["training"]["cuda_graph_scope"]) is attention


def test_a_script_for_all_layouts_comes_behind_those_for_one() -> None:
    """B300's first recipe in 16 bits with virtual stages runs more modules again (2175); 2627 took both away."""
    for date, found in (("2026-02", MODULES), ("2026-06", ("mla_up_proj",))):
        made = with_launch_script(row(DEEPSEEK_V3, "dgx-b300", "bf16", date, pp=8, virtual_stages=2, ep=8, zero=1))
        assert set(made["training"]["recompute"]["modules"]) == set(found)


@pytest.mark.parametrize(
    ("model", "cluster", "date", "own", "found"),
    [
        (DEEPSEEK_V3, "dgx-h100", "2025-09", {}, "wgrad"),
        (QWEN3_235B, "dgx-h100", "2026-02", {}, "wgrad"),
        (QWEN3_235B, "dgx-h100", "2026-02", {"tp_overlap": "full"}, "full"),
        (QWEN3_235B, "dgx-h100", "2025-11", {}, "full"),
        (QWEN3_235B, "gb200-nvl72", "2026-02", {}, "full"),
    ],
)
def test_a_script_beats_what_a_table_says_of_all_models(
    model: Sizes, cluster: str, date: str, own: dict[str, str], found: str
) -> None:
    """recipes/deepseek/deepseek_v3.py and configs/qwen: `tp_comm_overlap`. The row's own layout stands."""
    one = row(model, cluster, "bf16", date, tp=2, pp=8, virtual_stages=4, ep=32)
    whole = {"parallelism": {"tp_overlap": "full"}}
    one["parallelism"] = whole["parallelism"] | one["parallelism"] | own
    made = with_launch_script(one, {} if own else whole)
    assert made["parallelism"]["tp_overlap"] == found
    assert made["parallelism"]["tp"] == 2


@pytest.mark.parametrize(
    ("model", "precision", "date", "zero", "found"),
    [
        (QWEN3_235B, "bf16", "2025-11", 1, "remainders"),
        (GPT_OSS_120B, "bf16", "2026-06", 1, "remainders"),
        (GPT_OSS_120B, "bf16", "2026-08", 1, None),
        (DEEPSEEK_V3, "bf16", "2026-08", 1, "remainders"),
        (QWEN3_235B, "bf16", "2025-11", 3, None),
        (QWEN3_235B, "mxfp8", "2026-02", 1, None),
    ],
)
def test_sixteen_bits_have_the_precision_aware_optimizer(
    model: Sizes, precision: str, date: str, zero: int, found: str | None
) -> None:
    """scripts/performance/utils/overrides.py: `set_post_overrides`; recipes of 0.6.2 have it for DeepSeek alone."""
    training = with_launch_script(row(model, "gb200-nvl72", precision, date, pp=1, ep=8, zero=zero))["training"]
    assert training.get("master_weights") == found
    assert training.get("bias_dropout_fusion") is (False if model == GPT_OSS_120B else None)
