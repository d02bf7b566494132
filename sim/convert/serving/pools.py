"""Several servers of one script: the nodes of one, or servers that compute prompts and others that add tokens.

SGLang: `--disaggregation-mode` (srt/server_args.py). vLLM: `kv_role` of `--kv-transfer-config` (config/kv_transfer.py).
TensorRT-LLM: `--server_role`, or the URLs in the YAML of `trtllm-serve disaggregated` (tensorrt_llm/commands/serve.py,
llmapi/disagg_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.scripts.command_line import ENDS, flags_of
from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Settings, without_none
from sim.core.errors import InputError

ROLES = ("prefill", "decode")
MAIN = "decode"  # whose settings are both pools' where no key is a pool's own
OF_PREFILL = ("max_batch_tokens", "chunked_prefill", "prefix_cache")
KV_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
WORKERS = {"prefill": "is-prefill-worker", "decode": "is-decode-worker"}  # flags of Dynamo's vLLM
SERVER_ROLES = {"context": "prefill", "generation": "decode"}  # TensorRT-LLM's words, in either case
URLS = {"prefill": "context_servers", "decode": "generation_servers"}  # sections of its orchestrator's YAML
CONDITIONAL = "conditional_disagg_config"
BOTH = "kv_both"  # either; the proxy says which (docs/features/nixl_connector_usage.md)
PORTS = {  # flags of proxies (vLLM's toy_proxy_server.py and router; SGLang's router) before ports, or URLs with them
    "prefill": ("--prefiller-ports", "--prefiller-port", "--prefill"),
    "decode": ("--decoder-ports", "--decoder-port", "--decode"),
}
FURTHER = ("node-rank", "data-parallel-start-rank", "data-parallel-rank")


def is_further_node(s: Settings) -> bool:
    """Tell whether a command starts ranks of a server that another command starts, too."""
    return "headless" in s.values or any(str(s.values.get(name, "0")).strip() not in ("0", "True") for name in FURTHER)


def name_roles(servers: list[Settings], words: list[str], script: Script) -> None:
    """Set the roles that Dynamo's flags give, or a proxy among the file's `words`, or TensorRT-LLM's orchestrator,
    whose YAML the script may write. Beside a server that computes prompts, one without a flag adds tokens
    (components/src/dynamo/vllm/main.py)."""
    _by_proxy([s for s in servers if _kv_role(s) == BOTH], words)
    for s in servers:
        if (role := SERVER_ROLES.get(str(s.values.get("role")).lower())) is not None:
            s.values = {**s.values, "role": role}
    config = _orchestrator(servers[0].file, words, script)
    _by_urls([s for s in servers if "role" not in s.values], config)
    for s in servers if CONDITIONAL in config else ():
        s.notes.append(f"{CONDITIONAL}: prefill servers compute every prompt here, short ones too")
    flags = [next((role for role, flag in WORKERS.items() if s.flag(flag)), None) for s in servers]
    if "prefill" in flags:
        for s, role in zip(servers, flags, strict=True):
            s.values = {"role": role or MAIN, **s.values}


def role_of(s: Settings) -> str | None:
    """What the server does alone; None for one that does both."""
    if (mode := s.values.get("role")) in ROLES:
        s.taken.add("role")
        return str(mode)
    role = KV_ROLES.get(_kv_role(s))
    s.taken |= {"transfer"} if role else set()
    return role


def _kv_role(s: Settings) -> str:
    """What `--kv-transfer-config` says of a server; empty where it says nothing."""
    try:
        config = json.loads(str(s.values.get("transfer")))
    except ValueError:
        return ""
    return str(config.get("kv_role", "")) if isinstance(config, dict) else ""


def _by_proxy(servers: list[Settings], words: list[str]) -> None:
    """Set the roles of servers that may have either, by the ports that a proxy's command gives to each role."""
    ports = {role: _behind(words, flags) for role, flags in PORTS.items()}
    found = [[role for role in ROLES if str(s.values.get("port", 8000)) in ports[role]] for s in servers]
    if all(len(roles) == 1 for roles in found) and {role for (role,) in found} == {*ROLES}:
        for s, (role,) in zip(servers, found, strict=True):
            s.values = {"role": role, **s.values}
            s.taken.add("transfer")
    elif len(servers) > 1:
        flags = ", ".join([names[0] for names in PORTS.values()])
        for s in servers:
            s.notes.append(f"kv_role {BOTH}: a proxy's command ({flags}) says which servers compute prompts")


