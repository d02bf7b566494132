"""`python -m sim.convert FILE`: another trainer's configuration as a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import replace

from sim.commands.command import Command
from sim.commands.files_named import FILE, OUTPUT
from sim.commands.options import gathered, overrides_option
from sim.convert.readers import READERS, Asked, converted
from sim.core.errors import InputError
from sim.core.files import write_text

if TYPE_CHECKING:
    from sim.convert.settings import Converted

CLUSTER_HELP = (
    "the cluster it runs on (`stepsim clusters` lists them), or one such as '{gpu: rtx4090, gpus_per_node: 4}'"
)

EQUAL_ANSWERS = (
    "rl.output_len.sigma: is 0, so all answers have the mean length and no long one is waited for, which may be half "
    "of generation (docs/rl.md): --set rl.output_len.sigma=0.8 spreads them"
)


class ConvertOptions(Struct, frozen=True, dict=True):
    """Hold the options that were given; each field is the option of its name, `trainer` is --from, `variables` --var,
    `arguments` --args and `overrides` --set."""

    cluster: str
    gpus: int | None = None
    model: str | None = None
    seq_len: int | None = None
    trainer: str | None = None
    config: str | None = None
    variables: tuple[str, ...] = ()
    arguments: str | None = None
    overrides: tuple[str, ...] = ()
    out: Path | None = None


convert_options = gathered(
    ConvertOptions,
    "options",
    click.option("--cluster", required=True, metavar="NAME|{…}", help=CLUSTER_HELP),
    click.option(
        "--gpus", type=click.IntRange(1, 10_000_000), metavar="N", help="number of GPUs, if the file does not have it"
    ),
    click.option("--model", metavar="NAME|config.json", help="the model, if the file does not describe it"),
    click.option("--seq-len", type=click.IntRange(1, 100_000_000), metavar="N", help="sequence length, for DeepSpeed"),
    click.option(
        "--from", "trainer", type=click.Choice(tuple(READERS)), help="the trainer; by default recognized from the file"
    ),
    click.option("--config", metavar="FUNCTION", help="which function of a torchtitan config.py"),
    click.option("--var", "variables", multiple=True, metavar="NAME=VALUE", help="the value of a script's variable"),
    click.option("--args", "arguments", metavar="'FIRST SECOND …'", help="the arguments of a script"),
    overrides_option,
    click.option(
        "--out", type=OUTPUT, metavar="SCENARIO.yaml", help="write the scenario there, not to standard output"
    ),
)


def _equal_answers(scenario: Mapping[str, Any]) -> list[str]:
    """A note where no answer is longer than the mean, so that none is waited for."""
    if not isinstance(rl := scenario.get("rl"), dict):
        return []
    lengths = rl.get("output_len")
    return [] if isinstance(lengths, dict) and lengths.get("sigma") else [EQUAL_ANSWERS]


@click.command("convert", cls=Command)
@click.argument("file", type=FILE, metavar="FILE")
@convert_options
def main(file: Path, options: ConvertOptions) -> None:
    """Turn another program's configuration into a scenario: a Megatron-LM launch script, a YAML of Megatron-Bridge,
    NeMo or NeMo 2, a config of an MLPerf submission, a command of verl, slime or OpenRLHF, a config of verl, NeMo RL or
    prime-rl, GRPO of TRL, Axolotl or ms-swift, a torchtitan config (TOML or Python), a DeepSpeed JSON, Transformers'
    TrainingArguments (JSON or YAML), a config of LLaMA-Factory, TRL, Axolotl, torchtune, LitGPT, ms-swift, nanotron,
    LLM Foundry, GPT-NeoX or OLMo-core, or command lines of vLLM, SGLang or TensorRT-LLM with those of their benchmarks.
    FILE is not executed. Settings without a key become comments.
    """
    import yaml

    from sim.inputs.yaml_input import parse_yaml

    cluster = options.cluster
    found = read_file(
        file, parse_yaml(cluster, "--cluster")[0] if cluster.lstrip().startswith("{") else cluster, options
    )
    head = [f"Converted from {file.name} by `stepsim convert`.", *found.notes]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(found.scenario, sort_keys=False, width=120)
    if options.out is None:
        click.echo(text, nl=False)
    else:
        write_text(options.out, text)
        for note in found.notes:
            click.echo(f"note: {note}", err=True)


def read_file(file: Path, where: str | dict[str, Any], options: ConvertOptions) -> Converted:
    """What a file says, on the cluster `where`, and with the options: a scenario that can be loaded, and notes.

    Raises:
        InputError: for a file that cannot be read so, and for a scenario that cannot be.
    """
    from sim.convert.scripts.script import given_values
    from sim.convert.settings import Machine
    from sim.inputs.input_source import Source
    from sim.inputs.overrides import with_overrides
    from sim.inputs.scenario import parse_scenario

    machine, given = Machine(where, options.gpus, options.model), given_values(options.variables, options.arguments)
    found = converted(file, Asked(machine, options.seq_len, options.config, given), options.trainer)
    scenario = with_overrides(Source(str(file), found.scenario), options.overrides).data
    for key, setting in found.missing.items():
        *sections, name = key.split(".")
        section: Any = scenario
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(name) is None:
            raise InputError(f"{file}: does not give {setting}: add --set {key}=N")
    parse_scenario(scenario, str(file))  # says what cannot be
    return replace(found, scenario=scenario, notes=(*found.notes, *_equal_answers(scenario)))
