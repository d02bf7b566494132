"""Parts of a serving iteration that were measured on a real engine, as a profile keeps them.

Blocks named `serve MODEL | PART a=… b=…` (phase forward): `rest` by tokens, everything but the attention cores, all
layers together; `prefill` by chunk and tokens before it, and `decode` by sequences and cache length, the core
of one layer; `engine`, what lies between two forwards. `calibrate.serving.measure` writes them; between measured sizes
seconds are interpolated, log-linear in two dimensions, linear in tokens.
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


def model_key(m: ModelConfig) -> str:
    """Name all that fixes the measured engine's computation."""
    e = m.moe
    experts = "" if e is None else f" experts={e.top_k}/{e.experts}+{e.shared_experts} of {e.ffn} from {e.dense_layers}"
    # Every size that changes a kernel's shape is in the name, so no other model's profile is taken for it.
    return (
        f"serve layers={m.layers} hidden={m.hidden} heads={m.heads} kv_heads={m.kv_heads} head_dim={m.head_dim} "
        f"ffn={m.ffn} vocab={m.vocab} mlp={m.mlp} norm={m.norm}{experts}"
    )


def part_key(m: ModelConfig, part: str, a: int, b: int = 0) -> str:
    """The name of one measured part in a profile."""
    return f"{model_key(m)} | {part} a={a} b={b}"


class MeasuredParts(Struct, frozen=True):
    """Seconds by part and sizes."""

    points: dict[str, Points]

    def rest(self, tokens: int) -> float:
        """All layers, embedding and head for so many tokens, attention cores apart."""
        known = sorted((a, s) for (a, _), s in self.points["rest"].items())
        # Beyond the largest size flops bind and time grows with tokens, where `np.interp` would stay flat.
        if tokens > known[-1][0]:
            return known[-1][1] * tokens / known[-1][0]
        sizes, seconds = zip(*known, strict=True)
        return float(np.interp(tokens, sizes, seconds))

    def core(self, part: str, a: int, b: int) -> float:
        """One layer's attention core: `prefill` (chunk, seen) or `decode` (sequences, cache length)."""
        points = self.points[part]
        if part == "prefill":  # measured as (chunk, what came before it)
            b -= a
        rows = sorted({x for x, _ in points})
        columns = sorted({y for _, y in points})
        # [a, b]: the measured sizes form a full grid.
        table = np.log([[points[x, y] for y in columns] for x in rows])
        # b may be 0 (nothing was seen before this chunk), so 1 is added before the logarithm.
        along_b = [np.interp(math.log2(b + 1), np.log2(np.array(columns) + 1.0), row) for row in table]
        inside = float(np.exp(np.interp(math.log2(a), np.log2(rows), along_b)))
        # Beyond the grid the work is proportional to both sizes, and interpolation alone would stay at the grid's edge.
        return inside * max(1.0, a / rows[-1]) * max(1.0, (b + 1) / (columns[-1] + 1))

    @property
    def engine(self) -> float:
        """Seconds between two forwards."""
        return next(iter(self.points["engine"].values()), 0.0)


def measured_parts(profile: Profile, m: ModelConfig) -> MeasuredParts | None:
    """The parts that `profile` holds for this model, or None where one is missing."""
    found: dict[str, Points] = {}
    start = f"{model_key(m)} | "
    for block in profile.blocks:
        match = _KEY.fullmatch(block.key.removeprefix(start)) if block.key.startswith(start) else None
        if match is not None:
            found.setdefault(match[1], {})[int(match[2]), int(match[3])] = block.seconds
    # One missing part would leave an iteration half measured and half modelled, and its error unknown.
    return MeasuredParts(found) if all(part in found for part in PARTS) else None
