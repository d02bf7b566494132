"""Attention that few models' own code computes, described and as captured: sinks that are a factor, scores that are
shifted in every layer, clamps of queries, keys and values, and layer norms with weights of each head's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_programs import saved_bytes

from sim.core.errors import InputError
from sim.core.operator_kinds import COUNTED
from sim.core.program import Block, Compute
from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.captured.model import captured_model
from sim.models.layer import layer_block
from sim.models.parameters import count_parameters

SEQ, SEQUENCES = 256, 2
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MIMO = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 10,  # torch sorts up to 4,096 numbers by one kernel
    "moe_intermediate_size": 256,
    "head_dim": 96,
    "v_head_dim": 64,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 64,
}
FAIRSEQ = {"ffn_dim": 768, "dropout": 0.0, "attention_dropout": 0.0}
OPT = FAIRSEQ | {"word_embed_proj_dim": 512}
XGLM = FAIRSEQ | {"d_model": 512, "attention_heads": 8, "num_layers": 2, "activation_dropout": 0.0}
MPT = {"d_model": 512, "n_heads": 8, "n_layers": 2, "vocab_size": 1000, "max_seq_len": 512}
# attention, and what a family's config needs beside or in place of the sizes; how far launches may be off, each way
CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "granite_swa": ("granite_swa", "eager", {"sliding_window": 64}, 0),
    "mimo_v2_flash": ("mimo_v2_flash", "eager", MIMO, 3),  # its factor on values is left out
    "command_r_plus": ("cohere", "sdpa", {"use_qk_norm": True}, 2),
    "stablelm_2_12b": ("stablelm", "sdpa", {"qk_layernorm": True}, 1),
    "olmo_0424": ("olmo", "sdpa", {"clip_qkv": 8.0}, 2),
    "mpt_storywriter": ("mpt", "eager", MPT | {"attn_config": {"alibi": True, "clip_qkv": 6.0}}, 1),
    "opt": ("opt", "sdpa", OPT, 0),
    "xglm": ("xglm", "eager", XGLM, 1),  # the least number is made in each layer
    "gemma4": ("gemma4_text", "sdpa", {"hidden_size_per_layer_input": 0, "sliding_window": 64}, 8),
}


def blocks(folder: Path, name: str) -> tuple[list[Block], list[Block]]:
    """Layers as described, and as captured."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from calibrate.capture.huggingface.step import huggingface_maker
    from calibrate.capture.options import Options
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    family, attention, own, _ = CASES[name]
    text = transformers.CONFIG_MAPPING[family](**SIZES | own).to_json_string(use_diff=False)
    file, program = folder / "config.json", folder / "program.json.gz"
    file.write_text(text, encoding="utf-8")
    options = Options(SEQ, SEQUENCES, weights="bf16", attention=attention)
    write_program(program, *record(huggingface_maker(json.loads(text), options), balanced=True))
    training = {"seq_len": SEQ, "micro_batch_size": SEQUENCES, "global_batch_size": SEQUENCES, "param_dtype": "bf16"}
    training |= {"framework": "transformers", "attention": "unfused" if attention == "eager" else "fused"}
    asked = parse_scenario({"model": str(file), "training": training, "cluster": {"gpu": "h100-sxm"}})
    return [layer_block(asked, i) for i in range(asked.model.layers)], [*captured_model(str(program)).pieces[1:-1]]


def launches(items: Any) -> int:
    """Kernels, a fused attention as one, without sums of gradients over micro-batches."""
    found = [i for i in items if isinstance(i, Compute) and not i.name.endswith("_accumulate")]
    return sum(1 if i.kind.startswith("attention") else i.kernels for i in found)


def flops(items: Any) -> float:
    return sum(i.flops for i in items if isinstance(i, Compute) and i.kind in COUNTED)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_described_as_they_run(tmp_path: Path, name: str) -> None:
    described, captured = blocks(tmp_path, name)
    off = CASES[name][3]
    for one, other in zip(described, captured, strict=True):
        assert one.params + one.expert_params == other.params
        assert flops(one.forward) == pytest.approx(flops(other.forward), rel=1e-6)
        assert saved_bytes(one.saved) == pytest.approx(saved_bytes(other.saved), rel=0.02)
        assert abs(launches(one.forward) - launches(other.forward)) <= off
        assert abs(launches(one.backward) - launches(other.backward)) <= off


def config(folder: Path, **keys: Any) -> str:
    (folder / "config.json").write_text(json.dumps(SIZES | keys), encoding="utf-8")
    return str(folder / "config.json")


