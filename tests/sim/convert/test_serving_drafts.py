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
        (f"{EAGLE} {TREE}", 5, "trees of drafts are not simulated: a chain of 5 stands for it"),
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
