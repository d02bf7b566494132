"""YAML and JSON of programs that are not converted, told by keys that they alone have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

# By program: keys of which its files have all, `-` written as `_`, and those of sections behind a dot.
OTHERS = (
    ("GPT-NeoX", ("pipe_parallel_size",)),  # neox_arguments; its other keys are DeepSpeed's
    ("GPT-NeoX", ("model_parallel_size",)),
    ("verl", ("actor_rollout_ref",)),
    ("Docker Compose", ("services",)),
    ("Kubernetes", ("apiVersion", "kind")),
)
READ = (
    "Megatron-Bridge, NeMo, DeepSpeed, Transformers' TrainingArguments, TRL, LLaMA-Factory, Axolotl, torchtune, "
    "nanotron, LLM Foundry"
)


def refuse_other_trainer(file: Path, data: Mapping[str, Any]) -> None:
    """Raise where a mapping is the config of a program that is not converted.

    Raises:
        InputError: naming the program, and those that are.
    """
    keys = {str(key).replace("-", "_") for key in data}
    keys |= {f"{key}.{inner}" for key, values in data.items() if isinstance(values, dict) for inner in values}
    program = next((name for name, own in OTHERS if keys.issuperset(own)), None)
    if program is not None:
        raise InputError(f"{file}: is a file of {program}, which is not read; can be converted: {READ}")


def not_told(file: Path) -> InputError:
    """The error of a mapping that has no key of a trainer that is known."""
    problem = "whose configuration it is cannot be told: it has no key of"
    return InputError(f"{file}: {problem} {READ}; --from deepspeed reads it as one of the last five")
