"""`python -m sim.convert FILE`: another trainer's configuration as a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from sim.commands.command import Command
from sim.commands.files_named import FILE, OUTPUT
from sim.commands.options import overrides_option
from sim.core.errors import InputError
from sim.core.files import read_text, write_text

if TYPE_CHECKING:
    from sim.convert.script import Given
    from sim.convert.settings import Converted, Machine

TRAINERS = ("megatron", "torchtitan", "deepspeed", "serving")
MEGATRON = ("--num-layers", "--seq-length", "--micro-batch-size", "--tensor-model-parallel-size")  # one in each script
DATA = (".json", ".yaml", ".yml")
CLUSTER_HELP = (
    "the cluster it runs on (`stepsim clusters` lists them), or one such as '{gpu: rtx4090, gpus_per_node: 4}'"
)
MAX_BYTES = 4 * 2**20


@click.command("convert", cls=Command)
@click.argument("file", type=FILE, metavar="FILE")
@click.option("--cluster", required=True, metavar="NAME|{…}", help=CLUSTER_HELP)
@click.option(
    "--gpus", type=click.IntRange(1, 10_000_000), metavar="N", help="number of GPUs, if the file does not have it"
)
@click.option("--model", metavar="NAME|config.json", help="the model, if the file does not describe it")
@click.option("--seq-len", type=click.IntRange(1, 100_000_000), metavar="N", help="sequence length, for DeepSpeed")
@click.option("--from", "trainer", type=click.Choice(TRAINERS), help="the trainer; by default recognized from the file")
@click.option("--config", metavar="FUNCTION", help="which function of a torchtitan config.py")
@click.option("--var", "variables", multiple=True, metavar="NAME=VALUE", help="the value of a script's variable")
@click.option("--args", "arguments", metavar="'FIRST SECOND …'", help="the arguments of a script")
@overrides_option
@click.option("--out", type=OUTPUT, metavar="SCENARIO.yaml", help="write the scenario there, not to standard output")
def main(
    file: Path,
    cluster: str,
    gpus: int | None,
    model: str | None,
    seq_len: int | None,
    trainer: str | None,
    config: str | None,
    variables: tuple[str, ...],
    arguments: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
) -> None:
    """Turn another program's configuration into a scenario: a Megatron-LM launch script, a Megatron-Bridge or NeMo
    YAML, a torchtitan config (TOML or Python), a DeepSpeed JSON, Transformers' TrainingArguments (JSON or YAML), or
    command lines of vLLM, SGLang or TensorRT-LLM with those of their benchmarks. FILE is not executed. Settings without
    a key become comments.
    """
    import yaml

    from sim.convert.script import given_values
    from sim.convert.settings import Machine
    from sim.inputs.input_source import Source
    from sim.inputs.overrides import with_overrides
    from sim.inputs.scenario import parse_scenario
    from sim.inputs.yaml_input import parse_yaml

    where = parse_yaml(cluster, "--cluster")[0] if cluster.lstrip().startswith("{") else cluster
    given = given_values(variables, arguments)
    found = _converted(file, Machine(where, gpus, model), trainer, seq_len, config, given)
    scenario = with_overrides(Source(str(file), found.scenario), overrides).data
    for key, setting in found.missing.items():
        section, _, name = key.partition(".")
        if isinstance(scenario.get(section), dict) and scenario[section].get(name) is None:
            raise InputError(f"{file}: does not give {setting}: add --set {key}=N")
    parse_scenario(scenario, str(file))  # says what cannot be
    head = [f"Converted from {file.name} by `stepsim convert`.", *found.notes]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(scenario, sort_keys=False, width=120)
    if out is None:
        click.echo(text, nl=False)
    else:
        write_text(out, text)
        for note in found.notes:
            click.echo(f"note: {note}", err=True)


def _converted(
    file: Path, machine: Machine, trainer: str | None, seq_len: int | None, config: str | None, given: Given
) -> Converted:
    from sim.convert.launched import is_launched
    from sim.convert.script import read_script

    text = read_text(file, MAX_BYTES)
    found = trainer or _kind(file, text)
    if found == "torchtitan":
        from sim.convert.torchtitan import convert_torchtitan

        return convert_torchtitan(file, text, machine, config)
    if found == "deepspeed" and (file.suffix in DATA or not is_launched(text)):
        return _of_data(file, text, machine, seq_len, told=trainer is not None)
    return read_script(file, text, given, lambda read: _of_script(file, read, found, machine, seq_len))


def _of_script(file: Path, text: str, found: str, machine: Machine, seq_len: int | None) -> Converted:
    """What a script's command lines say."""
    if found == "serving":
        from sim.convert.serving import convert_serving

        return convert_serving(file, text, machine)
    if found == "megatron":
        from sim.convert.megatron import convert_megatron

        return convert_megatron(file, text, machine)
    from sim.convert.deepspeed import convert_deepspeed
    from sim.convert.launched import launched_arguments

    arguments, processes = launched_arguments(file, text)
    machine = machine if machine.gpus else replace(machine, gpus=processes)
    return convert_deepspeed(file, arguments, machine, seq_len)


def _of_data(file: Path, text: str, machine: Machine, seq_len: int | None, told: bool) -> Converted:
    """What a JSON or YAML says; `told`: the user says whose it is."""
    from sim.convert.bridge import convert_bridge, is_bridge
    from sim.convert.deepspeed import convert_deepspeed, is_training_arguments
    from sim.convert.megatron import as_command, convert_megatron, is_arguments
    from sim.convert.other_trainers import not_told, refuse_other_trainer
    from sim.inputs.file_kinds import refuse_other_kind
    from sim.inputs.yaml_input import parse_yaml

    data: Any = parse_yaml(text, str(file))[0]
    if not isinstance(data, dict):
        raise InputError(f"{file}: holds no mapping; a trainer's configuration does")
    refuse_other_kind(file, data, "a trainer's configuration is wanted")
    if is_bridge(data):
        return convert_bridge(file, data, machine)
    if is_arguments(data):
        return convert_megatron(file, as_command(data), machine)
    refuse_other_trainer(file, data)
    if not (told or is_training_arguments(data)):
        raise not_told(file)
    return convert_deepspeed(file, data, machine, seq_len)


def _kind(file: Path, text: str) -> str:
    """Whose configuration it is."""
    from sim.convert.launched import is_launched
    from sim.convert.serving import is_serving

    if file.suffix in (".toml", ".py"):
        return "torchtitan"
    if file.suffix in DATA or is_launched(text):
        return "deepspeed"
    if is_serving(text):
        return "serving"
    if any(flag in text for flag in MEGATRON):
        return "megatron"
    raise InputError(
        f"{file}: whose configuration it is cannot be told: it has neither {', '.join(MEGATRON)} (Megatron-LM), nor "
        "--per_device_train_batch_size (Transformers), nor the command of a server or benchmark that is known; "
        f"--from {'|'.join(TRAINERS)} says it"
    )
