"""Rows of elementwise, norm, loss and embedding kernels: bytes moved and launches, by who wrote the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.predict import NotSimulated
from sim.program import Compute


def fused_kernel(op: str, data: Mapping[str, Any]) -> list[Compute]:
    """The kernels that a row of `op` by its provider launches in its pass (forward, backward, full)."""
    raise NotSimulated(f"no operator {op!r}")
