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
LLAMA = {"model_type": "llama", **SMALL, "vocab_size": 64}
DEIT = {"model_type": "deit", **SMALL, "image_size": 32, "patch_size": 8}
DETR = {"model_type": "decision_transformer", "hidden_size": 32, "n_layer": 1, "n_head": 4}
BROS = {"model_type": "bros", **SMALL, "vocab_size": 64}


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


@pytest.mark.parametrize("config", [GPTJ, VIT, CONVNEXT, MAMBA, CLIP_TEXT, DEIT], ids=lambda c: c["model_type"])
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


def test_an_encoder_decoder_without_a_first_token_is_captured(tmp_path: Path) -> None:
    t5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    assert program_of(tmp_path, {**t5, "decoder_start_token_id": None, "pad_token_id": None})["operators"]["name"]


@pytest.mark.parametrize("hides", [False, True])
def test_a_mask_is_left_out_where_it_hides_nothing(hides: bool) -> None:
    """As in a real run: attention without a mask has a faster kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
        ids, mask = torch.zeros(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
        mask[1, 8:] = 0 if hides else 1

        def loss() -> torch.Tensor:
            value: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
            return value

        return Step(model, loss, torch.optim.AdamW(model.parameters()), 16, 2, "bf16")

    names = {row.name for row in record(step)[1].rows if row.phase == "forward"}
    assert ("aten._scaled_dot_product_flash_attention" in names) is not hides
    assert ("aten._scaled_dot_product_efficient_attention" in names) is hides


@pytest.mark.parametrize(("compiled", "kernel"), [(False, "flash"), (True, "efficient")])
def test_a_compiled_model_keeps_its_mask(tmp_path: Path, compiled: bool, kernel: str) -> None:
    """Transformers reads no mask in a graph that is traced, and packed sequences would need one."""
    names = program_of(tmp_path, LLAMA, autocast="bf16", compiled=compiled)["tables"]["names"]
    found = [name for name in names if "scaled_dot_product" in name and "backward" not in name]
    assert found == [f"aten._scaled_dot_product_{kernel}_attention"]


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
        (
            BROS,
            r"ValueError: You have to specify bbox; the config alone decides on the batch, input_ids.*write a function",
        ),
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


def test_gradients_have_the_layouts_of_real_kernels() -> None:
    """Of norms and of a softmax whose results are read transposed; torch's fake kernels have other layouts."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
        model = torch.nn.Sequential(
            torch.nn.BatchNorm2d(8), torch.nn.Flatten(2), torch.nn.LayerNorm(16), torch.nn.LogSoftmax(-1)
        )
        weights = torch.ones(2, 16, 8)
        optimizer = torch.optim.SGD(model.parameters())
        return Step(model, lambda: (model(x).transpose(1, 2) * weights).sum(), optimizer, 4, 2)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if "_backward" in func.name():
                seen.append((func._schema.name.replace("::", "."), tree_leaves(out)[0].stride()))
            return out

    seen: list[tuple[str, tuple[int, ...]]] = []
    loss = step().loss()
    with Seen():
        torch.autograd.backward(loss)
    assert len(seen) == 3
    rows = [r for r in record(step, "cpu")[1].rows if "_backward" in r.name]
    assert [(r.name, contiguous_or(*r.outputs[0][0][1:])) for r in rows] == seen


def contiguous_or(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's strides; a file gives none for a contiguous one."""
    return strides or torch.empty(shape).stride()


def test_a_parameter_that_the_loss_does_not_need_has_no_optimizer_states() -> None:
    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 64, bias=False)])
        x = torch.zeros(4, 8)
        return Step(model, lambda: model[0](x).sum(), torch.optim.AdamW(model.parameters()), 4, 1)

    lives = record(step)[1].lives
    assert sum(x.bytes for x in lives if x.kind == "optimizer state") == 2 * 4 * 8 * 8


def test_a_ctc_loss_of_known_lengths_has_the_alphas_of_a_real_one() -> None:
    """Their shape depends on the longest target, which no weight decides."""
    from calibrate.capture import Step
    from calibrate.capture.run_step import record

    def step() -> Step:
        model = torch.nn.Linear(8, 5)
        x, labels = torch.zeros(2, 12, 8), torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])

        def loss() -> torch.Tensor:
            lengths, frames = (labels > 0).sum(-1), torch.full((2,), 12)
            log_probs = model(x).log_softmax(-1).transpose(0, 1)
            return torch.nn.functional.ctc_loss(log_probs, labels.masked_select(labels > 0), frames, lengths)

        return Step(model, loss, torch.optim.SGD(model.parameters()), 12, 2)

    loss = step().loss()
    alphas = next(n for n in nodes_under(loss) if n.name() == "CtcLossBackward0")._saved_result1
    rows = {row.name: row for row in record(step, "cpu")[1].rows}
    assert rows["aten._ctc_loss"].outputs[1][0][1] == tuple(alphas.shape) == (2, 12, 2 * 3 + 1)
    assert rows["aten._ctc_loss_backward"].outputs[0][0][1] == (12, 2, 5)


def nodes_under(loss: Any) -> list[Any]:
    """Autograd's nodes of a result, each with the first of those that it passes its gradient to."""
    found = [loss.grad_fn]
    while found[-1].next_functions and found[-1].next_functions[0][0] is not None:
        found.append(found[-1].next_functions[0][0])
    return found
