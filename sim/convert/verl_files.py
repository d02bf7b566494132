"""verl's configs as YAML: a whole one, as Hydra saves it or a user writes it, and one that a command names.

What a section says of a feature that it switches off (`enable: false`) decides nothing. A file of a user's own inherits
verl's (`defaults: [ppo_trainer, _self_]`), whose values are those that the reader takes for what is not said.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from sim.convert.interpolations import filled
from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import flat

ROOT = "actor_rollout_ref"
DEFAULTS, TARGET, REQUIRED = "defaults", "_target_", "???"
NOT_OF_A_STEP = (DEFAULTS, "hydra", "global_profiler", "ray_kwargs")
SWITCHES = ("enable", "enabled")
OWN = "ppo_"  # verl's own configs are called so
NOT_THERE = "{}: the config {} is not there, so what it says is not read: put it beside the script"
_DEFAULT_VALUES = Path(__file__).with_name("verl_defaults.yaml")


def is_verl_config(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of verl's reinforcement learning."""
    return isinstance(data.get(ROOT), dict)


def settings_of(file: Path, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config's settings by their whole names, each as a command would write it, and the configs it inherits.

    Raises:
        InputError: for interpolations without an end.
    """
    named = data.get(DEFAULTS) or []
    inherited = [str(name) for name in (named if isinstance(named, list) else [named])]
    whole = filled(file, {key: value for key, value in data.items() if key not in NOT_OF_A_STEP})
    found = {key: _as_word(value) for key, value in flat(_switched_on(whole)).items()}
    return {key: value for key, value in found.items() if value != REQUIRED}, inherited


def named_config(file: Path, script: Script, name: str) -> tuple[dict[str, Any], list[str], str]:
    """As `settings_of`, of the config that a command in the script names, and a note where it is not there."""
    data = named_mapping(file, script, f"{name.removesuffix('.yaml')}.yaml")
    if data is None:
        return {}, [name], "" if name.startswith(OWN) else NOT_THERE.format(file, name)
    return *settings_of(file, data), ""


def option_of(words: list[str], option: str) -> str:
    """The value of a command's option, behind it or behind an equals sign; empty without it."""
    behind = (after for word, after in pairwise([*words, ""]) if word == option)
    joined = (value for name, _, value in (word.partition("=") for word in words) if name == option)
    return next((word.strip("'\"") for word in (*behind, *joined)), "")


def typed_word(value: str) -> Any:
    """A command's word as a switch, a null or a text."""
    words = {"true": True, "false": False, "null": None, "none": None}
    plain = value.strip("'\"")
    return words.get(plain.lower(), plain)


def as_usual(file: Path, values: Mapping[str, Any]) -> set[str]:
    """The names of settings that say what verl does anyhow."""
    root: dict[str, Any] = {}
    for name in sorted(values, key=len):  # `critic=megatron_critic`, Hydra's choice of a section, before what is in it
        *sections, last = name.split(".")
        inner = root
        for section in sections:
            if not isinstance(inner.setdefault(section, {}), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = values[name]
    usual = flat(filled(file, msgspec.yaml.decode(_DEFAULT_VALUES.read_bytes(), type=dict[str, Any]), root))
    return {name for name, value in usual.items() if name in values and values[name] == _as_word(value)}


def _switched_on(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without sections that are switched off, and without the names of verl's classes."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            off = any(value.get(switch) is False for switch in SWITCHES)
            found |= {} if off else {key: _switched_on(value)}
        elif key != TARGET:
            found[key] = value
    return found


def _as_word(value: Any) -> Any:
    """A value as a command's, which has switches, nulls and texts."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return value if value is None or isinstance(value, bool) else str(value)
