"""Prompts that TensorRT-LLM lets wait for others, from its configuration (llmapi/llm_args.py: batch_wait_timeout_iters,
batch_wait_max_tokens_ratio, AttentionDpConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.convert.serving.experts import sends_tokens
from sim.convert.settings import Settings


def waits_of(s: Settings, layout: Mapping[str, Any]) -> dict[str, Any]:
    """`batch_wait` of one replica or `balanced_prompts` of replicas that share experts; a note where a server is told
    one of them that it does not follow (_torch/pyexecutor/py_executor.py, _schedule)."""
    iterations, ratio = s.whole("wait_iterations") or 0, s.number("wait_ratio") or 0.0
    balance = {"timeout_iterations": s.whole("balance_timeout"), "wait_iterations": s.whole("balance_wait")}
    balance, balanced = {k: v for k, v in balance.items() if v is not None}, s.flag("balanced")
    shared = sends_tokens(layout)
    found: dict[str, Any] = {}
    if iterations and ratio and not shared:
        found["batch_wait"] = {"iterations": iterations, "tokens_ratio": ratio}
    elif iterations or ratio:
        alone = "prompts wait only if both are above 0"
        why = "no prompt waits so with data-parallel attention" if shared else alone
        s.notes.append(f"batch_wait_timeout_iters, batch_wait_max_tokens_ratio: without effect, {why}")
    if balanced and shared:
        found["balanced_prompts"] = balance
    elif balanced:
        s.notes.append("attention_dp_config.enable_balance: without effect, no replicas share experts")
    return found
