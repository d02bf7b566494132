"""Prompts that wait though there is room for them, until more of them can be computed at once: TensorRT-LLM's batch
waiting and, where replicas share experts, its balance of prompts (_torch/pyexecutor/py_executor.py: _schedule,
_waiting_requests, _balance_adp_requests)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct


class Prospect(NamedTuple):
    """What the next iteration of a replica would compute: prompts and their tokens, and sequences that add tokens, with
    theirs."""

    prompts: int
    prompt_tokens: int
    adding: int
    added_tokens: int


class BatchWait(Struct):
    """Prompts wait beside sequences that add tokens for at most so many iterations, or until an iteration has this
    share of the most tokens."""

    iterations: int
    tokens_ratio: float
    waited: int = 0

    def holds(self, next_one: Prospect, most_tokens: int) -> bool:
        """Whether the prompts of the next iteration wait; counts the iterations."""
        if not next_one.prompts or not next_one.adding:
            return False
        tokens = next_one.prompt_tokens + next_one.added_tokens
        if self.waited >= self.iterations or tokens >= self.tokens_ratio * most_tokens:
            self.waited = 0
            return False
        self.waited += 1
        return True


class BalancedPrompts(Struct):
    """Prompts of all replicas that share experts wait until each of them has one, for at most `timeout_iterations`;
    while all add tokens, for `wait_iterations` more."""

    timeout_iterations: int
    wait_iterations: int
    waited: int = 0
    batching: int = 0

    def holds(self, replicas: Sequence[Prospect], most_running: int) -> bool:
        """Whether the prompts of the next iteration of all wait; counts the iterations."""
        all_add = all(one.adding or not one.prompts for one in replicas)  # _pad_attention_dp_dummy_request
        if all(one.prompts and one.adding < most_running for one in replicas):
            self.waited = 0
            if not all_add:
                return False
            self.batching = self.batching + 1 if self.batching < self.wait_iterations else 0
            return self.batching > 0
        self.waited += 1
        if self.waited >= self.timeout_iterations or not all_add:
            self.waited = 0
            return False
        return True
