"""Capture of Hugging Face models of any kind from their config alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.gpu.composites import is_composite  # noqa: E402
from calibrate.capture.huggingface.inputs import batch_for, with_random_values  # noqa: E402
from calibrate.capture.huggingface.step import huggingface_maker  # noqa: E402
from calibrate.capture.options import Options  # noqa: E402
from calibrate.capture.program_out import write_program  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GPTJ = {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}  # adds ALiBi itself
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
RESNET = {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "out_indices": [2]}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
BOXES = {
    "model_type": "detr",
    "architectures": ["DetrForObjectDetection"],
    **ENCODER_DECODER,
    "num_queries": 10,
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
}
SWIN = {
    "model_type": "swin",
    "embed_dim": 16,
    "depths": [1] * 4,
    "num_heads": [2] * 4,
    "window_size": 2,
}
MASKS = {
    "model_type": "maskformer",
    "architectures": ["MaskFormerForInstanceSegmentation"],
    "fpn_feature_size": 32,
    "mask_feature_size": 32,
    "backbone_config": {**SWIN, "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "decoder_config": BOXES,
}
SERIES = {
    "model_type": "informer",
    "architectures": ["InformerForPrediction"],
    **ENCODER_DECODER,
    "context_length": 16,
    "prediction_length": 8,
    "num_time_features": 2,
    "lags_sequence": [1, 2],
    "encoder_layerdrop": 0.0,  # layers that are skipped at random get no gradient
    "decoder_layerdrop": 0.0,
}
FORECASTER = {"model_type": "timesfm", **SMALL, "head_dim": 8, "architectures": ["TimesFmModelForPrediction"]}
BROS = {"model_type": "bros", **SMALL, "vocab_size": 64}


def program_of(folder: Path, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Capture a config in this process."""
    step, recorder = record(huggingface_maker(config, Options(16, 2, **more)))
    write_program(folder / "p.json.gz", step, recorder)
    data: dict[str, Any] = json.loads(gzip.decompress((folder / "p.json.gz").read_bytes()))
    return data


@pytest.mark.parametrize(
    "config", [GPTJ, VIT, CONVNEXT, MAMBA, CLIP_TEXT, DEIT, BOXES, MASKS, SERIES], ids=lambda c: c["model_type"]
)
def test_each_parameter_that_the_loss_depends_on_has_a_gradient(tmp_path: Path, config: dict[str, Any]) -> None:
    """As many bytes of gradients as the model has when it runs for real."""
    if config in (BOXES, MASKS):
        pytest.importorskip("scipy", reason="the loss matches objects with scipy")
    real = huggingface_maker(config, Options(16, 2))()  # before the capture: Transformers keeps positions of images
    real.loss().backward()
    program = program_of(tmp_path, config)
    wanted = sum(p.grad.nbytes for p in real.model.parameters() if p.grad is not None)
    kinds, storages = program["tables"]["kinds"], program["storages"]
    found = [b for b, k in zip(storages["bytes"], storages["kind"], strict=True) if kinds[k] == "gradient"]
    assert sum(found) == wanted > 0


def test_a_model_without_fused_attention_is_captured_with_its_own(tmp_path: Path) -> None:
    assert program_of(tmp_path, BLOOM)["facts"]["attention"] == "eager"
    assert program_of(tmp_path, VIT)["facts"]["attention"] == "sdpa"
    with pytest.raises(ValueError, match="does not support"):
        program_of(tmp_path, BLOOM, attention="sdpa")


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}


def test_an_encoder_decoder_without_a_first_token_is_captured(tmp_path: Path) -> None:
    assert program_of(tmp_path, {**T5, "decoder_start_token_id": None, "pad_token_id": None})["operators"]["name"]


