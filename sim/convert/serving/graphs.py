"""Flags of CUDA graphs and of the cache's size in command lines of serving engines.

vLLM: engine/arg_utils.py, config/compilation.py, config/cache.py. SGLang: server_args.py, since 0.5.16
model_executor/cuda_graph_config.py (--cuda-graph-config). TensorRT-LLM: llmapi/llm_args.py, CudaGraphConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sim.convert.serving.options import most_tokens
from sim.convert.settings import Settings, without_none
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

# Flags that give an object, also key by key, with their short names
OBJECTS = {name: name for name in ("speculative-config", "kv-transfer-config", "eplb-config")}
OBJECTS["sc"] = "speculative-config"
BLOCK_TOKENS = 16  # of vLLM's blocks, where nothing else is said (config/cache.py, DEFAULT_BLOCK_SIZE)


def graphs_of(s: Settings, without: bool) -> dict[str, Any]:
    """Keys of `inference` about CUDA graphs; `without`: other flags leave none."""
    compiled = dict(json_object(s, "compilation", "compilation-config"))
    decode = dict(json_object(s, "graph_config", "cuda-graph-config").get("decode") or {})
    asked = {
        "max": [compiled.pop("max_cudagraph_capture_size", None), decode.pop("max_bs", None), s.take("graphs_to")],
        "all": [compiled.pop("cudagraph_capture_sizes", None), decode.pop("bs", None), s.take("graph_sizes")],
    }
    largest = next((_sizes(s, "graphs_to", one)[-1] for one in asked["max"] if one is not None), None)
    sizes = next((_sizes(s, "graph_sizes", one) for one in asked["all"] if one is not None), None)
    if (former := s.take("former_sizes")) is not None:  # vLLM to 0.10: one number is the largest (config/scheduler.py)
        found = _sizes(s, "former_sizes", former)
        largest, sizes = (found[0], None) if len(found) == 1 else (None, found)
    unoptimized = s.choice("optimization", dict.fromkeys("123", False) | {"0": True}, "3")  # 0: no CUDA graphs
    if str(s.values.get("optimization")) == "1" and not s.flag("eager"):  # config/vllm.py, OPTIMIZATION_LEVEL_01
        s.notes.append("-O1: graphs of all but attention alone, and no fused all-reduces: not expressed here")
    none = [s.flag("eager"), unoptimized, without, _compiled_bare(s, compiled), decode.pop("backend", "") == "disabled"]
    s.notes += [f"--cuda-graph-config: decode: {', '.join(decode)}: not expressed here"] if decode else []
    if any(none) or largest == 0:
        return {"cuda_graphs": False}
    if sizes is not None:  # the largest of them is the other number, or the engine does not start
        largest = None
    return without_none({"cuda_graph_max_size": largest, "cuda_graph_sizes": sizes})


def cache_tokens(s: Settings, model: str, block: int | None) -> int | None:
    """Tokens of the cache that somebody asks for. vLLM's number is of blocks of `block` tokens, of which layers of
    several kinds take one each (v1/core/kv_cache_utils.py, pool_bytes_per_block), and latent attention's have other
    sizes: such a number is left out, and told."""
    tokens, blocks = s.whole("cache_tokens"), s.whole("cache_blocks")
    if blocks is None:
        return tokens
    if not _plain(model, block):
        s.notes.append(f"{s.written_as('cache_blocks')}: blocks of this model are not expressed here")
        return None
    return blocks * (block or BLOCK_TOKENS)


def cache_bytes(s: Settings) -> int | None:
    """vLLM's bytes of the cache on each GPU, which may end in a letter (engine/arg_utils.py, human_readable_int)."""
    given = s.take("cache_bytes")
    return None if given is None else most_tokens(str(given)) or s.size("cache_bytes")


def _plain(model: str, block: int | None) -> bool:
    try:
        m = load_model(model)
    except InputError:  # which the scenario's own check says
        return True
    return m.state_space is None and len(set(m.attention_pattern)) <= 1 and (m.mla is None or block is not None)


def _sizes(s: Settings, name: str, given: Any) -> list[int]:
    """Numbers of a flag, separated by spaces, or of a list in JSON, with or without commas.

    Raises:
        InputError: for something else.
    """
    words = given if isinstance(given, list) else str(given).strip("[] ").replace(",", " ").split()
    try:
        found = sorted({int(str(word)) for word in words})
    except ValueError:
        found = []
    if not found:
        raise InputError(f"{s.file}: {s.written_as(name)}: found {show(given)}; must be whole numbers")
    return found


def _compiled_bare(s: Settings, config: dict[str, Any]) -> bool:
    """Whether vLLM's --compilation-config switches CUDA graphs off (config/compilation.py: CUDAGraphMode.NONE); what
    else the `config` says is left out, and told."""
    mode = config.pop("cudagraph_mode", s.take("graph_mode"))
    s.notes += [f"--compilation-config: {', '.join(config)}: not expressed here"] if config else []
    if mode is not None and str(mode).upper() not in ("NONE", "0", "FULL_AND_PIECEWISE"):
        s.notes.append(
            f"--compilation-config: cudagraph_mode {mode}: not expressed here, the engine's default is taken"
        )
    return str(mode).upper() in ("NONE", "0") and mode is not None


def with_objects(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, those of an object's keys (`--speculative-config.method mtp`) joined to the object; it replaces one
    that a flag gives whole (vLLM 0.33, utils/argparse_utils.py, FlexibleArgumentParser.parse_args).

    >>> with_objects({"speculative-config.method": "mtp", "speculative-config.num-speculative-tokens": "3", "port": 1})
    {'port': 1, 'speculative-config': '{"method": "mtp", "num_speculative_tokens": 3}'}
    """
    parts = {flag: OBJECTS[head] for flag in flags if (head := flag.partition(".")[0]) in OBJECTS and "." in flag}
    found = {flag: value for flag, value in flags.items() if flag not in parts}
    for name in dict.fromkeys(parts.values()):
        own = {flag.partition(".")[2]: flags[flag] for flag, whole in parts.items() if whole == name}
        found[name] = json.dumps({key.replace("-", "_"): _read(value) for key, value in own.items()})
    return found


def _read(value: Any) -> Any:
    """A value of an object's key, which is JSON or a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def json_object(s: Settings, name: str, flag: str) -> dict[str, Any]:
    """A flag's value that is a JSON object; empty where it is not given."""
    given = s.take(name)
    if given is None:
        return {}
    try:
        config = json.loads(str(given))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{s.file}: --{flag}: found {show(given)}; must be a JSON object")
    return config
