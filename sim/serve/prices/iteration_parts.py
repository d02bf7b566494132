"""The parts of an iteration that are priced at once, and how many of each a pipeline rank has."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct


class Work(StrEnum):
    """A part of an iteration that is priced at once; the sizes that it depends on stand in a `Key`."""

    __hash__ = str.__hash__  # Enum's is written in Python; prices are looked up often
    LAYER = "layer"  # all of a layer that depends on the number of tokens alone
    PREFILL = "prefill"  # a prompt chunk, what is cached before it, how many are equal
    DECODE = "decode"  # sequences that add a token, how long they are, and the tokens of each
    TILED = "tiled"  # likewise, in an iteration where each of their query heads has a tile of its own
    ROUTED = "routed"  # of a layer, the experts that replicas share
    DISPATCH = "dispatch"  # of a layer, the messages to these experts
    COMBINE = "combine"  # of a layer, the messages back
    EMBEDDING = "embedding"
    HEAD = "head"
    ADAPTERS = "adapters"  # of a layer, what tokens of so many adapters add to it


class Key(NamedTuple):
    """A part of an iteration and its sizes; `spec`: which of `IterationCosts.specs` (a layer) or `.attentions`."""

    work: Work
    spec: int
    a: int
    b: int = 0
    c: int = 0


class StageLayers(Struct, frozen=True):
    """What one pipeline rank holds. `layers`: how many of each of `IterationCosts.specs`; `attentions` likewise."""

    rank: int
    layers: tuple[int, ...]
    attentions: tuple[int, ...]
    embedding: bool
    head: bool

    def attention_s(self, each: list[float]) -> float:
        """Seconds of its attention, of those of a layer of each kind."""
        if len(each) == 1:  # of most models, and asked in every iteration
            return self.attentions[0] * each[0]
        return sum([count * seconds for count, seconds in zip(self.attentions, each, strict=True)])
