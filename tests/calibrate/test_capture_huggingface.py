"""Capture of Hugging Face models of any kind from their config alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GPTJ = {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64}
VIT = {"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8}
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "image_size": 32}
MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
    "vocab_size": 64,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}
CLIP_TEXT = {"model_type": "clip_text_model", **SMALL, "vocab_size": 64, "eos_token_id": 63}
DETR = {"model_type": "decision_transformer", "hidden_size": 32, "n_layer": 1, "n_head": 4}


def program_of(folder: Path, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Capture a config in this process."""
    from calibrate.capture.huggingface_step import huggingface_maker
    from calibrate.capture.options import Options
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    step, recorder = record(huggingface_maker(config, Options(16, 2, **more)))
    write_program(folder / "p.json.gz", step, recorder)
    data: dict[str, Any] = json.loads(gzip.decompress((folder / "p.json.gz").read_bytes()))
    return data


@pytest.mark.parametrize("config", [GPTJ, VIT, CONVNEXT, MAMBA, CLIP_TEXT], ids=lambda c: c["model_type"])
def test_each_parameter_that_the_loss_depends_on_has_a_gradient(tmp_path: Path, config: dict[str, Any]) -> None:
    """As many bytes of gradients as the model has when it runs for real."""
    from calibrate.capture.huggingface_step import huggingface_maker
    from calibrate.capture.options import Options

    program = program_of(tmp_path, config)
    real = huggingface_maker(config, Options(16, 2))()
    real.loss().backward()
    wanted = sum(p.grad.nbytes for p in real.model.parameters() if p.grad is not None)
    kinds, storages = program["tables"]["kinds"], program["storages"]
    found = [b for b, k in zip(storages["bytes"], storages["kind"], strict=True) if kinds[k] == "gradient"]
    assert sum(found) == wanted > 0


def test_a_model_without_fused_attention_is_captured_with_its_own(tmp_path: Path) -> None:
    assert program_of(tmp_path, GPTJ)["facts"]["attention"] == "eager"
    assert program_of(tmp_path, VIT)["facts"]["attention"] == "sdpa"
    with pytest.raises(ValueError, match="does not support"):
        program_of(tmp_path, GPTJ, attention="sdpa")


def test_adapters_are_trained_on_a_model_of_images_too(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are peft's")
    trained = [name for name, _, _, trains in _named(program_of(tmp_path, VIT, lora_rank=4)) if trains]
    assert trained
    assert all("lora_" in name for name in trained)


def _named(program: dict[str, Any]) -> list[list[Any]]:
    return [[program["tables"]["modules"][m], *rest] for m, *rest in program["parameters"]]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "nowhere"}, "model_type: found 'nowhere'; the installed Transformers has no such model"),
        ({"model_type": "llama", "num_hidden_layers": "x"}, "'num_hidden_layers' expected int, got str"),
        (DETR, "DecisionTransformerModel: has the input states; known from a config are input_ids"),
    ],
)
def test_what_a_config_does_not_say_is_one_message(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        program_of(tmp_path, config)


@pytest.mark.parametrize(("name", "divided"), [("silu_backward", False), ("mm", False), ("matmul", True)])
def test_only_operators_without_a_kernel_are_divided(name: str, divided: bool) -> None:
    """torch has a formula for `silu_backward` too, but a kernel runs it."""
    from calibrate.capture.recorder import is_composite

    assert is_composite(getattr(torch.ops.aten, name).default) is divided


def test_a_parameter_that_the_loss_does_not_need_has_no_optimizer_states() -> None:
    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 64, bias=False)])
        x = torch.zeros(4, 8)
        return Step(model, lambda: model[0](x).sum(), torch.optim.AdamW(model.parameters()), 4, 1)

    lives = record(step)[1].lives
    assert sum(x.bytes for x in lives if x.kind == "optimizer state") == 2 * 4 * 8 * 8
