"""How a serving engine's experts get their tokens, by its flags and variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.convert.environment import ALL2ALL, assigned
from sim.convert.settings import Settings, without_none


def by_environment(text: str, product: str) -> dict[str, str]:
    """What vLLM before 0.12 is told by a variable (envs.py: VLLM_ALL2ALL_BACKEND), later by a flag."""
    told = assigned(text).get(ALL2ALL) if product == "vLLM" else None
    return {} if told is None else {"all2all": told}


def by_deepep(s: Settings) -> bool:
    """Whether SGLang's experts get their tokens by DeepEP."""
    return s.values.get("all2all") == "deepep" or s.flag("deepep")


def of_replicas(s: Settings, layout: Mapping[str, int], backends: Mapping[str, str]) -> dict[str, Any]:
    """The backend that a flag names, and what each replica has by itself, where replicas share experts."""
    own = s.choice("all2all", backends, "") if "all2all" in s.values else None
    backend = "deepep" if by_deepep(s) else own
    sent = layout.get("ep", 1) * layout.get("expert_tp", 1) > layout["tp"]
    own_dense = False if str(s.values.get("dense_tp")) == "1" and s.take("dense_tp") else None
    own_head = False if s.flag("own_head") else None
    keys = {"all2all_backend": backend, "dense_over_replicas": own_dense, "head_over_replicas": own_head}
    return without_none(keys) if sent else {}