def _orchestrator(file: Path, words: list[str], script: Script) -> Mapping[str, Any]:
    """The YAML of `trtllm-serve disaggregated`; empty where the file has no such command."""
    for i, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] == "trtllm-serve" and words[i + 1] == "disaggregated":
            ends = next((k for k in range(i, len(words)) if words[k] in ENDS), len(words))
            flags = flags_of(words[i + 2 : ends], short=True)
            name = next((flags[flag] for flag in ("c", "config-file", "config") if flag in flags), None)
            return {} if name is None else named_mapping(file, script, str(name)) or {}
    return {}


def _by_urls(servers: list[Settings], config: Mapping[str, Any]) -> None:
    """Set the roles of servers by the ports of the URLs that an orchestrator sends prompts to, or computed ones."""
    found = {role: config.get(section) for role, section in URLS.items()}
    urls = {role: one.get("urls", []) if isinstance(one, dict) else [] for role, one in found.items()}
    ports = {role: {str(url).rstrip("/").rpartition(":")[2] for url in listed} for role, listed in urls.items()}
    for s in servers:
        roles = [role for role in ROLES if str(s.values.get("port", 8000)) in ports[role]]
        if len(roles) == 1:
            s.values = {"role": roles[0], **s.values}


def _behind(words: list[str], flags: tuple[str, ...]) -> set[str]:
    """Ports behind flags, each of which may have several values."""
    found: set[str] = set()
    named = False
    for word in words:
        name, _, value = word.partition("=")
        if word.startswith("-") or word in ENDS:
            named = name in flags
            word = value
        if named and word:
            found.add(word.rstrip("/").rpartition(":")[2])
    return found


def alone(roles: set[str]) -> str:
    """What to say of servers of one role only."""
    role = roles.pop()
    other = ROLES[1 - ROLES.index(role)]
    return f"starts {role} servers alone; can be simulated: with {other} servers, whose command goes into the same file"


def disaggregated(s: Settings, servers: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Keys of `inference` for both pools, from each server's role, layout and other settings.

    Raises:
        InputError: for servers of a pool that differ, or that have layouts which a pool cannot have.
    """
    found: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        own = [(one, of_one.get("kv_cache", {})) for name, one, of_one in servers if name == role]
        sizes = [_size(s, role, one) | _memory(cache) for one, cache in own]
        if any(size != sizes[0] for size in sizes):
            raise InputError(f"{s.file}: {role} servers: found different ones; can be simulated: servers alike")
        found[role] = {**sizes[0], "replicas": sizes[0]["replicas"] * len(sizes)}
    prefill, decode = (next(of_one for name, _, of_one in servers if name == role) for role in ROLES)
    return {**_merged(s, prefill, decode), "disaggregated": found}


def _size(s: Settings, role: str, layout: dict[str, Any]) -> dict[str, Any]:
    for key in ("pp", "cp"):
        if layout.get(key, 1) > 1:
            raise InputError(
                f"{s.file}: {role} servers: found {key} {layout[key]}; can be simulated: {key} 1 in a pool"
            )
    split = layout.get("expert_tp")
    shared = split if split is not None and split * layout.get("ep", 1) > layout["tp"] and split > 1 else None
    return without_none({"replicas": layout["dp"], "tp": layout["tp"], "ep": layout.get("ep"), "expert_tp": shared})


def _memory(cache: dict[str, Any]) -> dict[str, Any]:
    return without_none({"memory_fraction": cache.get("memory_fraction")})


def _merged(s: Settings, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """The settings of both; those that differ are of the pool that they matter to."""
    merged: dict[str, Any] = {}
    of_both = [_shared(prefill), _shared(decode)]
    for key in dict.fromkeys(key for one in of_both for key in one):
        values = [one.get(key) for one in of_both]
        whose = ROLES[0] if key in OF_PREFILL else MAIN
        merged[key] = values[ROLES.index(whose)]
        if values[0] != values[1]:
            s.notes.append(f"inference.{key}: prefill and decode servers differ; that of {whose} servers is simulated")
    return without_none(merged)


def _shared(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what a pool has of its own."""
    cache = {key: value for key, value in settings.get("kv_cache", {}).items() if key != "memory_fraction"}
    return {
        **{key: value for key, value in settings.items() if key != "kv_cache"},
        **({"kv_cache": cache} if cache else {}),
    }
