"""The vLLM that writes the answers of TRL's GRPO: beside the trainer on its GPUs, or as a server on others.

trl/generation/vllm_generation.py and trl/scripts/vllm_serve.py of TRL 1.16; utils/schemas/vllm.py of Axolotl 0.19. The
versions of vLLM are those of TRL's extra `vllm`. Beside the trainer the engine gets 4,096 tokens an iteration and as
many requests as its ranks write at once, and sleeps at level 2 if at all (before 0.25 at 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.convert.settings import Settings
from sim.convert.verl import EAGER
from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.model_input import resolve_model

OF_RELEASE = "engine {}: of {}, the newest that {} allows; for another release write rl.generation.engine"
MODES = ("colocate", "server")
MOST_TOKENS = 4096
SIZES = ("tensor_parallel_size", "data_parallel_size")
SHARE = "gpu_memory_utilization"
NO_SERVER = (
    "vllm_mode server: no command of the server is in the file, so one engine on one GPU is simulated, as by default; "
    "rl.generation.tp and rl.generation.replicas say otherwise"
)
BESIDE = "vllm_mode server: its GPUs come beside those that train, which --gpus counts"
QUANTIZED = "load_in_4bit: the engine's weights are simulated in 16 bits"
# Of addresses, logs, tokenizers, and what is read elsewhere.
HARMLESS = re.compile(
    r"host|port|device|log_level|trust_remote_code|revision|model|uvicorn\w*|logprobs_mode|weight_transfer\w*|"
    r"served_model_name|serve_module|worker_extension_cls|enable_reasoning|reasoning_parser|disable_log\w*"
)


class Release(NamedTuple):
    """What a release has by default and does. `answer`: tokens of an answer at most, None without a limit; `share`:
    of the GPU's memory for the engine beside the trainer; `vllm`, `engine`: the newest that it allows, and its record
    here; `tiled`: log-probabilities come from tiles of logits; `own`: Axolotl, whose sizes of the engine stand in its
    section `vllm`; `swift`: ms-swift, whose engine has vLLM's tokens an iteration; `each`: answers to
    a prompt; `beta`: of the reference."""

    name: str
    mode: str
    answer: int | None
    share: float
    vllm: str
    engine: str
    tiled: bool = False
    own: bool = False
    swift: bool = False
    each: int = 8
    beta: float = 0.0


NEWEST = Release("TRL 1.16", "colocate", 512, 0.3, "vLLM 0.31.0", "vllm-0.31", tiled=True)
UNTIL_027 = Release("TRL 0.27", "server", 256, 0.3, "vLLM 0.12.0", "vllm-0.11")
OF_AXOLOTL = Release("TRL 1.9 of Axolotl 0.19", "server", None, 0.9, "vLLM 0.25.1", "vllm-0.21", own=True)
OF_MS_SWIFT = Release("ms-swift 4.6", "colocate", 512, 0.9, "vLLM 0.23.0", "vllm-0.21", swift=True, beta=0.04)


class Answers(NamedTuple):
    """Sizes of a step: `prompts` with `each` answers; `at_once`: answers that a process writes at once; `accumulated`:
    micro-batches of an update, and `steps`, those of a generation."""

    prompts: int
    each: int
    at_once: int
    accumulated: int
    steps: int


def shares_gpus(s: Settings, release: Release) -> bool:
    """Tell whether engine and trainer take turns on the same GPUs.

    Raises:
        InputError: for another word than TRL's two.
    """
    word = str(s.take("vllm_mode", release.mode))
    if word not in MODES:
        raise InputError(f"{s.place('vllm_mode')}: found {show(word)}; must be one of {', '.join(MODES)}")
    return word == MODES[0]


def engine_of(
    s: Settings, server: Settings, shares: bool, answers: Answers, sections: Mapping[str, Any], release: Release
) -> dict[str, Any]:
    """The engine's keys. `server`: the settings of the server's own command, or Axolotl's section."""
    s.notes.append(OF_RELEASE.format(release.engine, release.vllm, release.name))
    s.notes += [QUANTIZED] if "weights" in sections["training"].get("lora", {}) else []
    server.taken |= {name for name in server.values if HARMLESS.fullmatch(name)}
    s.take("vllm_model_impl") if s.values.get("vllm_model_impl") == "vllm" else None
    for of in (server, s):
        if of.flag("enforce_eager"):
            s.notes.append(EAGER.format(of.written_as("enforce_eager")))
    found = _colocated(s, server, answers, sections, release) if shares else _of_server(s, server)
    kept = server.flag("enable_prefix_caching", s.flag("vllm_enable_prefix_caching", default=True))
    return {
        "engine": release.engine,
        **found,
        **_by_model(sections["model"], found["tp"], s),
        **({} if kept else {"prefix_cache": "none"}),
        "sampling": _drawn(s),
    }


