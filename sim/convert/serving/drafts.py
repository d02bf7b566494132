"""Drafted tokens in command lines of serving engines.

vLLM: config/speculative.py. SGLang: server_args.py, `_handle_speculative_decoding`, `auto_choose_speculative_params`.
TensorRT-LLM: llmapi/llm_args.py, `speculative_config`.
"""

from __future__ import annotations

import re
from typing import Any

from sim.convert.serving.checkpoints import loaded
from sim.convert.serving.graphs import json_object
from sim.convert.settings import Settings, without_none
from sim.inputs.hub import PREFIX, as_model

FROM_TEXT = ("ngram", "ngram_gpu", "suffix", "lookahead", "user_provided", "userprovided")  # none of a model's
MEDUSA = "medusa"
# auto_choose_speculative_params: Llama's steps, unless its draft is a model of its own (STANDALONE), and all others'.
LLAMA_STEPS, SGLANG_STEPS = 5, 3
LLAMA_TREE = 4, 8  # its branches and the tokens that it checks, the one before the drafts among them
LLAMA = re.compile(r"(?i)(?:^|[/_-])(?:meta-)?llama-?[123](?!\d)")
# Layers whose states EAGLE-3 reads: vLLM 0.33, models/llama_eagle3.py; SGLang 0.5.23, models/llama_eagle3.py. Of
# TensorRT-LLM's PyTorch backend all EAGLE is EAGLE-3 (_torch/speculative/eagle3.py).
AUX_STATES = 3
DRAFT_VOCAB = 32_000  # draft_vocab_size of SafeAILab's and of others' EAGLE-3 for Llama and Qwen
TENSORRT_LLM = "TensorRT-LLM"
LAYERS = 1  # TensorRT-LLM, MTPDecodingConfig: num_nextn_predict_layers


def drafts_of(s: Settings, product: str, served: str) -> dict[str, Any] | None:
    """A draft for the model that is `served`, or its own prediction layer: `inference.speculative`; None where nothing
    is drafted, or, with a note, nothing that is simulated."""
    method = str(s.take("algorithm", "")).lower()
    drafted = Settings(s.file, {"tokens": s.take("drafted"), "draft": s.take("draft")})
    flag = s.written_as("algorithm")
    if config := json_object(s, "speculative", "speculative-config"):
        method, flag = str(config.get("method")).lower(), "--speculative-config"
        own = "mtp" in method
        drafted = Settings(
            s.file, {"tokens": config.get("num_speculative_tokens", 1), "draft": None if own else config.get("model")}
        )
    if method == "ngram" and config:  # vLLM; of SGLang's trees no flag says the steps
        s.notes.append(
            "inference.speculative.lookup: no flag says how often the text holds a draft; 1 (always) is taken"
        )
        return {"tokens": drafted.whole("tokens"), "lookup": 1.0}
    if method in (*FROM_TEXT, MEDUSA):
        why = "" if method == MEDUSA else ", without a model,"
        s.notes.append(f"{flag}: drafts of method {method}{why} are not simulated")
        s.take("draft_tokens")
        return None
    tokens, draft, tree = drafted.whole("tokens"), drafted.take("draft"), _tree(s)
    if tokens is None and method:
        tokens, tree = (LAYERS, {}) if method == "mtp" else _chosen(s, method)
    if tokens is None:
        return None
    named = without_none({"tokens": tokens, "draft": draft and as_model(str(draft)), **tree})
    states = (AUX_STATES if product == TENSORRT_LLM or method == "eagle3" else 1) if "eagle" in method else 0
    return _of_states(s, {**named, "hidden_states": states}, served) if draft and states else named


def _of_states(s: Settings, named: dict[str, Any], served: str) -> dict[str, Any]:
    """A draft that reads the model's hidden states. Where its config is not at hand, a layer of the sizes of a dense
    model's own stands for it (EAGLE, arXiv 2401.15077, section 3; EAGLE-3, arXiv 2503.01840)."""
    model = None if loaded(named["draft"]) is not None else loaded(served)
    if model is None or model.moe is not None or model.mla is not None or {*model.attention_pattern} != {"full"}:
        return named
    own = {"vocab": min(DRAFT_VOCAB, model.vocab)} if named["hidden_states"] > 1 else {}
    told = f", with a vocabulary of {own['vocab']:,}, as many published ones have" if own else ""
    s.notes.append(
        f"inference.speculative.draft: the config.json of {named['draft'].removeprefix(PREFIX)} is not in the Hub's "
        f"cache: a layer of the model's own sizes stands for it{told}"
    )
    return {**named, "draft": {"preset": as_model(served), "layers": 1, **own}}


def _chosen(s: Settings, method: str) -> tuple[int, dict[str, int]]:
    """SGLang's own number of steps, and of Llama its tree."""
    is_llama = LLAMA.search(str(s.values.get("model"))) is not None and method != "standalone"
    branches, checked = LLAMA_TREE
    tree = {"branches": branches, "tree_tokens": checked - 1} if is_llama else {}
    steps, words = (LLAMA_STEPS, f" in a tree of {checked} tokens") if is_llama else (SGLANG_STEPS, "")
    s.notes.append(
        f"{s.written_as('algorithm')} {method}: SGLang chooses {steps} steps{words}; --speculative-num-steps says "
        "another number"
    )
    return steps, tree


def _tree(s: Settings) -> dict[str, int]:
    """SGLang's tree, of which it checks one token fewer than it says, for the first is no drafted one. With one branch
    drafts are as many as its steps."""
    branches, checked = s.whole("branches"), s.whole("draft_tokens")
    if branches in (None, 1) or checked is None:
        return {}
    return {"branches": branches or 1, "tree_tokens": checked - 1}
