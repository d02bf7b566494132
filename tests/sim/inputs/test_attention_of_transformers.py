"""Each family's attention as Transformers chooses it: in which layers it has windows, and whether torch computes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.huggingface import FAMILIES
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import load_model
from sim.variants.model_code import LLAMA, MODEL_CODE
from tests.sim.transformers_configs import GPT2, OWN, SIZES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
NAMES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
KNOWN = [family for family in FAMILIES if family in NAMES]
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
WINDOWS = {"sliding_window": 64, "use_sliding_window": True}


def read(folder: Path, config: Any) -> ModelConfig:
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return load_model(str(folder / "config.json"))


def config_of(family: str, own: dict[str, Any]) -> Any:
    sizes = GPT2 if family in ("gpt2", "gpt_bigcode") else SIZES
    return transformers.CONFIG_MAPPING[family](**{**sizes, **OWN.get(family, {}), **own})


@pytest.mark.parametrize("family", KNOWN)
def test_attention_is_fused_where_transformers_has_a_kernel_for_it(tmp_path: Path, family: str) -> None:
    """`_supports_sdpa`, `_supports_flash_attn` and `_supports_flex_attn` of the family's class."""
    model = read(tmp_path, config_of(family, {}))
    if {model.attention_kind(i) for i in range(model.layers)} == {"state_space"}:
        pytest.skip("no layer has attention")
    built = getattr(transformers, NAMES[family])
    code = LLAMA if model.code is None else MODEL_CODE[model.code]
    of_torch = code.fused and code.sdpa and not model.sinks and model.attention_softcap is None
    assert of_torch == bool(built._supports_sdpa)
    assert code.fused == any(getattr(built, f"_supports_{way}") for way in ("sdpa", "flash_attn", "flex_attn"))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("cohere2", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gpt_oss", {}),
        ("olmo3", {}),
        ("qwen2", WINDOWS),
        ("qwen3", WINDOWS | {"max_window_layers": 5}),
        ("qwen2_moe", WINDOWS),
        ("qwen2_moe", WINDOWS | {"max_window_layers": 3}),
        ("qwen3_moe", WINDOWS),
        ("qwen3_moe", WINDOWS | {"max_window_layers": 3}),
        ("qwen3_next", WINDOWS),
        ("qwen3_5_text", WINDOWS),
    ],
)
def test_windows_are_in_the_layers_of_transformers(
    tmp_path: Path, family: str, own: dict[str, Any], named: bool
) -> None:
    """Also of configs without `layer_types`, which earlier releases wrote."""
    config = config_of(family, own)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    windows = {
        int(found[1]): module.sliding_window or None
        for name, module in built.named_modules()
        if (found := LAYER.search(f".{name}.")) and hasattr(module, "sliding_window")
    }
    if not named:
        config.layer_types = None
    model = read(tmp_path, config)
    kinds = [model.attention_kind(i) for i in range(model.layers)]
    ours = {i: model.window if kind == "sliding" else None for i, kind in enumerate(kinds) if kind != "state_space"}
    assert {i: ours[i] for i in windows} == windows
    assert windows or model.window is None


def test_minimax_s_attention_has_the_window_of_its_config(tmp_path: Path) -> None:
    """minimax/modeling_minimax.py, MiniMaxModel.forward: one mask for all layers with attention."""
    model = read(tmp_path, config_of("minimax", {"sliding_window": 64}))
    kinds = [model.attention_kind(i) for i in range(4)]
    assert (model.window, kinds) == (64, ["sliding", "state_space"] * 2)
    assert read(tmp_path, config_of("minimax", {})).window is None
