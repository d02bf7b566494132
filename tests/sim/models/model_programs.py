"""Scenarios in one line, and sums over programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from sim.core.program import Comm, Compute, Item, Phase, Saved
from sim.inputs.scenario import Scenario, parse_scenario
from tests.sim.cases import llama_like

GPT = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 51200}
LLAMA = llama_like(layers=4, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=32000)
MOE = LLAMA | {"moe": {"experts": 16, "top_k": 2, "ffn": 512}}
TOKENS = 1024  # of a micro-batch


def make(model: Any = GPT, training: dict[str, Any] | None = None, **parallelism: Any) -> Scenario:
    p = {"dp": 1, **parallelism}
    t = {"seq_len": 512, "micro_batch_size": 2, "precision": "bf16"} | (training or {})
    t.setdefault("global_batch_size", t["micro_batch_size"] * p["dp"])
    data = {"version": 1, "name": "test", "cluster": "dgx-h100", "calibration": "roofline"}
    return parse_scenario({**data, "model": model, "training": t, "parallelism": p})


def flops(items: Iterable[Item], kinds: tuple[str, ...] = ("gemm",), phase: Phase | None = None) -> float:
    return sum(i.flops for i in items if isinstance(i, Compute) and i.kind in kinds and phase in (None, i.phase))


def comms(items: Iterable[Item], group: str) -> Counter[str]:
    return Counter(i.kind for i in items if isinstance(i, Comm) and i.group == group)


def comm_bytes(items: Iterable[Item], group: str, kind: str = "") -> float:
    return sum(i.bytes for i in items if isinstance(i, Comm) and i.group == group and kind in ("", i.kind))


def saved_bytes(saved: Iterable[Saved], part: str = "") -> float:
    return sum(s.bytes for s in saved if part in ("", s.part))


def named(program: Any, name: str) -> list[Any]:
    """The items with this name."""
    return [i for i in program if getattr(i, "name", "") == name]
