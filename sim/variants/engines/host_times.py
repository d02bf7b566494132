"""Seconds of a serving engine's host: `HostTimes`, a part of its record."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = TypeVar("Tokens", float, NDArray[np.float64])


class HostTimes(NamedTuple):
    """Seconds of an engine's host beside GPUs of one architecture; what is left out takes none.

    `uncertainty`: of these seconds, a standard deviation as a part of 1. For fitted ones the error of the whole on rows
    that they were not fitted to (tools/fit_engines.py prints it); for others the spread of what their sources say.
    """

    iteration_s: float = 0.0  # of every iteration: scheduling, input tensors, sampling, detokenizing
    rank_s: float = 0.0  # of every iteration, for each tensor-parallel rank beyond the first
    sequence_s: float = 0.0  # of every iteration, for each sequence in it
    message_s: float = 0.0  # of every iteration of several GPUs: messages to the processes of the workers and back
    message_sequence_s: float = 0.0  # likewise, for each sequence in it
    prompt_s: float = 0.0  # more where an iteration computes prompts
    oversize_s: float = 0.0  # for each token and rank of an iteration beyond `Engine.sized_tokens`
    launch_s: float = 0.0  # to issue one kernel outside of a CUDA graph
    collective_s: float = 0.0  # that an all-reduce takes beyond the profile's: ranks that arrive one after another
    request_s: float = 0.0  # before a request reaches the engine: HTTP, tokenizer
    prompt_token_s: float = 0.0  # likewise, for each token of its prompt
    outputs_s: float = 0.0  # of the server's process behind the engine (`sim.serve.prices.front`), for an iteration
    output_s: float = 0.0  # likewise, to make text of each sequence's token
    piece_s: float = 0.0  # likewise, to stream it
    text_outputs_s: float = 0.0  # an iteration's text in a process of its own before the one that sends
    text_output_s: float = 0.0  # text of a sequence's token in that process
    logprobs_s: float = 0.0  # beyond output_s, to make text of a token that comes with log probabilities
    logprob_s: float = 0.0  # beyond these, for each log probability of a token
    logprob_piece_s: float = 0.0  # beyond piece_s, to stream each log probability of a token
    mask_s: float = 0.0  # to mark what a grammar forbids, for each sequence and token of the vocabulary
    accept_s: float = 0.0  # to follow a sequence's token in its grammar
    search_s: float = 0.0  # to look a sequence's drafts up in its text
    search_token_s: float = 0.0  # likewise, for each token of the text
    uncertainty: float = 0.0

    def before_s(self, prompt_tokens: Tokens) -> Tokens:
        """Return the seconds before a request of `prompt_tokens` reaches the engine."""
        return self.request_s + self.prompt_token_s * prompt_tokens

    def slower(self, times: float) -> HostTimes:
        """Return the seconds of a processor that takes `times` as long; `collective_s`, the GPUs' own wait, stays."""
        kept = self.collective_s, self.uncertainty
        return HostTimes(*[times * s for s in self])._replace(collective_s=kept[0], uncertainty=kept[1])
