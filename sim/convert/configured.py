"""A launch command that names a configuration file and overrides keys of it, whoever's trainer it starts.

`torchrun -m torchtitan.train --job.config_file x.toml --training.seq_len 4096` and `CONFIG_FILE=x.toml ./run_train.sh`
(torchtitan/config/manager.py: tyro's flags), `tune run … --config x.yaml key=value` (torchtune/config/_parse.py),
Hydra's and OmegaConf's `key.inner=value`, `+key=value` and `~key` (NeMo, NeMo RL, LLM Foundry, Megatron-Bridge).
"""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from sim.convert.scripts.command_line import flags_of
from sim.convert.scripts.named_files import found_file
from sim.convert.scripts.script_data import Script
from sim.convert.settings import lacking
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

SUFFIXES = (".toml", ".yaml", ".yml")
BY_VARIABLE = "CONFIG_FILE"  # of torchtitan's run_train.sh
OVERRIDE = re.compile(r"(?:\+{0,2}|--)([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
DOTTED = re.compile(r"--([A-Za-z_]\w*(?:\.[\w-]+)+)")
DELETED = re.compile(r"~([A-Za-z_][\w.]*)")
OF_LAUNCHER = ("--config_file", "--deepspeed", "--hostfile")  # Accelerate's and DeepSpeed's, of processes and sharding
STARTED = (("nproc-per-node", "nnodes"), ("num-processes", ""), ("num-gpus", "num-nodes"))


class Configured(Struct, frozen=True):
    """A file that a command names, its keys with those of the command in their places, and the GPUs it starts on."""

    file: Path
    text: str
    data: dict[str, Any]
    gpus: int | None


def configured(file: Path, script: Script) -> Configured | None:
    """What the one command says that names a configuration which is beside the script or written by it.

    Raises:
        InputError: where commands name different ones, or override a key in a way that is not known.
    """
    found: dict[tuple[str, ...], Configured] = {}
    for command in script.commands:
        words = list(command.words)
        named = [word.rpartition("=")[2] for before, word in pairwise(["", *words]) if before not in OF_LAUNCHER]
        if given := command.environment.get(BY_VARIABLE):
            script.asked.add(BY_VARIABLE)
            named.insert(0, given)
        for name in (name for name in named if name.endswith(SUFFIXES)):
            text, path = script.files.get(Path(name).name), found_file(file, name)
            if text is None and path is not None:
                text = read_text(path, MAX_BYTES)
            if text is not None:
                data = _parsed(path or Path(name), text)
                _override(file, data, words, name)
                found[command.words] = Configured(path or Path(name), text, data, _gpus(words, script))
                break
    if len(found) > 1:
        raise InputError(f"{file}: {len(found)} commands start with a configuration: keep the one that is meant")
    return next(iter(found.values()), None)


def _parsed(file: Path, text: str) -> dict[str, Any]:
    if file.suffix != ".toml":
        data: Any = parse_yaml(text, str(file))[0]
        return data if isinstance(data, dict) else {}
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from None


def _override(file: Path, data: dict[str, Any], words: list[str], name: str) -> None:
    """Put the command's keys into those of the file."""
    for word, after in pairwise([*words, "--"]):
        if word.endswith(name) or (found := OVERRIDE.fullmatch(word) or DOTTED.fullmatch(word)) is None:
            if (gone := DELETED.fullmatch(word)) is not None:
                _put(file, data, gone[1], None, deletes=True)
            continue
        key = found[1].replace("-", "_") if word.startswith("--") else found[1]
        if word.startswith("--") and "." not in key:
            continue  # a launcher's
        value = found[2] if "=" in word else after
        if "=" not in word and after.startswith("--"):  # tyro's switch, `--compile.enable` or `--compile.no-enable`
            section, _, last = key.rpartition(".")
            off = last.startswith("no_")
            _put(file, data, f"{section}.{last.removeprefix('no_')}", not off)
            continue
        if value != name:
            if problem := lacking(value):
                raise InputError(f"{file}: {key}: found {show(value)}{problem}")
            _put(file, data, key, parse_yaml(value, key)[0] if value else "")


def _put(file: Path, data: dict[str, Any], key: str, value: Any, deletes: bool = False) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = data.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InputError(f"{file}: {key}: overrides a key of {section}, which holds {show(inner)}")
        data = inner
    if deletes:
        data.pop(last, None)
    else:
        data[last] = value


def _gpus(words: list[str], script: Script) -> int | None:
    flags = flags_of(words)
    for each, nodes in STARTED:
        count, many = str(flags.get(each, "")), str(flags.get(nodes, "1"))
        if count.isdecimal():
            return int(count) * int(many) if many.isdecimal() else None
    own = script.variable("NGPU") or ""  # of torchtitan's run_train.sh
    return int(own) if own.isdecimal() else None
