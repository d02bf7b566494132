"""Transformers' `TrainingArguments` on a command line: `torchrun`, `deepspeed` or `accelerate launch` with a script.

Accelerate's config file, where the command names one, says processes and FSDP or DeepSpeed
(`sim.convert.trainer_arguments.accelerate`). A recipe that it names, too, has the arguments
(huggingface/alignment-handbook: `scripts/sft.py --config recipe.yaml`; LLaMA-Factory: `src/train.py recipe.yaml`,
`llamafactory-cli train recipe.yaml`; `axolotl train recipe.yaml`); those of the command go first.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

from sim.convert.megatron.swift import processes_of
from sim.convert.scripts.command_line import ENDS, SWITCHES, flags_of, require_one, words_of, words_that
from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.trainer_arguments.accelerate import of_accelerate, with_flags
from sim.convert.trainer_arguments.llama_factory import DEFAULTS
from sim.convert.trainer_arguments.objectives import OF_SCRIPT, script_objective
from sim.convert.trainer_arguments.preferences import TRL_LENGTH
from sim.convert.trainer_arguments.scenario import LENGTHS, is_training_arguments
from sim.convert.trainer_arguments.trl import ACCELERATE_CONFIGS, OF_TRL
from sim.core.errors import InputError

MARK = "per_device_train_batch_size"  # which nearly every command sets
LAUNCHER = "accelerate"
CONFIG = "--config_file"  # Accelerate's
# Commands that take a file of arguments: LLaMA-Factory's, whose further words are `key=value` or flags
# (llamafactory/hparams/parser.py: `read_args`), and Axolotl's, which has a flag for each key (axolotl/cli/utils).
FACTORY = ("llamafactory-cli", "lmf")
RUNNERS = {
    **dict.fromkeys((*FACTORY, "axolotl"), ("train",)),
    "trl": ("sft", "dpo", "orpo", "reward", "kto", "grpo", "rloo"),  # trl/cli: `--config recipe.yaml`
}
MODULE = "axolotl.cli.train"  # of `accelerate launch -m`
OF_OTHERS = (CONFIG, "--deepspeed", "--fsdp_config", "--fsdp-config")  # flags whose file is no recipe
OVERRIDE = re.compile(r"([a-z]\w*)=(.*)")
DATA = (".yaml", ".yml", ".json")
# Arguments of launchers, none of which the training script sees.
LAUNCHERS = (
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "rdzv_backend"),
    *("rdzv_endpoint", "rdzv_id", "num_processes", "num_machines", "machine_rank", "main_process_ip"),
    *("main_process_port", "config_file", "num_gpus", "num_nodes", "hostfile", "include", OF_TRL),
)
SERVER = "vllm"  # a key of ours: what a script starts the server of answers with, by Axolotl's name of the section
SERVES = ("vllm-serve", "vllm_serve", "vllm_serve.py", "trl.scripts.vllm_serve")  # of TRL and Axolotl
SERVING = (("vllm", "serve"), ("swift", "rollout"))
PROCESSES = (("num_processes", None), ("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"))


def is_launched(script: Script) -> bool:
    """Tell whether a text is a command with Transformers' arguments, all of which TRL's own command may leave out."""
    words = words_of(script)
    return any(word.partition("=")[0].replace("-", "_") == f"__{MARK}" for word in words) or _is_trl(words)


def _trains(file: Path, script: Script, words: list[str]) -> bool:
    """Tell whether a command has Transformers' arguments, or names a file of them."""
    own = MARK.replace("_", "-") in flags_of(words) or has_runner(words)
    return own or bool(_recipes(file, script, words))


def _is_trl(words: list[str]) -> bool:
    return any(_runs(word, after, "trl") for word, after in pairwise(words))


def _runs(word: str, after: str, *names: str) -> bool:
    """Tell whether two words begin a command of `RUNNERS`, or of these `names` among them."""
    program = word.rpartition("/")[2]
    return after in RUNNERS.get(program, ()) and program in (names or RUNNERS)


