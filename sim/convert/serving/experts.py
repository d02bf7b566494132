"""What variables say of a serving engine's layout, and how its experts get their tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sim.convert.scripts.environment import ALL2ALL
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Settings, without_none
from sim.core.errors import InputError

# Layers of each pipeline stage, `24,40` (vllm/distributed/utils.py and sglang/srt/distributed/utils.py: get_pp_indices)
STAGES = {"vLLM": "VLLM_PP_LAYER_PARTITION", "SGLang": "SGLANG_PP_LAYER_PARTITION"}
COUNTS = re.compile(r"\d+(?:,\d+)*")


def by_environment(s: Settings, script: Script, product: str) -> dict[str, str]:
    """What the engine is told by variables; the all-to-all of vLLM before 0.12 (envs.py), by a flag in later ones.
    Notes call such a setting by its variable."""
    names = {"all2all": ALL2ALL if product == "vLLM" else "", "stages": STAGES.get(product, "")}
    told = {
        key: value for key, name in names.items() if name and key not in s.values and (value := script.variable(name))
    }
    s.written = {**s.written, **{key: f"{names[key]}={value}" for key, value in told.items()}}
    return told


def stages_of(s: Settings, pp: int) -> list[int] | None:
    """The layers of each stage that a variable says; None where it says none.

    Raises:
        InputError: for what is no list of as many whole numbers as there are stages, which the engine refuses.
    """
    given = s.take("stages")
    if given is None or pp == 1:
        return None
    counts = [int(n) for n in str(given).split(",")] if COUNTS.fullmatch(str(given)) else []
    if len(counts) != pp:
        names = " or ".join(STAGES.values())
        raise InputError(f"{s.file}: {names}: found {given}; must be {pp} whole numbers, one for each pipeline stage")
    return counts


def by_deepep(s: Settings) -> bool:
    """Whether SGLang's experts get their tokens by DeepEP."""
    return s.values.get("all2all") == "deepep" or s.flag("deepep")


def sends_tokens(layout: Mapping[str, int]) -> bool:
    """Whether replicas share experts."""
    return layout.get("ep", 1) * layout.get("expert_tp", 1) > layout["tp"]


def of_replicas(s: Settings, layout: Mapping[str, int], backends: Mapping[str, str]) -> dict[str, Any]:
    """The backend that a flag names, and what each replica has by itself, where replicas share experts."""
    own = s.choice("all2all", backends, "") if "all2all" in s.values else None
    backend = "deepep" if by_deepep(s) else own
    sent = sends_tokens(layout)
    own_dense = False if str(s.values.get("dense_tp")) == "1" and s.take("dense_tp") else None
    own_head = False if s.flag("own_head") else None
    keys = {"all2all_backend": backend, "dense_over_replicas": own_dense, "head_over_replicas": own_head}
    return without_none(keys) if sent else {}
