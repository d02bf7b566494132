"""Models by their id on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.hub import shipped_models
from sim.inputs.model_input import load_model, model_presets


def test_each_shipped_id_is_that_of_one_shipped_model() -> None:
    assert set(shipped_models().values()) <= set(model_presets())
    for hub_id, name in shipped_models().items():
        assert load_model(f"hf://{hub_id}") == load_model(name)


def test_capital_letters_of_an_id_do_not_count() -> None:
    assert load_model("hf://QWEN/qwen3-32b") == load_model("hf://Qwen/Qwen3-32B") == load_model("qwen3-32b")


def _downloaded(cache: Path, hub_id: str, layers: int) -> None:
    """Write a config as `hf download` keeps it in its cache."""
    model = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = model / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c0ffee")
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 512, "num_attention_heads": 8}
    (snapshot / "config.json").write_text(json.dumps(config | {"intermediate_size": 1024, "vocab_size": 1000}))


def test_a_downloaded_config_is_read_from_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    _downloaded(tmp_path / "hub", "somebody/model", layers=7)
    assert load_model("hf://somebody/model").layers == 7
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert load_model("hf://somebody/model").layers == 7


def test_a_shipped_model_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    _downloaded(tmp_path, "Qwen/Qwen3-32B", layers=7)
    assert load_model("hf://Qwen/Qwen3-32B").layers == 64


def test_an_id_of_neither_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"nearest shipped model is 'qwen3-8b', or run `hf download Qwen/Qwen3-8B-FP8"):
        load_model("hf://Qwen/Qwen3-8B-FP8")


def test_a_bare_id_is_answered_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    _downloaded(tmp_path, "somebody/model", layers=7)
    with pytest.raises(
        InputError, match=r"the shipped model is 'llama3.1-8b'; or write 'hf://meta-llama/Llama-3.1-8B'"
    ):
        load_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(InputError, match="write 'hf://somebody/model' for the config in the Hub's cache"):
        load_model("somebody/model")