ATTENDING = "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize("hides", [False, True])
def test_a_mask_is_left_out_where_it_hides_nothing(hides: bool) -> None:
    """As in a real run: attention without a mask reads none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def step() -> Step:
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
        ids, mask = torch.zeros(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
        mask[1, 8:] = 0 if hides else 1

        def loss() -> torch.Tensor:
            value: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
            return value

        return Step(model, loss, torch.optim.AdamW(model.parameters()), 16, 2, "bf16")

    rows = [row for row in record(step)[1].rows if row.phase == "forward"]
    attended = [len(row.inputs) for row in rows if row.name.endswith(ATTENDING)]
    assert attended == [4 if hides else 3] * len(attended)  # queries, keys, values, mask
    assert attended


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_model_keeps_its_mask(tmp_path: Path, compiled: bool) -> None:
    """Transformers reads no mask in a graph that is traced, and packed sequences would need one."""
    program = program_of(tmp_path, LLAMA, autocast="bf16", compiled=compiled)
    names, operators = program["tables"]["names"], program["operators"]
    given = {
        len(x) for i, x in zip(operators["name"], operators["inputs"], strict=True) if names[i].endswith(ATTENDING)
    }
    assert given == {4 if compiled else 3}  # queries, keys, values, mask


SPEECH = {"model_type": "wav2vec2-bert", **SMALL, "output_hidden_size": 32, "feature_projection_input_dim": 8}
PAST = {"past_values": [2, 32, 3]}
PATCHES = {
    "model_type": "patchtst",
    "d_model": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "context_length": 32,
    "prediction_length": 8,
    "num_input_channels": 3,
    "patch_length": 4,
    "patch_stride": 4,
    "num_targets": 5,
}
BERT = {"model_type": "bert", **SMALL, "vocab_size": 64}
SEGFORMER = {
    "model_type": "segformer",
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 32,
    "image_size": 64,
}


@pytest.mark.parametrize(
    ("config", "named", "made", "labels"),
    [
        (BERT, "BertForQuestionAnswering", "BertForQuestionAnswering", {"start_positions": [2], "end_positions": [2]}),
        (BERT, "BertForTokenClassification", "BertForTokenClassification", {"labels": [2, 16]}),
        (BERT, "BertForSequenceClassification", "BertForSequenceClassification", {"labels": [2]}),
        (
            {**BERT, "num_labels": 1},
            "BertForSequenceClassification",
            "BertForSequenceClassification",
            {"labels": [2, 1]},
        ),
        (BERT, "BertForPreTraining", "BertForPreTraining", {"labels": [2, 16], "next_sentence_label": [2]}),
        (BERT, "BertModel", "BertForMaskedLM", {"labels": [2, 16]}),
        (BERT, "OfOneself", "BertForMaskedLM", {"labels": [2, 16]}),
        (BERT, "LlamaForCausalLM", "BertForMaskedLM", {"labels": [2, 16]}),
        (LLAMA, "LlamaForSequenceClassification", "LlamaForSequenceClassification", {"labels": [2]}),
        (VIT, "ViTModel", "ViTForImageClassification", {"pixel_values": [2, 3, 32, 32], "labels": [2]}),
        (
            SPEECH,
            "Wav2Vec2BertForSequenceClassification",
            "Wav2Vec2BertForSequenceClassification",
            {"input_features": [2, 16, 8], "labels": [2]},
        ),
        (VIT, "ViTForMaskedImageModeling", "ViTForMaskedImageModeling", {"pixel_values": [2, 3, 32, 32]}),
        (T5, "T5ForConditionalGeneration", "T5ForConditionalGeneration", {"labels": [2, 16]}),
        (T5, "T5EncoderModel", "T5ForConditionalGeneration", {"labels": [2, 16]}),
        (PATCHES, "PatchTSTForPrediction", "PatchTSTForPrediction", {**PAST, "future_values": [2, 8, 3]}),
        (PATCHES, "PatchTSTForClassification", "PatchTSTForClassification", {**PAST, "target_values": [2]}),
        (PATCHES, "PatchTSTForRegression", "PatchTSTForRegression", {**PAST, "target_values": [2, 5]}),
        (
            SEGFORMER,
            "SegformerForSemanticSegmentation",
            "SegformerForSemanticSegmentation",
            {"pixel_values": [2, 3, 64, 64], "labels": [2, 64, 64]},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_the_class_that_a_config_names_is_trained_with_labels_of_its_task(
    config: dict[str, Any], named: str, made: str, labels: dict[str, list[int]]
) -> None:
    step = huggingface_maker({**config, "architectures": [named]}, Options(16, 2))()
    assert type(step.model).__name__ == made
    batch = batch_for(step.model, 2, 16)
    assert {name: list(x.shape) for name, x in batch.items() if name != "input_ids"} == labels
    assert step.loss().requires_grad


def test_a_model_that_says_what_an_image_shows_gets_the_image_and_tokens() -> None:
    parts = {"text_config": {**SMALL, "vocab_size": 64}, "vision_config": {**SMALL, "image_size": 32, "patch_size": 8}}
    step = huggingface_maker({"model_type": "blip", **parts}, Options(16, 2))()
    assert {name: list(x.shape) for name, x in batch_for(step.model, 2, 16).items()} == {
        "pixel_values": [2, 3, 32, 32],
        "input_ids": [2, 16],
        "labels": [2, 16],
    }
    assert step.loss().requires_grad


def test_boxes_are_matched_in_turn_with_predictions() -> None:
    """One object for each image; its box is compared with one prediction of the image, as in a real step."""
    pytest.importorskip("scipy", reason="the loss matches boxes with scipy")
    rows = [row for row in record(huggingface_maker(BOXES, Options(16, 2)))[1].rows if row.phase == "forward"]
    assert [row.outputs[0][0][1] for row in rows if row.name == "aten.index"].count((2, 4)) == 1


@pytest.mark.parametrize("value", ["BertModel", 5, [1], {"a": 1}])
def test_architectures_that_are_no_names_are_one_message(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match=r"architectures: found .*expected a list of class names"):
        program_of(tmp_path, {**BERT, "architectures": value})


def test_a_forward_alone_is_that_of_the_class_that_a_config_names() -> None:
    step = huggingface_maker({**BERT, "architectures": ["BertModel"]}, Options(16, 2, forward=True))()
    assert type(step.model).__name__ == "BertModel"


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
            r"ValueError: You have to specify bbox; the config, --micro-batch-size and "
            r"--seq-len alone decide on the batch, input_ids \[2, 16\].*write a function",
        ),
        (DETR, "DecisionTransformerModel: has the input states; known from a config are input_ids"),
        (FORECASTER, "config.json: TimesFmModelForPrediction reads future_values, whose size is missing"),
        ({**LLAMA, "vocab_size": -1}, "config.json: Transformers makes no model of it: .*-1"),
    ],
)
def test_what_a_config_does_not_say_is_one_message(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        program_of(tmp_path, config)


@pytest.mark.parametrize(("name", "divided"), [("silu_backward", False), ("mm", False), ("matmul", True)])
def test_only_operators_without_a_kernel_are_divided(name: str, divided: bool) -> None:
    """torch has a formula for `silu_backward` too, but a kernel runs it."""
    assert is_composite(getattr(torch.ops.aten, name).default) is divided


def test_gradients_have_the_layouts_of_real_kernels() -> None:
    """Of norms and of a softmax whose results are read transposed; torch's fake kernels have other layouts."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

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
    def step() -> Step:
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 64, bias=False)])
        x = torch.zeros(4, 8)
        return Step(model, lambda: model[0](x).sum(), torch.optim.AdamW(model.parameters()), 4, 1)

    lives = record(step)[1].lives
    assert sum(x.bytes for x in lives if x.kind == "optimizer state") == 2 * 4 * 8 * 8


def test_a_real_run_has_random_values_but_no_tokens_with_a_meaning_of_their_own() -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 8, "eos_token_id": 7}
    model = huggingface_maker(config, Options(256, 4))().model
    batch = batch_for(model, 4, 256)
    assert not batch["input_ids"].any()
    with_random_values(batch, model.config)
    assert set(batch["input_ids"].flatten().tolist()) == {0, 1, 2, 3, 4, 5, 6}
    assert batch["labels"] is batch["input_ids"]
    image = {"pixel_values": torch.zeros(2, 3, 8, 8)}
    with_random_values(image, model.config)
    assert image["pixel_values"].std() > 0.5
