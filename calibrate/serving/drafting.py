"""Speculative decoding for real: a small model drafts tokens, and the served model checks them in one forward.

Both decode greedily, so a drafted token is right if it is the one that the served model chooses there, and the served
tokens are those without a draft (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from calibrate.serving.cache import PagedCache
from calibrate.serving.forward import Model, SequenceChunk, forward

Tokens = tuple[int, ...]


@dataclass(slots=True)
class Drafts:
    """The draft `model` with a cache of its own, which drafts up to `tokens` tokens of each sequence in an iteration.

    `fed`: how many of each sequence's tokens its cache holds. `right`: how many of the tokens last drafted were right.
    `kept` and `rejected` count all of them; those after a rejected one are neither.
    """

    model: Model
    cache: PagedCache
    tokens: int
    fed: dict[int, int] = field(default_factory=dict)
    right: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    rejected: int = 0

    @property
    def acceptance(self) -> float:
        """Return the share of drafted tokens that were right, of those that were looked at."""
        return self.kept / max(1, self.kept + self.rejected)

    def accepted(self, request: int, position: int, drafted: int) -> int:
        """Return how many of a sequence's drafted tokens the last forward accepted, as
        `sim.serve.scheduling.speculation.Acceptance.accepted` draws."""
        return self.right[request]

    def release(self, sequence: int) -> None:
        """Forget a sequence that has ended or was preempted."""
        self.cache.release(sequence)
        self.fed.pop(sequence, None)

    def feed(self, known: Mapping[int, Tokens]) -> None:
        """Compute tokens of sequences for which nothing is drafted now: all that are known of each, from the first
        that was not fed."""
        if known:
            self._forward(known)

    def draft(self, known: Mapping[int, Tokens], counts: Mapping[int, int]) -> dict[int, Tokens]:
        """Return `counts` drafted tokens for each sequence, which follow its `known` tokens."""
        drafted: dict[int, Tokens] = dict.fromkeys(known, ())
        while wanted := [s for s in known if len(drafted[s]) < counts[s]]:
            chosen = self._forward({s: known[s] + drafted[s] for s in wanted})
            drafted |= {s: (*drafted[s], token) for s, token in zip(wanted, chosen, strict=True)}
        return drafted

    def check(self, sequence: int, drafted: Tokens, chosen: Items[int], known: int, most: int) -> Tokens:
        """Compare drafted tokens with those that the served model chooses at their places and after them; return the
        sequence's new tokens, at most `most`. It had `known` before."""
        right = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
        self.right[sequence] = right
        self.kept += right
        self.rejected += right < len(drafted)
        new = (*drafted[:right], chosen[right])[:most]
        self.fed[sequence] = min(self.fed[sequence], known + len(new) - 1)  # what was wrong is overwritten
        return new

    def _forward(self, known: Mapping[int, Tokens]) -> list[int]:
        """Feed what is not fed yet, and return the token that follows each sequence."""
        parts = []
        for sequence, tokens in known.items():
            before = self.fed.get(sequence, 0)
            parts.append(SequenceChunk(sequence, tokens[before:], before))
            self.cache.grow(sequence, len(tokens))
            self.fed[sequence] = len(tokens)
        chosen: list[int] = forward(self.model, self.cache, parts).argmax(-1).tolist()
        return chosen
