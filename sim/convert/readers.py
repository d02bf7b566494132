"""Whose configuration a file is, and the function that reads it: one entry of `READERS` for each trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from sim.convert.scripts.containers import started
from sim.convert.scripts.environment import environment_note
from sim.convert.scripts.script_data import NO_SCRIPT, Script
from sim.convert.scripts.sourced import advice
from sim.convert.sizes_left import with_sizes_left
from sim.core.errors import InputError
from sim.core.files import read_text

if TYPE_CHECKING:
    from sim.convert.scripts.script import Given
    from sim.convert.settings import Converted, Machine

MEGATRON = ("--num-layers", "--seq-length", "--micro-batch-size", "--tensor-model-parallel-size")  # one in each script
DATA = (".json", ".yaml", ".yml")
CODE = (".toml", ".py")
MAX_BYTES = 4 * 2**20
CONFIGURED = "configured"  # a command that names a configuration
IsOwn: TypeAlias = "Callable[[dict[str, Any]], bool]"
ConvertData: TypeAlias = "Callable[[Path, dict[str, Any], Machine], Converted]"


class Asked(NamedTuple):
    """Hold what the user says beside the file. `config`: a function of a torchtitan config.py; `given`: values of a
    script's variables; `told`: the user names the trainer; `starts`: the text is what a file's containers start;
    `script`: what the file starts, if it is a script, with all branches."""

    machine: Machine
    seq_len: int | None
    config: str | None
    given: Given
    told: bool = False
    starts: bool = False
    script: Script = NO_SCRIPT


def converted(file: Path, asked: Asked, trainer: str | None) -> Converted:
    """A trainer's file as a scenario's data; `trainer`: one of `READERS`, or None to tell it by the file."""
    from sim.convert.scripts.script import overview

    text = read_text(file, MAX_BYTES)
    if not text.strip():
        raise InputError(f"{file}: is empty; a trainer's configuration or a launch script is wanted")
    asked, notes = asked._replace(told=trainer is not None), tuple[str, ...]()
    if file.suffix in DATA and (containers := started(file, text)) is not None:
        text, notes, asked = containers.script, containers.notes, asked._replace(starts=True)
    is_data = file.suffix in DATA and not asked.starts
    script = NO_SCRIPT
    if is_data or file.suffix in CODE:
        text = _with_variables(file, text, asked.given, is_data)
    else:
        script = overview(file, text, asked.given)
    absent = [advice(script.absent)] if script.absent else []
    asked = asked._replace(script=script)
    try:
        trainer = trainer or _trainer_of(file, text, script, is_data)
        found = READERS.get(trainer, _configured)(file, text, asked)
    except InputError as error:
        raise InputError("; ".join([str(error), *absent])) from None
    return replace(found, notes=(*found.notes, *notes, *absent))


def _read(file: Path, text: str, asked: Asked, convert: Callable[[Script], Converted]) -> Converted:
    """A script's scenario, with a note on variables that nobody read."""
    from sim.convert.scripts.script import read_script

    def noted(script: Script) -> Converted:
        found = convert(script)
        return replace(found, notes=(*found.notes, *environment_note(script)))

    return read_script(file, text, asked.given, noted)


def _with_variables(file: Path, text: str, given: Given, is_data: bool) -> str:
    """The text with the user's values for variables (`${TP}`), which a JSON or YAML may have for a program that fills
    them in.

    Raises:
        InputError: for a variable that the file does not have, and for arguments of what is no script.
    """
    option = "--args" if given.arguments is not None else "--var" if given.variables and not is_data else ""
    if option:
        raise InputError(f"{file}: {option}: can be given for a script only, and this file is none")
    if unknown := [name for name in given.variables if not re.search(rf"\$\{{?{name}\b", text)]:
        raise InputError(f"{file}: --var: the file has no variable {unknown[0]}")
    for name, value in given.variables.items():
        text = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", lambda _, value=value: value, text)  # type: ignore[misc]
    return text