def runs_recipe(file: Path, script: Script) -> bool:
    """Tell whether a command names a file of Transformers' arguments: one of `RUNNERS`, or of `accelerate launch` with
    its own config, or any with a file that has them."""
    words = words_of(script)
    asked = has_runner(words) or (LAUNCHER in script.started and CONFIG in script.started)
    return any(asked or MARK in recipe for recipe in _recipes(file, script, words).values())


def has_runner(words: list[str]) -> bool:
    """Tell whether a command that trains by a file of arguments is among the words."""
    return MODULE in words or any(_runs(word, after) for word, after in pairwise(words))


def _recipes(file: Path, script: Script, words: list[str]) -> dict[str, dict[str, Any]]:
    """The files of Transformers' arguments that a script's commands name, by name."""
    named = (word for before, word in pairwise(["", *words]) if {before, word.partition("=")[0]}.isdisjoint(OF_OTHERS))
    names = [word.rpartition("=")[2] for word in named]
    found = {name: named_mapping(file, script, name) for name in names if name.endswith(DATA)}
    return {name: data for name, data in found.items() if data is not None and is_training_arguments(data)}


def launched_arguments(file: Path, script: Script) -> tuple[dict[str, Any], int | None]:
    """The arguments as `TrainingArguments` in a file has them, and the number of processes if the command says it.

    Raises:
        InputError: for a config file of Accelerate that is not there, and a script that trains for something else than
            next tokens.
    """
    words, server = without_server(words_of(script))
    words = words_that(words, lambda command: _trains(file, script, command))
    objective = script_objective(file, words)
    require_one(file, words, MARK.replace("_", "-"))
    flags = {name.replace("-", "_"): typed(value) for name, value in flags_of(words).items()}
    flags |= _overrides(words) if has_runner(words) else {}
    if isinstance(flags.get("deepspeed_config"), str) and flags.get("deepspeed", True) is True:
        flags["deepspeed"] = flags.pop("deepspeed_config")  # of `deepspeed.add_config_arguments`
    if flags.get("deepspeed") is True:
        flags |= _deepspeed_chat(flags)
    config = accelerate_config(file, script, flags)
    recipe = _of_recipe(file, script, words, flags)
    if not recipe and MARK not in flags and not _is_trl(words):
        raise InputError(f"{file}: --{MARK} stands in the file, but in no command that could be read")
    data = of_accelerate(file, config) | recipe
    data |= {name: value for name, value in flags.items() if name not in LAUNCHERS}
    if any(_runs(word, after, *FACTORY) for word, after in pairwise(words)):
        data = DEFAULTS | data
    if _is_trl(words) and not any(data.get(name) for name in LENGTHS):
        data["max_length"] = TRL_LENGTH
    data |= {} if objective is None else {OF_SCRIPT: objective}
    data |= {SERVER: server} if server else {}
    for key in ("deepspeed", "fsdp_config"):
        name = data.get(key)
        if isinstance(name, str) and name[:1] != "{" and (named := named_mapping(file, script, name)) is not None:
            data[key] = named
    processes = config.get("num_processes")
    for each, nodes in PROCESSES:
        if type(count := flags.get(each)) is int:
            many = flags.get(nodes, 1) if nodes else 1
            processes = count * many if type(many) is int else None
            break
    processes = _included(words) or processes or (processes_of(script) if has_runner(words) else None)
    return data, processes if type(processes) is int else None


