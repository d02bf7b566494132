"""Decoders beside a tower of pictures have the parameters that Transformers builds from the same config."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.families.pictures import FAMILIES as PICTURES
from sim.inputs.huggingface import FAMILIES
from sim.inputs.model_input import load_model
from sim.models.parameters import count_parameters
from tests.sim.transformers_configs import LATENT, ROUTED, SIZES

STEP = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
    "sliding_window": 128,
    "num_sliding_attention_heads": 12,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2_vl.Qwen2VLTextModel", {}),
    "qwen2_5_vl_text": ("qwen2_5_vl.Qwen2_5_VLTextModel", {}),
    "qwen3_vl_text": ("qwen3_vl.Qwen3VLTextModel", {}),
    "qwen3_vl_moe_text": ("qwen3_vl_moe.Qwen3VLMoeTextModel", {"num_experts": 16, "moe_intermediate_size": 128}),
    "glm4v_text": ("glm4v.Glm4vTextModel", {}),
    "glm4v_moe_text": ("glm4v_moe.Glm4vMoeTextModel", ROUTED),
    "glm_ocr_text": ("glm_ocr.GlmOcrTextModel", {}),
    "mistral4": ("mistral4.Mistral4Model", LATENT | ROUTED),
    "hunyuan_vl_text": ("hunyuan_vl.HunYuanVLTextModel", {"head_dim": 64}),
    "granite4_vision_text": ("granite4_vision.Granite4VisionTextModel", {}),
    "granite_docling_text": ("granite_docling.GraniteDoclingTextModel", {}),
    "qwen2_5_omni_text": ("qwen2_5_omni.Qwen2_5OmniThinkerTextModel", {}),
    "qwen3_omni_moe_text": (
        "qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
        {"num_experts": 16, "moe_intermediate_size": 128},
    ),
    "unlimited_ocr_text": ("unlimited_ocr.UnlimitedOcrTextModel", ROUTED | {"n_group": 1}),
    "deepseek_ocr2_text": ("deepseek_ocr2.DeepseekOcr2TextModel", ROUTED | {"mlp_layer_types": ["sparse"] * 8}),
    "aria_text": ("aria.AriaTextModel", {"moe_num_experts": 16, "moe_topk": 4}),
    "step3p5": ("step3p7.Step3p7TextModel", ROUTED | STEP),
    "paddleocr_vl_text": ("paddleocr_vl.PaddleOCRTextModel", {}),
    "cosmos3_edge_text": ("cosmos3_edge.Cosmos3EdgeTextModel", {}),
    "emu3_text_model": ("emu3.Emu3TextModel", {}),
    "ernie4_5_vl_moe_text": (
        "ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel",
        {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": [128, 64], "num_attention_heads": 4},
    ),
    "hy_v4_vl_text": ("hy_v4_vl.HYV4VLTextModel", LATENT | ROUTED | {"n_shared_experts": 1}),
    "muse_glimmer_text": ("muse_glimmer.MuseGlimmerTextModel", {"head_dim": 64}),
    "molmo2_text": ("molmo2.Molmo2TextModel", {"head_dim": 64, "additional_vocab_size": 0}),
}
# ERNIE's experts of pictures' tokens, and routers' biases, which docs/models.md names as not counted
NOT_OF_TEXT = re.compile("vision_moe|e_score_correction_bias")
QWEN_2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
}


def of(tmp_path: Path, config: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("family", CLASSES)
def test_a_decoder_has_the_parameters_of_transformers(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    where, own = CLASSES[family]
    package, _, name = where.partition(".")
    built_by = getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), name)
    config = built_by.config_class(**SIZES | own)
    with torch.device("meta"):
        built = built_by._from_config(config)
    model = of(tmp_path, json.loads(config.to_json_string(use_diff=False)))
    output = 0 if model.tied_embeddings else model.vocab * model.hidden  # which these classes leave to another
    counted = sum(p.numel() for name, p in built.named_parameters() if not NOT_OF_TEXT.search(name))
    assert count_parameters(model).total == counted + output


def test_all_but_names_of_flat_configs_are_compared() -> None:
    assert {*PICTURES} == {*CLASSES, "qwen2_vl", "qwen2_5_vl", "phi4_multimodal", "phi4mm", "step3p7"}
    assert {*PICTURES} <= {*FAMILIES}


def test_a_flat_config_of_the_hub_is_the_decoder_of_a_newer_nested_one(tmp_path: Path) -> None:
    """Transformers' Qwen2_5_VLConfig makes a `text_config` of a flat one's keys."""
    text = {k: v for k, v in QWEN_2_5_VL_7B.items() if k != "vision_config"} | {"model_type": "qwen2_5_vl_text"}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {}}
    flat = of(tmp_path, QWEN_2_5_VL_7B)
    assert flat == of(tmp_path, nested)
    assert flat.left_out == ("vision_config",)
    assert count_parameters(flat).total == pytest.approx(7.62e9, rel=0.001)  # Qwen 2.5 7B


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("glm4v_moe_text", "use_qk_norm", True), ("mistral4", "attention_bias", True), ("mistral4", "n_group", 4)],
)
def test_what_is_not_simulated_is_refused(tmp_path: Path, family: str, key: str, value: object) -> None:
    config = SIZES | LATENT | ROUTED | {"v_head_dim": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
    whole = {**config, "model_type": family, key: value}
    with pytest.raises(InputError, match=f"{key}: found"):
        of(tmp_path, whole)


def test_a_decoder_s_sizes_that_a_nested_config_leaves_out_are_those_of_its_class(tmp_path: Path) -> None:
    """llava-hf/llava-1.5-7b-hf names of Llama's sizes only the vocabulary: Transformers writes a nested config's
    differences from its class. A single model's config that lacks its sizes is refused all the same."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    model = of(tmp_path, {"model_type": "llava", "text_config": text, "vision_config": {}})
    llama_7b = 6_738_415_616 + 2 * 64 * 4096
    assert (count_parameters(model).total, model.trained_positions, model.tied_embeddings) == (llama_7b, 4096, False)
    mistral = {"model_type": "mistral", "vocab_size": 32064}
    model = of(tmp_path, {"model_type": "llava_next", "text_config": mistral, "vision_config": {}})
    assert (model.kv_heads, model.window, model.trained_positions) == (8, 4096, 131072)
    with pytest.raises(InputError, match="hidden_size: is required"):
        of(tmp_path, text | {"num_hidden_layers": 32})


