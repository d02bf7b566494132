"""No key of a config.json is dropped in silence: it reaches the model, is refused, or is named.

The relation is one for all families: a key that is renamed is no longer the one that somebody knows, so the config is
refused for want of it, or the new name is told; unless the key is declared to matter never.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.core.errors import InputError
from sim.inputs.huggingface import _never_matters, model_of_config
from sim.inputs.scenario import parse_scenario

SHOWN = yaml.safe_load((Path(__file__).parents[3] / "docs" / "families.yaml").read_text())
MOST_OF_THEM = {family["title"]: family["config"] for family in SHOWN if "config" in family}
NAMES = ("x_{}", "{}_x", "num_{}")


def told(config: dict[str, Any]) -> str | None:
    """What is said of a config's keys; None where it is refused."""
    try:
        found = model_of_config(config, "config.json")
    except InputError:
        return None
    return " ".join([*found.get("unread", ()), *found.get("left_out", ())])


def renamed(config: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one key renamed, in all ways, keys of mappings in it, too; and the new name with its place."""
    for key, value in config.items():
        if not _never_matters(key):
            for name in (word.format(key) for word in NAMES):
                yield ".".join((*place, name)), {name if k == key else k: v for k, v in config.items()}
        if isinstance(value, dict):
            for name, changed in renamed(value, (*place, key)):
                yield name, config | {key: changed}


@pytest.mark.parametrize("title", MOST_OF_THEM)
def test_a_key_that_is_renamed_is_missed_or_named(title: str) -> None:
    said = {name: told(config) for name, config in renamed(MOST_OF_THEM[title])}
    assert [name for name, words in said.items() if words is not None and name not in words] == []


@pytest.mark.parametrize("title", MOST_OF_THEM)
def test_a_key_that_is_added_is_named(title: str) -> None:
    for key, value in (("num_phantom_heads", 8), ("phantom_dtype", "float8"), ("use_phantoms", False)):
        words = told(MOST_OF_THEM[title] | {key: value})
        assert words is not None
        assert key in words


def test_a_published_config_is_read_without_a_word() -> None:
    """Meta's of Llama 3.1 8B; keys that never matter, and one that does only where it is on."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
    }
    config |= {"attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008], "hidden_size": 4096}
    config |= {"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072}
    config |= {"mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
    config |= {"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0}, "rope_theta": 500000.0}
    config |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256}
    config |= {"transformers_version": "4.43.0", "sliding_window": None}
    assert told(config) == ""
    assert told(config | {"sliding_window": 4096}) == "sliding_window"


def test_a_key_of_a_quantization_config_is_named() -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "num_phantom_scales": 2}
    config = next(iter(MOST_OF_THEM.values())) | {"quantization_config": stored, "quantization": dict(stored)}
    assert told(config) == "quantization_config.num_phantom_scales"


def test_a_warning_names_places_in_one_line() -> None:
    config = {"model_type": "gemma3", "vision_config": {}, "mm_tokens_per_image": 256}
    text = next(config for config in MOST_OF_THEM.values() if config["model_type"] == "gemma3_text")
    config["text_config"] = text | {f"num_phantoms_{i}": i for i in range(20)}
    found = model_of_config(config, "config.json")
    training = {"seq_len": 128, "global_batch_size": 1}
    warnings = parse_scenario({"model": found, "training": training, "cluster": "dgx-h100"}).warnings
    (line,) = [warning for warning in warnings if "nothing here reads" in warning]
    assert "text_config.num_phantoms_0, text_config.num_phantoms_1, " in line
    assert line.endswith(" and 8 more")
