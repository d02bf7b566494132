"""Scenarios in one line, and sums over programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from sim.core.program import Comm, Compute, Item, ModelPart, Phase, Saved
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import Shard, dims
from sim.models.layer import layer_block, layer_parts
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


def unmasked(scenario: Scenario) -> Scenario:
    """The scenario with a kernel that repeats no keys and gets no mask, in fp32 too, where a user cannot name one."""
    training = scenario.for_training.model_copy(update={"attention_kernel": "flash2"})
    return replace(scenario, training=training)


def flops(items: Iterable[Item], kinds: tuple[str, ...] = ("gemm",), phase: Phase | None = None) -> float:
    return sum(i.flops for i in items if isinstance(i, Compute) and i.kind in kinds and phase in (None, i.phase))


def comms(items: Iterable[Item], group: str) -> Counter[str]:
    return Counter(i.kind for i in items if isinstance(i, Comm) and i.group == group)


def comm_bytes(items: Iterable[Item], group: str, kind: str = "") -> float:
    return sum(i.bytes for i in items if isinstance(i, Comm) and i.group == group and kind in ("", i.kind))


def saved_bytes(saved: Iterable[Saved]) -> float:
    return sum(s.bytes for s in saved)


def saved_by_part(scenario: Scenario, layer: int = 0) -> dict[ModelPart, float]:
    """What a layer's operators keep without recomputation, by the part of the model whose work they are."""
    out: dict[ModelPart, float] = {}
    for operator in layer_parts(scenario, dims(scenario), layer, Shard()):
        (part,) = {i.part for i in (*operator.forward, *operator.backward) if isinstance(i, Compute)}
        out[part] = out.get(part, 0.0) + saved_bytes(operator.saved)
    assert sum(out.values()) == saved_bytes(layer_block(scenario, layer).saved)
    return out


def named(program: Any, name: str) -> list[Any]:
    """The items with this name."""
    return [i for i in program if getattr(i, "name", "") == name]