@pytest.mark.parametrize(
    ("wrapper", "own", "decoder", "tied"),
    [
        ("qwen3_vl", True, False, True),
        ("qwen3_vl", False, True, False),
        ("qwen3_vl", None, True, True),
        ("llava", False, True, True),
    ],
)
def test_a_wrapper_s_tied_embeddings_hold_before_its_decoder_s(
    tmp_path: Path, wrapper: str, own: bool | None, decoder: bool, tied: bool
) -> None:
    """The whole model has the output matrix (`PreTrainedModel.tie_weights`); LLaVA's config takes its decoder's."""
    text = {"model_type": "qwen2", "tie_word_embeddings": decoder}
    outer = {} if own is None else {"tie_word_embeddings": own}
    assert (
        of(tmp_path, {"model_type": wrapper, **outer, "text_config": text, "vision_config": {}}).tied_embeddings is tied
    )


def test_step_s_first_keys_are_read(tmp_path: Path) -> None:
    """Its config on the Hub; 196 billion weights are published, prediction modules aside."""
    config = {"model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45}
    config |= {"num_attention_heads": 64, "num_attention_groups": 8, "vocab_size": 128896, "moe_num_experts": 288}
    config |= {"moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280, "sliding_window": 512}
    config |= {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 12, "num_nextn_predict_layers": 3}
    config |= {"moe_layers_enum": ",".join(map(str, range(3, 45)))}
    config |= {"attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128}}
    model = of(tmp_path, config)
    assert count_parameters(model).total == pytest.approx(196e9, rel=0.01)
    assert (model.heads, model.full_attention.heads, model.window, model.moe.dense_layers) == (96, 64, 512, 3)
    assert model.left_out == ("prediction modules",)


def test_the_decoder_of_a_model_that_speaks_is_its_thinker_s(tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "qwen2_5_omni_text"}
    thinker = {"text_config": text, "vision_config": {}, "audio_config": {}}
    model = of(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker_config": {}})
    assert model.left_out == ("vision_config", "audio_config", "talker_config")
    assert (model.layers, model.hidden, model.qkv_bias) == (8, 512, True)


@pytest.mark.parametrize("tower", ["embd_layer", "vision_config"])
def test_phi_4_s_decoder_is_phi_3(tmp_path: Path, tower: str) -> None:
    """microsoft/Phi-4-multimodal-instruct, and the same config as Transformers writes it."""
    family = {"embd_layer": "phi4mm", "vision_config": "phi4_multimodal"}[tower]
    text = {**SIZES, "partial_rotary_factor": 0.75, "sliding_window": 262144}
    model = of(tmp_path, text | {"model_type": family, tower: {"image_embd_layer": {}}})
    alone = of(tmp_path, text | {"model_type": "phi3"})
    assert model.left_out == (tower,)
    assert model == alone.model_copy(update={"left_out": (tower,)})


def test_a_model_of_several_inputs_without_towers_is_its_decoder(tmp_path: Path) -> None:
    """Transformers writes Gemma 4's towers as null where it has none."""
    text = {**SIZES, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": None, "audio_config": None}
    assert of(tmp_path, whole) == of(tmp_path, text)


@pytest.mark.parametrize(
    ("family", "own", "key", "value"),
    [
        ("aria_text", {"moe_num_experts": 16, "moe_topk": 4}, "mlp_bias", True),
        ("step3p5", ROUTED, "mlp_bias", True),
        ("unlimited_ocr_text", ROUTED, "mlp_bias", True),
        ("muse_glimmer_text", {}, "layer_rope_theta", [1e4] * 8),
    ],
)
def test_keys_of_some_decoders_are_refused(
    tmp_path: Path, family: str, own: dict[str, Any], key: str, value: object
) -> None:
    """Routed experts have no biases, whatever `mlp_bias` says; rope is read where attention has a window."""
    config = SIZES | own | {"model_type": family}
    of(tmp_path, config)
    with pytest.raises(InputError, match=f"{key}: "):
        of(tmp_path, config | {key: value})


def test_experts_that_a_nested_config_leaves_out_are_those_of_its_class(tmp_path: Path) -> None:
    text = {"model_type": "unlimited_ocr_text"}
    model = of(tmp_path, {"model_type": "unlimited_ocr", "text_config": text, "vision_config": {}})
    assert (model.moe.shared_experts, model.moe.dense_layers) == (2, 1)


def test_a_decoder_that_no_key_describes_is_refused_with_what_it_is(tmp_path: Path) -> None:
    config = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}, "vision_config": {}}
    with pytest.raises(InputError, match="found 'mllama_text_model', a model some of whose layers attend to pictures"):
        of(tmp_path, config)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen2ForRewardModel", "MistralModel"])
def test_an_end_other_than_the_output_matrix_is_told(tmp_path: Path, name: str) -> None:
    config = SIZES | {"model_type": "llama"}
    assert of(tmp_path, config | {"architectures": [name]}).left_out == (
        f"end of {name} (simulated: an output matrix over the vocabulary)",
    )
    for whole in ("LlamaForCausalLM", "GPT2LMHeadModel", "ChatGLMModel"):
        assert of(tmp_path, config | {"architectures": [whole]}).left_out == ()


def test_attention_to_all_tokens_is_refused(tmp_path: Path) -> None:
    """As configs of embedding models made of decoders say it."""
    with pytest.raises(InputError, match="is_causal: found false; tokens that attend to those after them"):
        of(tmp_path, SIZES | {"model_type": "qwen2", "is_causal": False})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "albert"}, "found 'albert', an encoder, which"),
        ({"model_type": "nllb-moe"}, "found 'nllb-moe', an encoder with a decoder"),
        ({"model_type": "of_tomorrow", "is_encoder_decoder": True}, "found 'of_tomorrow', an encoder with a decoder"),
        ({"model_type": "wav2vec2"}, "found 'wav2vec2', a model of pictures or sound"),
    ],
)
def test_what_is_no_decoder_is_refused_with_what_it_is(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of(tmp_path, config)


def test_encoders_of_transformers_are_known_as_such(tmp_path: Path) -> None:
    """All that Transformers fills masked words in with, or translates, but those that read pictures, too."""
    names = pytest.importorskip("transformers.models.auto.modeling_auto")
    mapped = {*names.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    others = {"modernvbert", "ultravbert", "neomme", "perceiver", "reformer", "xlm"}  # pictures, or no such layers
    for family in sorted(mapped - others):
        with pytest.raises(InputError, match=rf"found '{family}', an encoder"):
            of(tmp_path, {"model_type": family})
