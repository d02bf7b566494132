"""What launch scripts set for a row that leaves it out, by model, GPU, precision and release."""

from __future__ import annotations

from typing import Any

import pytest

from sim.validation.launch_scripts import DEEPSEEK_V3, KIMI_K2, QWEN3_235B, Sizes, with_launch_script

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
        (DEEPSEEK_V3, "gb200-nvl72", "nvfp4", "2026-06", modules("mla_up_proj"), "layers"),
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
    """Megatron-Bridge 0.6.2: perf_recipes/deepseek; scripts/performance/configs/kimi."""
    training = with_launch_script(row(model, cluster, precision, date, pp=4, ep=64))["training"]
    assert (training["recompute"], training.get("cuda_graphs")) == (recompute, graphs)


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
