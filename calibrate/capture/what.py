"""Finds the step to capture: a Hugging Face config, a function of a package, or a row of a table."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from calibrate.capture.failure import failure
from calibrate.capture.huggingface_step import huggingface_maker
from calibrate.capture.options import Options
from calibrate.capture.step import Step
from calibrate.capture.step_checks import checked_step
from sim.core.errors import InputError
from sim.core.files import MAX_JSON_BYTES, read_text
from sim.core.json_text import parse_json


def maker(what: str, options: Options) -> Callable[[], Step]:
    """Return the function that makes the step."""
    path = Path(what)
    if path.is_dir() or what.endswith(".json"):
        return huggingface_maker(_config_of(path / "config.json" if path.is_dir() else path), options)
    module, found, name = what.partition(":")
    if not found or not name:
        raise InputError(f"WHAT: found {what!r}; allowed: a config.json, its folder, or package.module:function")
    return function_maker(module, name)


def function_maker(module: str, name: str) -> Callable[[], Step]:
    """Return a maker that calls the function `name` of a module; modules in the current folder are found too."""
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise InputError(f"WHAT: found {module}:{name}; {error} in {os.getcwd()} or among installed ones") from None
        raise failure(error, module) from None
    except Exception as error:
        raise failure(error, module) from None
    finally:
        sys.path.pop(0)
    function = getattr(found, name, None)
    if not callable(function):
        raise InputError(f"WHAT: found {module}:{name}; the module has no {name} that can be called")

    def make() -> Step:
        return checked_step(function(), f"{module}:{name}")

    return make


def _config_of(path: Path) -> dict[str, Any]:
    data = parse_json(
        read_text(path, MAX_JSON_BYTES), str(path), finite=False
    )  # a state-space model's config may hold Infinity
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError(f"{path}: model_type: is missing; a Hugging Face config.json has one")
    return data


def options_of_row(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Options]:
    """Return the config and options of a table's row with the key `program`."""
    program, training = row["program"], row["scenario"].get("training", {})
    if program.get("torch_compile") and program.get("gradient_checkpointing"):
        raise InputError(f"{where}: program.torch_compile: found true; cannot be captured with gradient_checkpointing")
    text = str(program.get("optimizer") or "adamw").lower()
    name = "sgd" if "sgd" in text else "adamw" if "fused=true" in text or text == "adamw" else "adamw_foreach"
    return program["huggingface_config"], Options(
        seq_len=int(training["seq_len"]),
        micro_batch_size=int(training.get("micro_batch_size", 1)),
        weights=program.get("weights") or "fp32",
        autocast=program.get("autocast"),
        attention=program.get("attn_implementation"),
        gradient_checkpointing=bool(program.get("gradient_checkpointing")),
        optimizer=name,
        lora_rank=program.get("lora_rank"),
        clip_grad_norm=program.get("clip_grad_norm"),
        compiled=bool(program.get("torch_compile")),
    )
