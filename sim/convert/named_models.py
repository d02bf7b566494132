"""The model that a trainer's or a server's file names: a shipped one, a Hub id, or a folder that is called like one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim.convert.settings import lacking
from sim.core.errors import InputError
from sim.inputs.hub import as_model, config_of, is_id, shipped_models, what_to_write
from sim.inputs.input_source import Source, file_named, show
from sim.inputs.model_input import MODEL_FILE, load_model, model_presets

IN_CACHE = re.compile(r"models--([^/]+?)--([^/]+)(?:/snapshots/.*)?$")  # of the Hub's cache
VARIANT = re.compile(r"(?i)-(instruct|base|chat|it|hf|pt)$")  # checkpoints of one architecture
OF_TOKENIZER = re.compile(r"/(tokenizer\.(model|json)|tokenizer)$")
BY_NAME = "model: {} is read as {}, by its name; --model says otherwise"
OF_REWARD = "reward model {}: not known here, so a rule gives the rewards; --set rl.reward.model=NAME names another"
UNKNOWN = "is no model that is known here, by its last part either, and no folder with a config.json"


def named_model(file: Path, place: str, named: str, notes: list[str]) -> str:
    """The scenario's `model` for a name, with a note where another's name decides it. `place`: what messages begin
    with.

    Raises:
        InputError: where nothing describes it.
    """
    if named in model_presets() or (is_id(named) and config_of(named) is not None):
        return as_model(named)
    if file_named(named, Source(str(file), {}), MODEL_FILE) is not None:
        return named
    if (found := known_by_name(named)) is not None:
        notes.append(BY_NAME.format(named, found.removeprefix("hf://")))
        return found
    last = lacking(named.rstrip("/").rpartition("/")[2])  # a variable before it would say no more
    problem = what_to_write(named, model_presets()) if is_id(named) else last.removeprefix(", ") or UNKNOWN
    raise InputError(f"{place}: found {show(named)}; {problem}; or give --model NAME or --model FOLDER/config.json")


def named_reward(named: str, notes: list[str]) -> dict[str, Any]:
    """The section `reward` of `rl` for a reward model's name; nothing, with a note, where it is not known here."""
    known = known_by_name(named)
    if known is None:
        notes.append(OF_REWARD.format(named[:100]))
        return {}
    return {"reward": {"model": known}}


def with_prediction(model: str, layers: int) -> str | dict[str, Any]:
    """The model with so many modules of multi-token prediction, for trainers that train as many as they are told and
    not those of the checkpoint."""
    return model if load_model(model).mtp_layers == layers else {"preset": model, "mtp_layers": layers}


def known_by_name(named: str) -> str | None:
    """The model that the last part of a path or id names, be it in other hands or a variant of a shipped one.

    >>> known_by_name("/models/Meta-Llama-3-8B"), known_by_name("$HOME/hub/models--Qwen--Qwen3-8B/snapshots/1a2b")
    ('llama3-8b', 'hf://Qwen/Qwen3-8B')
    >>> known_by_name("/models/ours")
    """
    path = named.strip("\"' ").rstrip("/")
    if (cached := IN_CACHE.search(path)) and config_of(f"{cached[1]}/{cached[2]}") is not None:
        return as_model(f"{cached[1]}/{cached[2]}")
    *_, owner, last = ["", *OF_TOKENIZER.sub("", path).split("/")]
    if config_of(f"{owner}/{last}") is not None:
        return as_model(f"{owner}/{last}")
    for name in (last.lower(), VARIANT.sub("", last.lower())):
        found = {model for one, model in shipped_models().items() if one.partition("/")[2] == name}
        found |= {name} & {*model_presets()}
        if len(found) == 1:
            return found.pop()
    return None