def _colocated(
    s: Settings, server: Settings, answers: Answers, sections: Mapping[str, Any], release: Release
) -> dict[str, Any]:
    layout = sections["parallelism"]
    ranks = layout["dp"] * layout.get("tp", 1) * layout.get("cp", 1)
    of, (tensor, memory) = (server, (SIZES[0], SHARE)) if release.own else (s, (f"vllm_{SIZES[0]}", f"vllm_{SHARE}"))
    tp = of.size(tensor, 1)
    if ranks % tp:
        raise InputError(f"{of.place(tensor)}: found {tp}; must divide the {ranks} ranks that train")
    return {
        "tp": tp,
        "max_running_requests": s.whole("vllm_max_num_seqs") or answers.at_once * tp,
        **({} if release.swift else {"max_batch_tokens": MOST_TOKENS}),
        "kv_cache": {"memory_fraction": of.number(memory, release.share)},
    }


def _of_server(s: Settings, server: Settings) -> dict[str, Any]:
    s.notes += [BESIDE] if server.values else [BESIDE, NO_SERVER]
    s.taken |= {f"vllm_{SIZES[0]}", f"vllm_{SHARE}"}  # of an engine beside the trainer alone
    tp, replicas = (server.size(name, 1) for name in SIZES)
    share = server.number(SHARE)
    most = {"max_running_requests": "max_num_seqs", "max_batch_tokens": "max_num_batched_tokens"}
    limits = {key: server.whole(name) for key, name in most.items()}
    cache = {"memory_fraction": share} if share is not None else {}
    if server.choice("kv_cache_dtype", {"auto": "", "fp8": "fp8", "fp8_e4m3": "fp8"}, "auto"):
        cache["dtype"] = "fp8"  # type: ignore[assignment]
    server.choice("dtype", dict.fromkeys(("auto", "bfloat16", "float16"), ""), "auto")
    return {
        "replicas": replicas,
        "tp": tp,
        **{key: value for key, value in limits.items() if value is not None},
        **({"kv_cache": cache} if cache else {}),
    }


def _by_model(model: str | dict[str, Any], tp: int, s: Settings) -> dict[str, Any]:
    """Experts are split as all else; no prefix of a state-space layer is kept."""
    found = resolve_model(model, Source(str(s.file), {}), ("model",))
    return {
        **({"expert_tp": tp} if found.moe is not None and tp > 1 else {}),
        **({"prefix_cache": "none"} if found.state_space is not None else {}),
    }


def _drawn(s: Settings) -> dict[str, Any]:
    """How tokens are chosen; each comes with its log-probability (`logprobs=0`, since TRL 0.23)."""
    top_k, penalty = s.integer("top_k", 0), s.number("repetition_penalty", 1.0)
    return {
        "temperature": s.number("temperature", 1.0),
        "top_p": s.number("top_p", 1.0),
        **({"top_k": top_k} if top_k > 0 else {}),
        **({"repetition_penalty": penalty} if penalty != 1.0 else {}),
        "logprobs": 0,
    }
