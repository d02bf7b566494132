"""The records that a serving scenario names: its engine, by name or from a file, and how tokens get to experts.

A file has a running engine's host seconds, as `python -m calibrate.serving` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sim.core.files import read_json
from sim.inputs.input_source import OneOf, Source, UserInput, as_tuple, found_file, show, validate
from sim.inputs.model_config import ModelConfig
from sim.inputs.yaml_input import KeyPath
from sim.variants.all2all import BACKENDS, All2All
from sim.variants.engines import ENGINE_FILES, ENGINES
from sim.variants.engines.admission import RouterName
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.names import record_note
from sim.variants.engines.record import Engine

if TYPE_CHECKING:
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.workloads import Inference

FORMAT: Literal["engine/1"] = "engine/1"

Seconds = Annotated[float, Field(ge=0, le=1e6)]


class HostSeconds(UserInput):
    """`HostTimes` as a file has them; what is left out takes no time."""

    iteration_s: Seconds = 0.0
    rank_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    message_s: Seconds = 0.0
    message_sequence_s: Seconds = 0.0
    prompt_s: Seconds = 0.0
    oversize_s: Seconds = 0.0
    launch_s: Seconds = 0.0
    collective_s: Seconds = 0.0
    request_s: Seconds = 0.0
    prompt_token_s: Seconds = 0.0
    outputs_s: Seconds = 0.0
    output_s: Seconds = 0.0
    piece_s: Seconds = 0.0
    text_outputs_s: Seconds = 0.0
    text_output_s: Seconds = 0.0
    logprobs_s: Seconds = 0.0
    logprob_s: Seconds = 0.0
    logprob_piece_s: Seconds = 0.0
    mask_s: Seconds = 0.0
    accept_s: Seconds = 0.0
    uncertainty: Seconds = 0.0


class Served(UserInput):
    """What an engine served when it was measured; `model` in words, because a name may stand for several."""

    model: str = Field(min_length=1, max_length=4096)
    gpu: str = Field(min_length=1, max_length=4096)
    tp: int = Field(ge=1, le=1_000_000)
    quantization: str = Field(min_length=1, max_length=4096)


class EngineFile(UserInput):
    """A measured engine. `engine`: the record that says all but the host's seconds; `served`: None in files of before
    it was written; `measured`: the loads that the seconds were fitted to and judged on, which nothing reads."""

    format: Literal["engine/1"]
    engine: Annotated[str, OneOf(ENGINES)]
    host: HostSeconds
    source: str = Field(min_length=1, max_length=4096)
    date: str = Field(min_length=4, max_length=40, description="year, month and day of the measurement")
    served: Served | None = None
    measured: Annotated[tuple[Any, ...], BeforeValidator(as_tuple)] = ()


def engine_of(name: str) -> Engine:
    """The record that `inference.engine` names: one of `ENGINES`, or that of a file.

    Raises:
        InputError: for a file that cannot be read or is no such file.
    """
    return ENGINES.get(name) or _read(name)


def found_engine(name: str, source: Source, path: KeyPath) -> str:
    """The name, or the path of the file that a key names.

    Raises:
        InputError: where there is none, or as `engine_of`.
    """
    if name in ENGINES:
        return name
    file = found_file(name, source, path)
    engine_of(file)
    return file


def record_notes(data: Mapping[str, Any]) -> Iterator[str]:
    """Return which records the engines that a scenario names by product and version are taken for."""
    rl = data.get("rl") or {}
    for key, section in (("inference", data.get("inference")), ("rl.generation", rl.get("generation"))):
        name = section.get("engine") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name not in ENGINES and not name.endswith(ENGINE_FILES):
            yield f"{key}.engine: {record_note(name)}"


def all2all_of(inference: Inference) -> All2All:
    """The backend that a scenario names, or its engine's own. Experts on GPUs of their own are sent what they need."""
    engine = engine_of(inference.engine)
    own = next((name for name in engine.all2all if BACKENDS[name].beside), "") if inference.afd is not None else ""
    return BACKENDS[inference.all2all_backend or own or engine.all2all[0]]


def router_of(inference: Inference, layout: Parallelism) -> RouterName:
    """Which replica gets a request: as a scenario says, or as its engine does. In front of pools stands a proxy, which
    sends requests in turn (vLLM, tests/v1/kv_connector/nixl_integration/toy_proxy_server.py)."""
    if inference.router is not None:
        return inference.router
    if inference.disaggregated is not None:
        return "round_robin"
    own = engine_of(inference.engine).routers
    return own.sharing if layout.sharing_replicas > 1 else own.apart


def served_now(model: ModelConfig, gpu: str, tp: int, quantization: str) -> Served:
    """What a scenario serves, as a file says it."""
    experts = "" if model.moe is None else f", {model.moe.experts} experts"
    words = f"{model.layers} layers of width {model.hidden:,}{experts}, vocabulary of {model.vocab:,}"
    return Served(model=words, gpu=gpu, tp=tp, quantization=quantization)


def measured_otherwise(name: str, now: Served) -> str:
    """A sentence about an engine's file that was measured with something else than what is served now; "" if not."""
    then = None if name in ENGINES else _file(name).served
    if then is None or then == now:
        return ""
    unlike = [key for key in Served.model_fields if getattr(then, key) != getattr(now, key)]
    was, now_is = ([f"{key} {getattr(x, key)}" for key in unlike] for x in (then, now))
    return f"measured with {', '.join(was)}; its host seconds may be others with {', '.join(now_is)}"


@cache
def _read(name: str) -> Engine:
    file = _file(name)
    times = {"measured": HostTimes(**file.host.model_dump())}
    return replace(ENGINES[file.engine], name=name, date=file.date, source=file.source, host=times)


@cache
def _file(name: str) -> EngineFile:
    data = read_json(Path(name))
    source = Source(name, data if isinstance(data, dict) else {})
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise source.error(("format",), f"found {show(found)}; must be '{FORMAT}', as calibrate.serving writes it")
    return validate(EngineFile, data, source, ())
