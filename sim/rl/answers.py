"""The step's prompts and answers: how long they are, and the requests that the engine gets."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.inputs.rl_config import Lengths, Rl
from sim.serve.requests import Request

Counts = NDArray[np.int64]


class Answers(Struct, frozen=True, eq=False):
    """Tokens of each sequence's prompt and of its answer, both [sequences]; a prompt's answers follow each other."""

    prompt_tokens: Counts
    output_tokens: Counts

    @property
    def tokens(self) -> Counts:
        """Prompt and answer together."""
        return self.prompt_tokens + self.output_tokens


def draw_lengths(lengths: Lengths, n: int, random: np.random.Generator) -> Counts:
    """`n` whole lengths of at least 1: log-normal with the stated mean, exp(μ + σ²/2), so μ = ln mean − σ²/2.

    >>> draw_lengths(Lengths(mean=100), 3, np.random.default_rng(0)).tolist()
    [100, 100, 100]
    >>> drawn = draw_lengths(Lengths(mean=100, sigma=0.5), 100_000, np.random.default_rng(0))
    >>> bool(abs(drawn.mean() - 100) < 0.5)
    True
    """
    mu = math.log(lengths.mean) - lengths.sigma**2 / 2
    drawn = np.exp(mu + lengths.sigma * random.standard_normal(n)) if lengths.sigma else np.full(n, lengths.mean)
    return np.clip(np.rint(drawn), 1, lengths.max).astype(np.int64)


def draw_answers(rl: Rl, seq_len: int) -> Answers:
    """The step's sequences, from `rl.seed`: a length for every prompt, and one for each of its answers, which do not
    depend on each other. No sequence is longer than `seq_len`: an answer ends there."""
    random = np.random.default_rng(rl.seed)
    each = draw_lengths(rl.prompt_len, rl.prompts_per_step, random)
    prompts = np.repeat(np.minimum(each, seq_len - 1), rl.generations_per_prompt)
    answers = draw_lengths(rl.output_len, rl.answers, random)
    return Answers(prompts, np.minimum(answers, seq_len - prompts))


def requests_of(answers: Answers, rl: Rl) -> tuple[Request, ...]:
    """All answers asked for at once, in such an order that dealing them out in turn gives each replica neighbours.

    NeMo-RL and verl cut the batch into as many consecutive pieces as there are replicas, so a prompt's answers meet on
    one of them and share what was computed of the prompt.
    """
    n, replicas = rl.answers, rl.generation.replicas or 1
    sizes = [n // replicas + (i < n % replicas) for i in range(replicas)]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).tolist()
    order = [starts[r] + k for k in range(max(sizes)) for r in range(replicas) if k < sizes[r]]
    shared = rl.generations_per_prompt > 1
    return tuple([_request(answers, i, i // rl.generations_per_prompt if shared else None) for i in order])


def _request(answers: Answers, i: int, prompt: int | None) -> Request:
    tokens = int(answers.prompt_tokens[i])
    name, known = ("", 0) if prompt is None else (f"prompt {prompt}", tokens)
    return Request(0.0, tokens, int(answers.output_tokens[i]), name, known)
