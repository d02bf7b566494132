"""Flags of drafted tokens and of LoRA adapters in command lines of serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.test_serving import BENCH, converted

SGLANG = "python -m sglang.launch_server --model-path deepseek-v3 --tp 8"
LLAMA = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --speculative-draft-model-path llama3.2-1b"
EAGLE = f"{SGLANG} --speculative-algorithm EAGLE"
TREE = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"


@pytest.mark.parametrize(
    ("server", "tokens", "told"),
    [
        (EAGLE, 3, "--speculative-algorithm eagle: SGLang chooses 3 steps"),
        (f"{SGLANG} --speculative-algo NEXTN", 3, "--speculative-algo nextn: SGLang chooses 3 steps"),
        (f"{EAGLE} --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3", 2, ""),
        (f"{EAGLE} {TREE}", 5, ""),
        (
            f"{SGLANG} --speculative-algorithm NGRAM",
            None,
            "--speculative-algorithm: drafts of method ngram, without a model, are not",
        ),
        (f"{LLAMA} --speculative-algorithm EAGLE3", 5, "SGLang chooses 5 steps in a tree of 8 tokens"),
        (f"{LLAMA} --speculative-algorithm STANDALONE", 3, "SGLang chooses 3 steps;"),
        (SGLANG, None, ""),
    ],
)
def test_what_sglang_drafts(tmp_path: Path, server: str, tokens: int | None, told: str) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"].get("speculative", {}).get("tokens") == tokens
    assert told in text
    assert ("not simulated" in text or "SGLang chooses" in text) == bool(told)
    parse_scenario(found)


def test_trees_of_sglang(tmp_path: Path) -> None:
    """A tree that is told, Llama's own (server_args.py, auto_choose_speculative_params: 5, 4, 8), and none."""
    tree = {"branches": 4, "tree_tokens": 7}
    for server, expected in (
        (f"{EAGLE} {TREE}", tree),
        (f"{LLAMA} --speculative-algorithm EAGLE3", tree),
        (f"{LLAMA} --speculative-algorithm STANDALONE", {}),
        (f"{EAGLE} --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3", {}),
    ):
        found = converted(tmp_path, f"{server}\n{BENCH}")[0]["inference"]["speculative"]
        assert {key: found[key] for key in ("branches", "tree_tokens") if key in found} == expected


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ("{decoding_type: MTP, num_nextn_predict_layers: 2}", 2),
        ("{decoding_type: MTP}", 1),
        ("{decoding_type: NGram, max_draft_len: 4}", None),
    ],
)
def test_what_tensorrt_llm_drafts(tmp_path: Path, options: str, tokens: int | None) -> None:
    (tmp_path / "more.yml").write_text(f"speculative_config: {options}\n")
    found, text = converted(tmp_path, f"trtllm-serve deepseek-v3 --tp_size 8 --config more.yml\n{BENCH}")
    assert found["inference"].get("speculative", {}).get("tokens") == tokens
    assert ("drafts of method ngram, without a model, are not simulated" in text) == (tokens is None)


@pytest.mark.parametrize(
    ("server", "lora", "told"),
    [
        (
            "vllm serve llama3-8b --enable-lora --lora-modules a=x b=y c=z --max-loras 2 --max-lora-rank 64",
            {"adapters": 3, "rank": 64, "max_loras": 2},
            "",
        ),
        (
            """vllm serve llama3-8b --enable-lora --max-lora-rank 8 --lora-modules '{"name": "a", "path": "b"}'""",
            {"adapters": 1, "rank": 8, "max_loras": 1},
            "",
        ),
        (
            "vllm serve llama3-8b --enable-lora --max-loras 4",
            {"adapters": 4, "rank": 16, "max_loras": 4},
            "inference.lora.adapters: no flag says how many adapters requests use; 4 are assumed",
        ),
        (
            "python -m sglang.launch_server --model-path llama3-8b --lora-paths a=x b=y",
            {"adapters": 2, "rank": 16, "max_loras": 8},
            "inference.lora.rank: no flag gives the rank; 16 is assumed",
        ),
        ("vllm serve llama3-8b", None, ""),
    ],
)
def test_adapters(tmp_path: Path, server: str, lora: dict[str, Any] | None, told: str) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"].get("lora") == lora
    assert told in text
    assert "not expressed here" not in text
    parse_scenario(found)


VLLM = "vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config"


@pytest.mark.parametrize(
    ("server", "states", "vocab"),
    [
        (f"""{VLLM} '{{"method": "eagle3", "model": "some/EAGLE3-8B", "num_speculative_tokens": 3}}'""", 3, 32_000),
        (f"""{VLLM} '{{"method": "eagle", "model": "some/EAGLE-8B", "num_speculative_tokens": 3}}'""", 1, None),
        (f"{LLAMA.replace('llama3.2-1b', 'some/EAGLE3-8B')} --speculative-algorithm EAGLE3", 3, 32_000),
    ],
)
def test_a_draft_of_hidden_states_whose_config_is_not_at_hand_has_the_models_sizes(
    tmp_path: Path, server: str, states: int, vocab: int | None
) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    own = found["inference"]["speculative"]
    assert own["hidden_states"] == states
    assert own["draft"]["layers"] == 1
    assert own["draft"].get("vocab") == vocab
    assert "is not in the Hub's cache: a layer of the model's own sizes stands for it" in text
    parse_scenario(found)


@pytest.mark.parametrize(("product", "states"), [("vllm", 0), ("trtllm", 3)])
def test_all_eagle_of_tensorrt_llm_is_eagle_3(tmp_path: Path, product: str, states: int) -> None:
    (tmp_path / "more.yml").write_text(
        "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: some/EAGLE}\n"
    )
    server = "trtllm-serve llama3.1-70b --tp_size 8 --config more.yml"
    if product == "vllm":
        server = """vllm serve llama3.1-70b -tp 8 -sc '{"model": "llama3.2-1b", "num_speculative_tokens": 3}'"""
    found, _ = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"]["speculative"].get("hidden_states", 0) == states


def test_sglangs_own_layer_reads_no_states_of_a_draft(tmp_path: Path) -> None:
    assert "hidden_states" not in converted(tmp_path, f"{EAGLE}\n{BENCH}")[0]["inference"]["speculative"]


def test_vllms_drafts_from_the_text_are_found_always_for_no_flag_says_how_often(tmp_path: Path) -> None:
    options = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'"""
    found, text = converted(tmp_path, f"vllm serve llama3-8b {options}\n{BENCH}")
    assert found["inference"]["speculative"] == {"tokens": 5, "lookup": 1.0}
    assert "no flag says how often the text holds a draft" in text
    parse_scenario(found)
