"""Files and commands of programs that are not converted, told by keys and words that they alone have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.variants.engines.names import OWN_ENGINE

# By program: keys of which its files have all, `-` written as `_`, and those of sections behind a dot.
OF_JAX = "of JAX, "
# Files of these have keys of trainers that are converted, too, and would be taken for theirs.
ALIKE = (
    ("MaxText", ("per_device_batch_size", "max_target_length"), OF_JAX, ""),
    ("MaxText", ("ici_fsdp_parallelism",), OF_JAX, ""),
    ("Levanter", ("trainer.train_batch_size", "model.type"), OF_JAX, ""),
    ("NeMo AutoModel", ("step_scheduler.local_batch_size",), "", ""),
    ("VeOmni", ("train.data_parallel_mode",), "", ""),
    ("VeOmni", ("model.model_path", "train.micro_batch_size"), "", ""),
)
OTHERS = (("OLMo", ("model.d_model", "model.n_layers", "device_train_microbatch_size")),)
READ = (
    "Megatron-Bridge, NeMo, NeMo 2, NeMo RL, DeepSpeed, Transformers' TrainingArguments, TRL, LLaMA-Factory, Axolotl, "
    "torchtune, LitGPT, nanotron, LLM Foundry, GPT-NeoX, OLMo-core"
)


def refuse_other_trainer(file: Path, data: Mapping[str, Any]) -> None:
    """Raise where a mapping is the config of a program that is not converted.

    Raises:
        InputError: naming the program, and those that are.
    """
    keys = _keys(data)
    if {"compute_environment", "distributed_type"} <= keys:
        problem = "is Accelerate's config of processes and sharding: convert the script whose command names it"
        raise InputError(f"{file}: {problem} (--config_file), with this file beside it")
    program = next((name for name, own in OTHERS if keys.issuperset(own)), None)
    if program is not None:
        raise InputError(f"{file}: is a file of {program}, which is not read; can be converted: {READ}")


def refuse_alike(file: Path, data: Mapping[str, Any]) -> None:
    """Raise where a mapping is a file of `ALIKE`.

    Raises:
        InputError: naming the program, and those that are converted.
    """
    keys = _keys(data)
    for program, own, runs_on, more in ALIKE:
        if keys.issuperset(own):
            raise InputError(
                f"{file}: is a file of {program}, {runs_on}which is not read{more}; can be converted: {READ}"
            )


def _keys(data: Mapping[str, Any]) -> set[str]:
    keys = {str(key).replace("-", "_") for key in data}
    return keys | {f"{key}.{inner}" for key, values in data.items() if isinstance(values, dict) for inner in values}


OLMO_CORE = "olmo_core"
OF_ENGINE = f": this engine has no record here; {OWN_ENGINE}"
# By program: words of which its commands have one, and where a page says more.
COMMANDS = (
    ("verl", ("verl.trainer.main_ppo",), " (a command with data.train_batch_size=N is, and any by --from verl)"),
    ("verl", ("actor_rollout_ref.",), " (a scenario with `rl` describes its step: docs/rl.md)"),
    ("verl", ("verl.trainer.",), ""),  # its generation and evaluation
    ("OpenRLHF", ("openrlhf.cli.", "openrlhf.trainer."), " (openrlhf.cli.train_sft and train_ppo_ray are)"),
    ("GPT-NeoX", ("deepy.py",), ""),
    ("Colossal-AI", ("colossalai run",), ""),
    ("OLMo", (OLMO_CORE, "OLMo"), " (the config.json that a run of OLMo-core saves is)"),
    ("MaxText", ("MaxText.train", "MaxText/train.py", "maxtext.trainers"), ": it runs on JAX"),
    ("NeMo RL", ("run_grpo.py", "run_grpo_math.py", "run_sft.py", "nemo_rl"), ": convert the YAML behind its --config"),
    ("prime-rl", ("prime_rl", "uv run rl ", "uv run sft "), ": convert the TOML behind its @"),
    ("LMDeploy", ("lmdeploy serve", "lmdeploy chat"), OF_ENGINE),
    ("Text Generation Inference", ("text-generation-launcher", "text-generation-inference"), OF_ENGINE),
    ("llama.cpp", ("llama-server", "llama-cli", "llama-bench"), OF_ENGINE),
    ("Ollama", ("ollama serve", "ollama run"), OF_ENGINE),
    ("MLC LLM", ("mlc_llm serve",), OF_ENGINE),
)
NAMED = re.compile(r"[\w./-]+\.(?:ya?ml|toml|json)\b")
OF_LAUNCHER = re.compile(r"--config_file[ \t=]+[\"']?([\w./-]+)")  # Accelerate's, of processes and sharding
RUNS = re.compile(r"(?:^|[\s;\"'(])(?:bash|sh|source|\.)[ \t]+\"?([\w./${}-]+\.sh)\b")


def not_read(file: Path, text: str, else_said: str) -> InputError:
    """The error of a script that has no command which is known: its program, or the file that it names."""
    for program, marks, more in COMMANDS:
        if any(mark in text for mark in marks):
            return InputError(f"{file}: has a command of {program}, which is not read{more}")
    text = re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text)
    if runs := RUNS.search(text):
        problem = f"has no command that is read, but runs {runs[1]}: convert that file"
        return InputError(f"{file}: {problem}, with the variables that this one sets as --var NAME=VALUE")
    launchers = OF_LAUNCHER.findall(text)
    if named := next((name for name in NAMED.findall(text) if name not in launchers), None):
        beside = f", or put it beside the script, where {launchers[0]} is looked for, too" if launchers else ""
        return InputError(f"{file}: has no command that is read, but names {named}: convert that file{beside}")
    return InputError(else_said)


def not_told(file: Path) -> InputError:
    """The error of a mapping that has no key of a trainer that is known."""
    problem = "whose configuration it is cannot be told: it has no key of"
    return InputError(f"{file}: {problem} {READ}; --from deepspeed reads it as DeepSpeed's, or as TrainingArguments")
