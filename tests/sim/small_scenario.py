"""A scenario with few keys."""

from __future__ import annotations

from typing import Any

from sim.inputs.overrides import merge

SMALL = """\
model: llama3-8b
training:
  seq_len: 4096
  global_batch_size: 64
cluster: dgx-h100
"""


def small(**sections: Any) -> dict[str, Any]:
    base = {
        "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1000},
        "training": {"seq_len": 128, "global_batch_size": 32},
        "cluster": "dgx-h100",
    }
    merged: dict[str, Any] = merge(base, sections)
    return merged
