"""A row's numbers by what they mean, whatever a table calls them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.core.dtypes import dtype_bytes, normalise_dtype
from sim.core.errors import InputError
from sim.core.json_values import is_number

# The names under which tables give a size; the first that a row has counts.
NAMES: Mapping[str, tuple[str, ...]] = {
    "elements": ("elements", "numel"),
    "tokens": ("M", "BT", "tokens", "rows", "num_tokens"),
    "batch": ("B", "bsz", "batch", "batch_size"),
    "seq_len": ("T", "S", "seq_len", "seqlen", "seqlen_q", "q_len"),
    "kv_len": ("kv_len", "seqlen_k"),
    "width": ("H", "N", "D", "hidden", "hidden_size", "hidden_dim", "dim", "cols"),
    "vocab": ("V", "vocab", "vocab_size"),
    "ffn": ("ffn_local", "intermediate_size", "intermediate_dim", "ffn"),
    "heads": ("heads", "num_heads", "num_q_heads", "nheads"),
    "kv_heads": ("kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "head_size", "headdim"),
    "groups": ("groups", "num_groups"),
    "experts": ("E", "experts", "num_experts"),
    "expert_ffn": ("expert_ffn", "moe_ffn", "ffn"),
    "top_k": ("K", "experts_per_token", "top_k"),
    "tp": ("TP", "tp"),
}


_PASSES = {
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
    "full": "full",
    "both": "full",
    "fwd_bwd": "full",
    "forward_backward": "full",
}


def dtype_of(data: Mapping[str, Any], default: str, key: str = "dtype") -> str:
    """The row's number format in its short name; InputError where there is no such format."""
    found = str(normalise_dtype(data.get(key) or default))
    try:
        dtype_bytes(found)
    except ValueError as error:
        raise InputError(f"{data.get('op')}: {key}: {error}") from None
    return found


def pass_of(data: Mapping[str, Any]) -> str:
    """forward, backward or full (both), forward where the row does not say; InputError where it says another."""
    found = _PASSES.get(str(data.get("pass") or "forward"))
    if found is None:
        said = str(data["pass"])[:40]
        raise InputError(f"{data.get('op')}: pass: found {said!r}; allowed: forward, backward, full")
    return found


class Sizes:
    """A row's numbers by what they mean."""

    def __init__(self, op: str, data: Mapping[str, Any]) -> None:
        shape = data.get("shape")
        given = {**data, **(shape if isinstance(shape, dict) else {})}
        self._op = op
        self._given = {k: v for k, v in given.items() if is_number(v)}

    def __call__(self, what: str, default: float | None = None) -> float:
        """The size, `default` where the row has none; InputError where there is no default either."""
        name = next((name for name in NAMES[what] if name in self._given), None)
        if name is None and default is None:
            allowed = f"a number under one of {', '.join(NAMES[what])}"
            raise InputError(f"{self._op}: {what}: not given; allowed: {allowed}")
        found = default if name is None else self._given[name]
        assert found is not None
        if not 0 < found < math.inf:
            raise InputError(f"{self._op}: {name}: found {found}; allowed: a number above 0")
        return float(found)

    def has(self, what: str) -> bool:
        return any(name in self._given for name in NAMES[what])

    @property
    def tokens(self) -> float:
        """Rows of the tensor: given as such, or sequences times their length."""
        return self("tokens") if self.has("tokens") else self("batch", 1.0) * self("seq_len")

    @property
    def plane(self) -> float:
        """Elements of a tensor of rows: given as such, or rows times their width."""
        return self("elements") if self.has("elements") else self.tokens * self("width")

    def rows_of(self, *widths: str) -> float:
        """Elements of rows as wide as the first of `widths` that is given says."""
        return self.tokens * self(next((w for w in widths if self.has(w)), widths[0]))

    @property
    def rotated(self) -> float:
        """Elements that rope rotates: queries, as wide as all their heads, and keys, of fewer heads."""
        if not self.has("heads"):
            return self.plane
        heads = self("heads")
        width = self("width") if self.has("width") else heads * self("head_dim")
        return self.tokens * width * (1 + self("kv_heads", heads) / heads)
