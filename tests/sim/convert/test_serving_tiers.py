"""Flags of a cache in host memory in command lines of serving engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.test_serving import BENCH, converted

SGLANG = "python -m sglang.launch_server --model-path llama3-8b --tp 2 --enable-hierarchical-cache"


def tier(size_bytes: int, policy: str) -> dict[str, Any]:
    return {"host": {"capacity_bytes": size_bytes}, "write_policy": policy}


@pytest.mark.parametrize(
    ("server", "tiers", "told"),
    [
        (f"{SGLANG} --hicache-size 30", tier(30_000_000_000, "write_through"), ""),
        (f"{SGLANG} --hicache-size 30 --hicache-write-policy write_back", tier(30_000_000_000, "write_back"), ""),
        (f"{SGLANG} --hicache-ratio 3", None, "--hicache-ratio 3: the cache's size is known once it is simulated"),
        (SGLANG, None, "--hicache-ratio 2: the cache's size is known once it is simulated"),
        ("vllm serve llama3-8b -tp 4 --kv-offloading-size 64", tier(16 * 2**30, "write_through"), ""),
        ("vllm serve llama3-8b --kv-offloading-size 64 --kv-offloading-backend lmcache", None, "of LMCache"),
        ("vllm serve llama3-8b", None, ""),
    ],
)
def test_a_tier_in_host_memory(tmp_path: Path, server: str, tiers: dict[str, Any] | None, told: str) -> None:
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["inference"].get("kv_cache", {}).get("tiers") == tiers
    assert told in text
    assert "not expressed here: --" not in text
    parse_scenario(found)


def test_tensorrt_llm_keeps_what_it_evicts(tmp_path: Path) -> None:
    (tmp_path / "more.yml").write_text("kv_cache_config: {host_cache_size: 45000000000}\n")
    found, text = converted(tmp_path, f"trtllm-serve llama3-8b --config more.yml\n{BENCH}")
    assert found["inference"]["kv_cache"]["tiers"] == tier(45_000_000_000, "write_back")
    assert "not expressed here" not in text
    parse_scenario(found)


@pytest.mark.parametrize(
    ("config", "each"),
    [
        ('{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8e9}}', 2 * 10**9),
        ('{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"num_cpu_blocks": 1000}}', None),
        ('{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}', None),
    ],
)
def test_vllms_own_connector_says_the_bytes_of_all_ranks(tmp_path: Path, config: str, each: int | None) -> None:
    server = f"vllm serve llama3.1-8b --tensor-parallel-size 4 --kv-transfer-config '{config}'"
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    tiers = found["inference"].get("kv_cache", {}).get("tiers")
    wanted = {"host": {"capacity_bytes": each}, "write_policy": "write_through"}
    assert tiers == (None if each is None else wanted)
    assert ("not expressed here: --kv-transfer-config" in text) == (each is None)
