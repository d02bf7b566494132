"""Finds the step to capture: a Hugging Face config, or a function of a package."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrate.capture.compiled.regions import code_compiled
from calibrate.capture.failure import failure
from calibrate.capture.gpu.autocast import autocast_noted
from calibrate.capture.huggingface.step import huggingface_maker
from calibrate.capture.options import Options
from calibrate.capture.step import Step
from calibrate.capture.step_checks import checked_step
from sim.core.errors import InputError
from sim.core.files import MAX_JSON_BYTES, read_text
from sim.core.json_text import parse_json
from sim.inputs.input_source import show

NAMED = "config.json"  # as errors of a config name it whose file is not known


def maker(what: str, options: Options) -> Callable[[], Step]:
    """Return the function that makes the step."""
    path = Path(what)
    if path.is_dir() or what.endswith(".json"):
        return _of_config(path / "config.json" if path.is_dir() else path, options)
    module, found, name = what.partition(":")
    if not found or not name:
        other = f"; write --script {what} --world-size N for a training script" if what.endswith(".py") else ""
        raise InputError(f"WHAT: found {what!r}; allowed: a config.json, its folder, or package.module:function{other}")
    return function_maker(module, name)


def _of_config(file: Path, options: Options) -> Callable[[], Step]:
    """Return the maker of a config file; its errors name this file."""

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except InputError as error:
            said = str(error)
            raise InputError(f"{file}{said.removeprefix(NAMED)}" if said.startswith(NAMED) else said) from None

    with named():
        make = huggingface_maker(_config_of(file), options)

    def make_named() -> Step:
        with named():
            return make()

    return make_named


def function_maker(module: str, name: str) -> Callable[[], Step]:
    """Return a maker that calls the function `name` of a module; modules in the current folder are found too."""
    sys.path.insert(0, os.getcwd())
    try:
        with code_compiled(), autocast_noted():
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
    if not isinstance(data, dict):
        raise InputError(f"{path}: found {show(data)}; a Hugging Face config.json is a mapping")
    if not isinstance(data.get("model_type"), str):
        raise InputError(f"{path}: model_type: is missing; a Hugging Face config.json has one")
    return data