def without_server(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without commands of the server that writes a policy's answers, and what the flags of these say."""
    commands = [list(group) for _, group in groupby(words, lambda word: word in ENDS)]
    serves = [
        any(word.rpartition("/")[2] in SERVES for word in command) or any(pair in SERVING for pair in pairwise(command))
        for command in commands
    ]
    theirs = [word for command, serving in zip(commands, serves, strict=True) for word in command if serving]
    others = [word for command, serving in zip(commands, serves, strict=True) for word in command if not serving]
    return others, {name.replace("-", "_"): typed(value) for name, value in flags_of(theirs).items()}


def _included(words: list[str]) -> int:
    """The GPUs that DeepSpeed's launcher is told by number (`--include localhost:0,1@other:2`); 0 where it is not."""
    flat = (part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word]))
    given = next((word for before, word in pairwise(flat) if before in ("-i", "--include")), "")
    hosts = [host.partition(":")[2] for host in given.strip("\"'").split("@")]
    return sum(len(host.split(",")) for host in hosts) if all(hosts) else 0


def _of_recipe(file: Path, script: Script, words: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the recipe that a command without any of its own names; its name is taken out of `flags`."""
    by_runner = has_runner(words)
    recipes = _recipes(file, script, words)
    if not by_runner and (LAUNCHER not in script.started or MARK in flags):
        recipes = {name: data for name, data in recipes.items() if name == flags.get("config")}
    if len(recipes) > 1:
        raise InputError(f"{file}: names {len(recipes)} recipes ({', '.join(recipes)}): keep the one that runs")
    for name, arguments in recipes.items():
        if flags.get("config") == name:
            del flags["config"]
        return arguments
    return {}


def _overrides(words: list[str]) -> dict[str, Any]:
    """The words `key=value` behind a recipe's name; a shell's own assignments stand before the command."""
    at = next(i for i in range(len(words)) if has_runner(words[i : i + 2]))
    behind = takewhile(lambda word: word not in ENDS, words[at:])
    return {found[1]: typed(found[2]) for word in behind if (found := OVERRIDE.fullmatch(word))}


def _deepspeed_chat(flags: dict[str, Any]) -> dict[str, Any]:
    """Take the flags that only DeepSpeed's examples have, as sections of its config (DeepSpeedExamples,
    applications/DeepSpeed-Chat: `main.py`, and in dschat/utils ds_utils.py `get_train_ds_config`, module/lora.py
    `LinearLayer_LoRA`)."""
    zero: dict[str, Any] = {"stage": flags.pop("zero_stage", 0)}
    on_host = {"device": "cpu"} if flags.pop("offload", False) else None
    if on_host:
        zero["offload_optimizer"] = on_host
    if zero["stage"] == 3:
        zero |= {"stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7}
        zero |= {"offload_param": on_host} if on_host else {}
    precision = str(flags.pop("dtype", "fp16"))
    rank, _ = flags.pop("lora_dim", 0), flags.pop("only_optimize_lora", None)
    of_all = {"use_peft": True, "lora_r": rank, "lora_dropout": 0, "lora_target_modules": "all-linear"}
    lora = of_all if type(rank) is int and rank > 0 else {}
    return {"deepspeed": {"zero_optimization": zero}, precision: True, **lora}


def typed(value: Any) -> Any:
    """A command's word as a YAML would have it: a whole number, a switch, or text."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() else SWITCHES.get(value.lower(), value)


def accelerate_config(file: Path, script: Script, flags: dict[str, Any]) -> dict[str, Any]:
    """The config file that `accelerate launch` names, and what its flags say, which are taken out of `flags`.

    Raises:
        InputError: for a file that is not there.
    """
    config: dict[str, Any] | None = ACCELERATE_CONFIGS.get(str(flags.get(OF_TRL)), {})
    if not config and isinstance(of_trl := flags.get(OF_TRL), str):
        flags["config_file"] = of_trl
    if isinstance(name := flags.get("config_file"), str):
        config = named_mapping(file, script, name)
        if config is None:
            where = f"here or beside {file.name}, and the script does not write it"
            raise InputError(f"{file}: --config_file: found '{name[:100]}'; no such file, {where}")
    return with_flags(config or {}, flags) if LAUNCHER in script.started else config or {}