COMMAND_R_PLUS = {
    "hidden_size": 12288,
    "intermediate_size": 33792,
    "num_hidden_layers": 64,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 256000,
    "use_qk_norm": True,
}
STABLELM_2_12B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "use_parallel_residual": True,
    "qk_layernorm": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("family", "keys", "parameters"),
    [("cohere", COMMAND_R_PLUS, 103_810_674_688), ("stablelm", STABLELM_2_12B, 12_143_380_480)],
)
def test_published_models_have_their_parameters(tmp_path: Path, family: str, keys: Any, parameters: int) -> None:
    """Command R+ (104B) and StableLM 2 12B: both norm each head with its own weights, heads x head_dim of them."""
    model = load_model(config(tmp_path, model_type=family, **keys))
    assert count_parameters(model).total == pytest.approx(parameters, rel=1e-4)
    without = load_model(config(tmp_path, model_type=family, **keys | {"use_qk_norm": False, "qk_layernorm": False}))
    heads = keys["num_attention_heads"] + keys["num_key_value_heads"]
    of_norms = heads * keys["hidden_size"] // keys["num_attention_heads"] * keys["num_hidden_layers"]
    assert count_parameters(model).total - count_parameters(without).total == of_norms


def test_norms_by_head_need_a_layer_norm() -> None:
    model = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1000, "norm": "rmsnorm", "qk_norm": "by_head"}
    with pytest.raises(InputError, match="qk_norm: found 'by_head'; needs norm: layernorm"):
        parse_scenario({"model": model, "training": {"seq_len": 128, "global_batch_size": 1}, "cluster": "dgx-h100"})


def test_torch_s_attention_gets_copies_of_keys_for_wide_heads_alone(tmp_path: Path) -> None:
    """sdpa_attention.py: `use_gqa_in_sdpa`; flash-attn has its own way, and heads of 256 are grouped."""

    def names(head_dim: int, **training: Any) -> list[str]:
        keys = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": head_dim}
        run = {"seq_len": SEQ, "global_batch_size": 1, "framework": "transformers", **training}
        asked = {"model": config(tmp_path, **keys), "training": run, "cluster": "dgx-h100"}
        return [i.name for i in layer_block(parse_scenario(asked), 0).forward if isinstance(i, Compute)]

    assert "attention_repeat" in names(512)
    assert "attention:efficient" in names(512)
    assert "attention_repeat" not in names(256)
    assert "attention_repeat" not in names(512, attention_kernel="flash2")


def test_attention_s_dropout_is_the_config_s_own(tmp_path: Path) -> None:
    """OPT drops numbers of hidden states alone, and Llama's code attention's probabilities alone."""
    plain = {"num_hidden_layers": 1, "ffn_dim": 768, "word_embed_proj_dim": 512}
    opt, llama = (
        load_model(config(tmp_path, **keys))
        for keys in ({"model_type": "opt", "dropout": 0.1} | plain, {"model_type": "llama", "attention_dropout": 0.1})
    )
    assert (opt.dropout, opt.attention_dropout) == (0.1, 0.0)
    assert (llama.dropout, llama.attention_dropout) == (0.0, 0.1)
    found = {}
    for name, model in (("opt", opt), ("llama", llama)):
        run = {"seq_len": SEQ, "global_batch_size": 1, "framework": "transformers"}
        keys = model.model_dump(exclude_unset=True) | {"layers": 1}
        block = layer_block(parse_scenario({"model": keys, "training": run, "cluster": "dgx-h100"}), 0)
        computed = [i for i in block.forward if isinstance(i, Compute)]
        masks = {s.name for s in block.saved if s.name.endswith("dropout mask") and s.bytes}
        found[name] = any(i.drops for i in computed if i.kind == "attention_forward"), bool(masks)
    assert found == {"opt": (False, True), "llama": (True, False)}


@pytest.mark.parametrize(
    ("family", "keys", "what"),
    [
        ("granite_swa", {}, "model.sinks"),
        ("gemma2", {"head_dim": 64, "sliding_window": 512}, "model.attention_softcap"),
        ("llama", {}, ""),
    ],
)
def test_what_torch_s_attention_cannot_run_is_said(tmp_path: Path, family: str, keys: Any, what: str) -> None:
    run = {"seq_len": SEQ, "global_batch_size": 1, "framework": "transformers"}
    asked = {"model": config(tmp_path, model_type=family, **keys), "training": run, "cluster": "dgx-h100"}
    said = [note for note in parse_scenario(asked).warnings if "torch's own attention no" in note]
    assert bool(said) == bool(what)
    assert all(what in note for note in said)


LLAMA_LIKE = {
    "internlm": ({"intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 103168, "bias": True}, 7.322),
    "orion": ({"hidden_size": 5120, "intermediate_size": 15360, "num_hidden_layers": 40, "vocab_size": 84608}, 14.499),
    "xverse": (
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "vocab_size": 100278},
        13.715,
    ),
}


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_families_like_llama_on_the_hub(tmp_path: Path, family: str) -> None:
    """InternLM 7B, Orion 14B, XVERSE 13B."""
    keys, billions = LLAMA_LIKE[family]
    heads = keys.get("hidden_size", 4096) // 128
    whole = {"hidden_size": 4096, "num_attention_heads": heads, "num_key_value_heads": heads, **keys}
    model = load_model(config(tmp_path, model_type=family, **whole))
    assert count_parameters(model).total / 1e9 == pytest.approx(billions, rel=1e-3)
