"""Read the parts of a serving iteration that were measured on a real engine.

They are blocks `serve MODEL | PART a=… b=…` (phase forward) of a profile, which `calibrate.serving.measure` writes.
`rest`, by tokens: everything except the attention cores and the head, all layers together. `head`, by tokens whose
logits are wanted: final norm and output matrix (in older profiles a part of `rest`). `prefill`, by chunk and tokens
before it, and `decode`, by sequences and cache length: the attention core of one layer. `check4`: as `decode`, where
each sequence has four tokens, of which three are drafted. `engine`: the time between two forwards. Between measured
sizes seconds are interpolated: log-linear in two dimensions, linear in tokens.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.prices.profile import Profile

PARTS = ("rest", "prefill", "decode", "engine")
_KEY = re.compile(r"(\w+) a=(\d+) b=(\d+)")
Points = dict[tuple[int, int], float]


def model_key(m: ModelConfig, tp: int = 1) -> str:
    """Return a name with every size that determines the measured engine's computation on `tp` ranks."""
    e = m.moe
    experts = "" if e is None else f" experts={e.top_k}/{e.experts}+{e.shared_experts} of {e.ffn} from {e.dense_layers}"
    experts += "" if e is None or e.latent is None else f" latent={e.latent}"
    # The name has every size that changes a kernel's shape, so the profile of another model is never used.
    return (
        f"serve layers={m.layers} hidden={m.hidden} heads={m.heads} kv_heads={m.kv_heads} head_dim={m.head_dim} "
        f"ffn={m.ffn} vocab={m.vocab} mlp={m.mlp} norm={m.norm}{experts}" + (f" tp={tp}" if tp > 1 else "")
    )


def part_key(m: ModelConfig, part: str, a: int, b: int = 0, tp: int = 1) -> str:
    """Return the name of one measured part in a profile."""
    return f"{model_key(m, tp)} | {part} a={a} b={b}"


def check_part(queries: int) -> str:
    """Return the name of the attention core of sequences with `queries` tokens each, drafted tokens included."""
    return f"check{queries}"


class MeasuredParts(Struct, frozen=True):
    """Hold seconds by part and sizes."""

    points: dict[str, Points]

    def rest(self, tokens: int) -> float:
        """Return the seconds of embedding and all layers for `tokens` tokens, without the attention cores."""
        return self._by_tokens("rest", tokens)

    def head(self, samples: int) -> float:
        """Return the seconds of the head for `samples` tokens; 0 if they are a part of `rest`."""
        return self._by_tokens("head", samples) if "head" in self.points else 0.0

    def _by_tokens(self, part: str, tokens: int) -> float:
        known = sorted((a, s) for (a, _), s in self.points[part].items())
        # Beyond the largest size time grows with tokens; `np.interp` would stay constant.
        if tokens > known[-1][0]:
            return known[-1][1] * tokens / known[-1][0]
        sizes, seconds = zip(*known, strict=True)
        return float(np.interp(tokens, sizes, seconds))

    def core(self, part: str, a: int, b: int) -> float:
        """Return the seconds of one layer's attention core: `prefill` (chunk, seen) or `decode` (sequences, cache)."""
        points = self.points[part]
        if part == "prefill":  # measured as (chunk, what came before it)
            b -= a
        rows = sorted({x for x, _ in points})
        columns = sorted({y for _, y in points})
        # [a, b]: the measured sizes form a full grid.
        table = np.log([[points[x, y] for y in columns] for x in rows])
        # b may be 0 (no tokens before this chunk), so 1 is added before the logarithm.
        along_b = [np.interp(math.log2(b + 1), np.log2(np.array(columns) + 1.0), row) for row in table]
        inside = float(np.exp(np.interp(math.log2(a), np.log2(rows), along_b)))
        # Beyond the grid the work is proportional to both sizes; interpolation would stay at the grid's edge.
        return inside * max(1.0, a / rows[-1]) * max(1.0, (b + 1) / (columns[-1] + 1))

    def check(self, sequences: int, kv: int, queries: int) -> float:
        """Return the seconds of one layer's attention core where drafted tokens are checked: `queries` tokens of each
        sequence. Where that was not measured, sequences attend one by one, as prompts do."""
        part = check_part(queries)
        if part in self.points:
            return self.core(part, sequences, kv)
        return self.core("prefill", queries, max(kv, queries)) * sequences

    @property
    def engine(self) -> float:
        """Return the seconds between two forwards."""
        return next(iter(self.points["engine"].values()), 0.0)


def measured_parts(profile: Profile, m: ModelConfig, tp: int = 1) -> MeasuredParts | None:
    """Return the profile's parts for this model on `tp` ranks; None if one is missing."""
    found: dict[str, Points] = {}
    start = f"{model_key(m, tp)} | "
    for block in profile.blocks:
        match = _KEY.fullmatch(block.key.removeprefix(start)) if block.key.startswith(start) else None
        if match is not None:
            found.setdefault(match[1], {})[int(match[2]), int(match[3])] = block.seconds
    # With a missing part an iteration would be half measured and half modelled.
    return MeasuredParts(found) if all(part in found for part in PARTS) else None
