"""Drafted tokens in command lines of serving engines.

vLLM: config/speculative.py. SGLang: server_args.py, `_handle_speculative_decoding`, `auto_choose_speculative_params`.
TensorRT-LLM: llmapi/llm_args.py, `speculative_config`.
"""

from __future__ import annotations

import re
from typing import Any

from sim.convert.serving_graphs import json_object
from sim.convert.settings import Settings, without_none
from sim.inputs.hub import as_model

FROM_TEXT = ("ngram", "ngram_gpu", "suffix", "lookahead", "user_provided", "userprovided")  # none of a model's
MEDUSA = "medusa"
# auto_choose_speculative_params: Llama's steps, unless its draft is a model of its own (STANDALONE), and all others'.
LLAMA_STEPS, SGLANG_STEPS = 5, 3
LLAMA = re.compile(r"(?i)(?:^|[/_-])(?:meta-)?llama-?[123](?!\d)")
LAYERS = 1  # TensorRT-LLM, MTPDecodingConfig: num_nextn_predict_layers


def drafts_of(s: Settings) -> dict[str, Any] | None:
    """A draft model, or the model's own prediction layer: `inference.speculative`; None where nothing is drafted, or,
    with a note, nothing that is simulated."""
    method = str(s.take("algorithm", "")).lower()
    drafted = Settings(s.file, {"tokens": s.take("drafted"), "draft": s.take("draft")})
    flag = s.written_as("algorithm")
    if config := json_object(s, "speculative", "speculative-config"):
        method, flag = str(config.get("method")).lower(), "--speculative-config"
        own = "mtp" in method
        drafted = Settings(
            s.file, {"tokens": config.get("num_speculative_tokens", 1), "draft": None if own else config.get("model")}
        )
    if method in (*FROM_TEXT, MEDUSA):
        why = "" if method == MEDUSA else ", without a model,"
        s.notes.append(f"{flag}: drafts of method {method}{why} are not simulated")
        s.take("draft_tokens")
        return None
    tokens, draft = drafted.whole("tokens"), drafted.take("draft")
    if tokens is None and method:
        tokens = LAYERS if method == "mtp" else _steps(s, method)
    if tokens is None:
        return None
    _of_tree(s, tokens)
    return without_none({"tokens": tokens, "draft": draft and as_model(str(draft))})


def _steps(s: Settings, method: str) -> int:
    """SGLang's own number of steps."""
    is_llama = LLAMA.search(str(s.values.get("model"))) is not None and method != "standalone"
    steps, tree = (LLAMA_STEPS, " in a tree of 8 tokens, simulated as a chain") if is_llama else (SGLANG_STEPS, "")
    s.notes.append(
        f"{s.written_as('algorithm')} {method}: SGLang chooses {steps} steps{tree}; --speculative-num-steps says "
        "another number"
    )
    return steps


def _of_tree(s: Settings, steps: int) -> None:
    """SGLang's drafts with one branch are as many as its steps, and it checks one token more; more are left."""
    if str(s.values.get("branches", 1)) == "1":
        s.taken |= {"branches", "draft_tokens"}
    elif s.values.get("draft_tokens") is not None:
        s.notes.append(f"trees of drafts are not simulated: a chain of {steps} stands for it")
