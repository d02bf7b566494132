"""Megatron-LM's arguments of experts' buffers of a fixed size, and of the pages in which what they keep waits."""

from __future__ import annotations

from sim.convert.settings import Settings
from sim.inputs.rules.megatron_keys import RANK_CAPACITY, STASH

PAGED, HOST_PAGES, PAGE = (f"moe-paged-stash{rest}" for rest in ("", "-buffer-size-factor-cpu", "-page-size"))


def static_buffers(s: Settings, fused: bool) -> dict[str, float]:
    """The keys of both, which HybridEP and `fused` experts have (core/transformer/transformer_config.py; pages have a
    factor of 1.1 by default, below 0 of the numbers that came first). Pages in host memory and their size change
    nothing here."""
    capacity, pages = (name.replace("_", "-") for name in (RANK_CAPACITY, STASH))
    library = s.values.get("moe-token-dispatcher-type") == "flex"
    library = library and s.values.get("moe-flex-dispatcher-backend") in ("hybridep", "ncclep")
    if not (fused and library and s.integer("expert-model-parallel-size", 1) > 1) or s.values.get(capacity) is None:
        return {}
    s.taken |= {HOST_PAGES, PAGE, pages}
    found = {RANK_CAPACITY: s.number(capacity, 1.0) or 1.0}
    return found | ({STASH: abs(s.number(pages, 1.1) or 1.1)} if s.flag(PAGED) else {})