def _megatron(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.megatron.scenario import convert_megatron
    from sim.convert.megatron.swift import convert_swift, is_swift_megatron

    machine, length = asked.machine, asked.seq_len
    if is_swift_megatron(asked.script):
        return _read(file, text, asked, lambda read: convert_swift(file, read, machine, length))
    return _read(file, text, asked, lambda read: convert_megatron(file, read, machine))


def _mlperf(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.mlperf import convert_mlperf

    return _read(file, text, asked, lambda read: convert_mlperf(file, read, asked.machine))


def _verl(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.verl import convert_verl, is_verl
    from sim.convert.verl_sft import convert_verl_sft, is_verl_sft

    convert = convert_verl_sft if is_verl_sft(asked.script) and not is_verl(asked.script) else convert_verl
    return _read(file, text, asked, lambda read: convert(file, read, asked.machine))


def _torchtitan(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.prime_rl import convert_prime_rl, is_prime_rl
    from sim.convert.torchtitan.scenario import convert_torchtitan

    if asked.script.commands:
        return _configured(file, text, asked)
    if file.suffix == ".toml" and is_prime_rl(text):
        return convert_prime_rl(file, text, asked.machine)
    return convert_torchtitan(file, text, asked.machine, asked.config)


def _deepspeed(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.trainer_arguments.swift import is_swift

    is_data = file.suffix in DATA and not asked.starts
    if not is_data and is_swift(asked.script):
        return _read(file, text, asked, lambda read: _swift(file, read, asked))
    if is_data:
        return _of_data(file, text, asked)
    return _read(file, text, asked, lambda read: _launched(file, read, asked))


def _serving(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.serving.scenario import convert_serving

    return _read(file, text, asked, lambda read: convert_serving(file, read, asked.machine))


def _launched(file: Path, script: Script, asked: Asked) -> Converted:
    """The arguments of Transformers' Trainer in a script's launch command."""
    from sim.convert.trainer_arguments.launched import launched_arguments

    arguments, processes = launched_arguments(file, script)
    machine = asked.machine if asked.machine.gpus else replace(asked.machine, gpus=processes)
    return _of_arguments(file, arguments, machine, asked.seq_len)


def _of_arguments(file: Path, arguments: dict[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """Arguments of Transformers' Trainer, of a step on given texts, with a teacher or of GRPO."""
    from sim.convert.trainer_arguments.gkd import convert_gkd
    from sim.convert.trainer_arguments.grpo import convert_grpo
    from sim.convert.trainer_arguments.objectives import objective_of
    from sim.convert.trainer_arguments.scenario import convert_deepspeed

    others = {"grpo": convert_grpo, "gkd": convert_gkd}
    convert = others.get(str(objective_of(file, arguments)), convert_deepspeed)
    return convert(file, arguments, machine, seq_len)


def _swift(file: Path, script: Script, asked: Asked) -> Converted:
    from sim.convert.trainer_arguments.swift import swift_arguments

    arguments, processes = swift_arguments(file, script, asked.machine)
    return _of_arguments(file, arguments, replace(asked.machine, gpus=processes), asked.seq_len)


def _slime(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.slime import convert_slime

    machine, length = asked.machine, asked.seq_len
    return _read(file, text, asked, lambda read: convert_slime(file, read, machine, length))


def _openrlhf(file: Path, text: str, asked: Asked) -> Converted:
    """Reinforcement learning with Ray, or supervised fine-tuning."""
    from sim.convert.openrlhf_ray import convert_openrlhf_ray, is_openrlhf_ray

    if is_openrlhf_ray(asked.script):
        return _read(file, text, asked, lambda read: convert_openrlhf_ray(file, read, asked.machine))
    return _read(file, text, asked, lambda read: _fine_tuned(file, read, asked))


def _fine_tuned(file: Path, script: Script, asked: Asked) -> Converted:
    """The arguments of OpenRLHF's supervised fine-tuning."""
    from sim.convert.trainer_arguments.openrlhf import openrlhf_arguments
    from sim.convert.trainer_arguments.scenario import convert_deepspeed

    arguments, notes = openrlhf_arguments(file, script)
    found = convert_deepspeed(file, arguments, asked.machine, asked.seq_len)
    return replace(found, notes=(*found.notes, *notes))


def _litgpt(file: Path, text: str, asked: Asked) -> Converted:
    from sim.convert.litgpt import convert_litgpt_command

    machine, length = asked.machine, asked.seq_len
    return _read(file, text, asked, lambda read: convert_litgpt_command(file, read, machine, length))


def _data_formats(seq_len: int | None) -> tuple[tuple[IsOwn, ConvertData], ...]:
    """Each trainer whose JSON or YAML is told by its keys: is a mapping its configuration, and what converts it.

    The first that knows a mapping has it, so a trainer whose mark others may have too stands behind them.
    """
    from sim.convert.bridge.nemo_recipe import is_nemo_recipe
    from sim.convert.bridge.scenario import convert_bridge, convert_recipe, is_bridge
    from sim.convert.litgpt import convert_litgpt, is_litgpt
    from sim.convert.llm_foundry import convert_llm_foundry, is_llm_foundry
    from sim.convert.megatron.functional_tests import is_arguments
    from sim.convert.megatron.gpt_neox import convert_gpt_neox, is_gpt_neox
    from sim.convert.nanotron import convert_nanotron, is_nanotron
    from sim.convert.nemo_rl.scenario import convert_nemo_rl, is_nemo_rl
    from sim.convert.olmo_core import convert_olmo_core, is_olmo_core
    from sim.convert.torchtune import convert_torchtune, is_torchtune
    from sim.convert.verl import convert_verl_config
    from sim.convert.verl_files import is_verl_config
    from sim.convert.verl_sft import convert_verl_sft_config, is_verl_sft_config

    return (
        (is_verl_config, convert_verl_config),
        (is_verl_sft_config, convert_verl_sft_config),
        (is_nemo_rl, convert_nemo_rl),
        (is_olmo_core, convert_olmo_core),
        (is_litgpt, partial(convert_litgpt, seq_len=seq_len)),
        (is_nemo_recipe, convert_recipe),
        (is_bridge, convert_bridge),
        (is_arguments, _of_functional_test),
        (is_llm_foundry, convert_llm_foundry),
        (is_nanotron, convert_nanotron),
        (is_torchtune, partial(convert_torchtune, seq_len=seq_len)),
        (is_gpt_neox, convert_gpt_neox),
    )


def _of_functional_test(file: Path, data: dict[str, Any], machine: Machine) -> Converted:
    """The arguments of one of Megatron-LM's own tests."""
    from sim.convert.megatron.functional_tests import as_command
    from sim.convert.megatron.scenario import convert_megatron
    from sim.convert.scripts.script import Given, followed

    script = followed(file, as_command(data), Given())
    found = convert_megatron(file, script, machine)
    return replace(found, notes=(*found.notes, *environment_note(script)))


def _configured(file: Path, text: str, asked: Asked) -> Converted:
    """A script's command that names a configuration, whose keys it may override."""
    from sim.convert.configured import configured
    from sim.convert.prime_rl import is_prime_rl
    from sim.convert.torchtitan.scenario import convert_torchtitan

    def convert(script: Script) -> Converted:
        one = configured(file, script)
        if one is None:
            raise InputError(f"{file}: has no command that names a configuration beside it")
        machine = asked.machine if asked.machine.gpus else replace(asked.machine, gpus=one.gpus)
        if one.file.suffix != ".toml":
            found = _of_mapping(one.file, one.data, asked._replace(machine=machine))
        elif is_prime_rl(one.text):
            raise InputError(
                f"{file}: starts prime-rl: convert {one.file}, with the command's own keys written into it"
            )
        else:
            found = convert_torchtitan(one.file, one.text, machine, data=one.data)
        return replace(found, scenario={**found.scenario, "name": file.stem})

    return _read(file, text, asked, convert)


def _of_data(file: Path, text: str, asked: Asked) -> Converted:
    """A JSON or YAML, of Megatron-LM's arguments or of another trainer."""
    from sim.convert.yaml_aliases import parsed

    data: Any = parsed(text, str(file))
    if not isinstance(data, dict):
        raise InputError(f"{file}: holds no mapping; a trainer's configuration does")
    return _of_mapping(file, data, asked)


def _of_mapping(file: Path, data: dict[str, Any], asked: Asked) -> Converted:
    from sim.convert.other_trainers import not_told, refuse_alike, refuse_other_trainer
    from sim.convert.trainer_arguments.scenario import is_training_arguments
    from sim.convert.trainer_arguments.swift import arguments_of, is_swift_config
    from sim.inputs.file_kinds import refuse_other_kind

    refuse_other_kind(file, data, "a trainer's configuration is wanted")
    refuse_alike(file, data)
    known = next((convert for is_own, convert in _data_formats(asked.seq_len) if is_own(data)), None)
    if known is not None:
        return with_sizes_left(data, lambda own: known(file, own, asked.machine))
    refuse_other_trainer(file, data)
    if is_swift_config(data):
        data = arguments_of(data, {}, asked.machine.gpus)
    if not (asked.told or is_training_arguments(data)):
        raise not_told(file)
    return with_sizes_left(data, lambda own: _of_arguments(file, own, asked.machine, asked.seq_len))


READERS: dict[str, Callable[[Path, str, Asked], Converted]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "serving": _serving,
    "mlperf": _mlperf,
    "verl": _verl,
    "openrlhf": _openrlhf,
    "slime": _slime,
    "litgpt": _litgpt,
}


def _trainer_of(file: Path, text: str, script: Script, is_data: bool) -> str:
    """The trainer whose file this is: the first whose marks the script's commands have.

    Raises:
        InputError: for a text without any trainer's marks, and for a program that is known and not converted.
    """
    from sim.convert.litgpt import runs_litgpt
    from sim.convert.megatron.swift import is_swift_megatron
    from sim.convert.mlperf import is_mlperf
    from sim.convert.openrlhf_ray import is_openrlhf_ray
    from sim.convert.other_trainers import OLMO_CORE, not_read
    from sim.convert.serving.scenario import is_serving
    from sim.convert.slime import is_slime
    from sim.convert.trainer_arguments.launched import has_runner, is_launched, runs_recipe
    from sim.convert.trainer_arguments.openrlhf import is_openrlhf
    from sim.convert.trainer_arguments.swift import is_swift
    from sim.convert.verl import is_verl
    from sim.convert.verl_sft import is_verl_sft

    if file.suffix == ".py" and OLMO_CORE in text:
        raise not_read(file, text, "")
    if file.suffix in CODE:
        return "torchtitan"
    if is_data or is_launched(script) or (is_swift(script) and not is_swift_megatron(script)):
        return "deepspeed"
    told_by = {
        "serving": (is_serving,),
        "mlperf": (is_mlperf,),
        "verl": (is_verl, is_verl_sft),
        "openrlhf": (is_openrlhf, is_openrlhf_ray),
        "slime": (is_slime,),
        "litgpt": (runs_litgpt,),
    }
    for trainer, marks in told_by.items():
        if any(is_own(script) for is_own in marks):
            return trainer
    if runs_recipe(file, script):
        return "deepspeed"
    if is_swift_megatron(script) or (
        any(flag in script.started for flag in MEGATRON) and not has_runner(script.started.split())
    ):
        return "megatron"
    from sim.convert.configured import configured

    if configured(file, script) is not None:
        return CONFIGURED
    problem = (
        f"{file}: whose configuration it is cannot be told: it has neither {', '.join(MEGATRON)} (Megatron-LM), nor "
        "--per_device_train_batch_size (Transformers), nor the command of a server or benchmark that is known; "
        f"--from {'|'.join(READERS)} says it"
    )
    raise not_read(file, text, problem)
