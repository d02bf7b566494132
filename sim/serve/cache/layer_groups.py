"""Groups of equally many layers, between which vLLM divides the blocks of its cache.

Blocks of all layers come from one pool, so that a block is as large for every kind of layers: those that see all
tokens, each size of window, those with a state. vLLM makes groups of as many layers as the rarest kind has, or of as
many as the most frequent kind has, if that is less than one and a half times as many. A block has room for a whole
group, the last group of a kind may have fewer layers (v1/core/kv_cache_utils.py,
_get_kv_cache_groups_uniform_page_size: "Add %d padding layers"; before 2026 one and a quarter times). Gemma 3 27B: 10
layers that see all tokens and 52 with a window make 7 groups of 10.

A layer with a state takes one block of each sequence. For it, vLLM gives a block as many tokens as attention keeps in
the bytes of a state, in steps of 16 (model_executor/models/config.py, HybridAttentionMambaModelConfig), so that a
sequence's last block of attention is half empty in the mean. A state is padded to the block: Qwen3-Next's by 1.49 % to
544 tokens, as vLLM logs it.

A draft's layers are among those that are divided: those of a kind that the model has join it, others are a kind of
their own (v1/worker/gpu_model_runner.py, get_kv_cache_spec: all attention layers, the drafter's, too). So the one
prediction layer of Qwen3-Next makes 13 of attention and groups of 13, which have room for 39 states.

Counted over the whole model; pipeline stages get their part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from sim.models.dims import ceil_div
from sim.models.layers import Attention
from sim.models.layers.beside import Beside
from sim.models.layers.compressed import CompressedAttention
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.selective_scan import SelectiveScan
from sim.models.layers.shared_keys import SharedKeysAttention
from sim.models.layers.short_convolution import ShortConvolution
from sim.models.layers.state_space import StateSpace
from sim.models.serving.operators import ServingDims

MUCH_MORE = 1.5  # layers of the most frequent kind ÷ those of the rarest
STEP = 16  # tokens of a block
STATE = "state"


def has_state(a: Attention) -> bool:
    """Tell whether a layer's cache is a state alone."""
    return isinstance(a, StateSpace | SelectiveScan | ShortConvolution)


def parts(a: Attention) -> tuple[Attention, ...]:
    """The layers of vLLM's that one is: two where attention and a state stand beside each other."""
    return (a.attention, a.state_space) if isinstance(a, Beside) else (a,)


class Layers(NamedTuple):
    """So many layers with one attention, of the model or of its draft."""

    dims: ServingDims
    attention: Attention
    number: int


def room_for(layers: Sequence[Layers]) -> dict[Attention, float]:
    """Return for each layer the layers that its groups have room for ÷ those that there are; `layers`: all.

    DeepSeek V4's layers, whose pages vLLM packs in another way, are counted as they are.
    """
    number: Counter[Hashable] = Counter()
    kinds: dict[Attention, Hashable] = {}
    for d, attention, n in layers:
        for a in parts(attention):
            if not isinstance(a, SharedKeysAttention):  # which has no cache
                kinds[a] = _kind(d, a)
                number[kinds[a]] += n
    number = Counter({kind: n for kind, n in number.items() if n})
    windows = {kind[0] if isinstance(kind, tuple) else kind for kind in number}
    if len(windows) <= 1 or any(isinstance(a, CompressedAttention) for _, a, _ in layers):
        return {}
    least, most = min(number.values()), max(number.values())
    size = most if most < least * MUCH_MORE else least
    return {a: ceil_div(number[kind], size) * size / number[kind] for a, kind in kinds.items() if number[kind]}


def _kind(d: ServingDims, a: Attention) -> Hashable:
    """Layers of one kind have one window and as many bytes a token; all with a state are of one."""
    if has_state(a):
        return STATE
    window = a.window if isinstance(a, GroupedQueryAttention) else None
    return window, a.sequence_bytes(d, 1.0)


class StateBlock(NamedTuple):
    """A layer's block that has room for a state: tokens of attention, and bytes."""

    tokens: int
    bytes: float


def state_block(d: ServingDims, attentions: Sequence[Attention]) -> StateBlock | None:
    """The blocks of a model that has attention and layers with a state; None of another."""
    every = [part for a in attentions for part in parts(a)]
    states = [a.sequence_bytes(d, 1.0) for a in every if has_state(a)]
    tokens = [each for a in every if not has_state(a) and (each := a.sequence_bytes(d, 1.0))]
    if not states or not tokens:
        return None
    block = math.ceil(max(states) / max(tokens) / STEP) * STEP
    return StateBlock(block, block * max(tokens))


class CacheGroups(NamedTuple):
    """What layers keep: `room`: of a kind, layers that there is room for ÷ those that there are; `block`: of a model
    with states. Without both, layers keep what they see.

    >>> from sim.inputs.scenario import parse_scenario
    >>> from sim.models.layers import attention_spec
    >>> from sim.serve.prices.dims import serving_dims
    >>> s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100",
    ...     "inference": {"requests": {"prompt_len": 8, "output_len": 8}}})
    >>> CacheGroups().sequence_bytes(serving_dims(s), (attention_spec(s.model),), (32,), 1.0)
    131072.0
    """

    room: Mapping[Attention, float] = MappingProxyType({})
    block: StateBlock | None = None

    def sequence_bytes(
        self, d: ServingDims, attentions: Sequence[Attention], counts: Sequence[int], length: float, states: int = 1
    ) -> float:
        """Cache of so many layers for a sequence: layers with windows drop what lies before, state-space layers keep
        one state. A layer with a state has as many as there are tokens in an iteration
        of which any may be the last that is right (vLLM, MambaSpec: num_speculative_blocks)."""
        found, block = 0.0, self.block
        for attention, n in zip(attentions, counts, strict=True):
            for a in parts(attention):
                if has_state(a):
                    size = states * (a.sequence_bytes(d, length) if block is None else block.bytes)
                else:
                    whole = length if block is None else math.ceil(length / block.tokens) * block.tokens
                    size = a.sequence_bytes(d, whole)
                found += n * self.room.get(a, 1.0) * size
        return found
