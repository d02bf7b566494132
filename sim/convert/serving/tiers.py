"""A cache's tiers in host memory in command lines of serving engines.

SGLang: server_args.py (--enable-hierarchical-cache), mem_cache/memory_pool_host.py (hicache_size: of each rank, 1e9
bytes). vLLM since 0.12: config/cache.py (kv_offloading_size: GiB of all tensor-parallel ranks together), which copies
blocks as they are computed (v1/kv_offload). TensorRT-LLM: llmapi/llm_args.py, KvCacheConfig.host_cache_size (bytes).
"""

from __future__ import annotations

import json
from typing import Any

from sim.convert.settings import Settings

GIB = 2**30
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
LMCACHE = "LMCache"  # its connectors, whose sizes LMCache's own file or environment says
POLICIES = {"write_back": "write_back", "write_through": "write_through", "write_through_selective": "write_through"}
KEY = "inference.kv_cache.tiers.host.capacity_bytes"


def tiers_of(s: Settings) -> dict[str, Any] | None:
    """`inference.kv_cache.tiers`; None where the cache is on GPUs alone, or, with a note, where its size is unknown."""
    if (size := s.number("host_bytes")) is not None:  # TensorRT-LLM's, which keeps what it evicts
        return _tier(size, "write_back") if size else None
    if (gib := s.number("host_gib")) is not None:
        if str(s.take("host_backend", "native")) != "native":
            s.notes.append(f"{s.written_as('host_gib')}: of LMCache: not expressed here")
            return None
        return _tier(gib * GIB / s.size("tp", 1), "write_through")
    if (size := _by_connector(s)) is not None:
        return _tier(size / s.size("tp", 1), "write_through")
    if not s.flag("hierarchical"):
        return None
    policy = s.choice("host_policy", POLICIES, "write_through")
    ratio, gigabytes = s.number("host_ratio"), s.number("host_gb")
    if not gigabytes:
        s.notes.append(f"--hicache-ratio {ratio or 2:g}: the cache's size is known once it is simulated; {KEY} says it")
        return None
    return _tier(gigabytes * 1e9, policy or "write_through")


def _by_connector(s: Settings) -> float | None:
    """Bytes of all ranks that vLLM's own connector is told, which `--kv-offloading-size` stands for (0.33,
    config/vllm.py, _post_init_kv_transfer_config; v1/kv_offload/cpu/spec.py)."""
    try:
        config = json.loads(str(s.values.get("transfer")))
    except ValueError:
        return None
    name = str(config.get("kv_connector")) if isinstance(config, dict) else ""
    if name not in CONNECTORS and not name.startswith(LMCACHE):
        return None
    more = config.get("kv_connector_extra_config") if name in CONNECTORS else None
    size = more.get("cpu_bytes_to_use") if isinstance(more, dict) else None
    if not isinstance(size, int | float) or size <= 0:
        s.notes.append(f"kv_connector {name}: how much it keeps of the cache is not known here; {KEY} says it")
        return None
    s.taken.add("transfer")
    return float(size)


def _tier(size_bytes: float, policy: str) -> dict[str, Any]:
    return {"host": {"capacity_bytes": round(size_bytes)}, "write_policy": policy}
