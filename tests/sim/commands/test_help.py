"""The text of `--help`: each default stands once, and `convert` names every trainer that it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from sim.commands.convert import main as convert
from sim.commands.stepsim import main
from sim.convert.other_trainers import READ


def _leaves(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _leaves(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def _help(command: click.Command) -> str:
    """The help on lines that are wide enough to break no name at its hyphen."""
    wide = {**command.context_settings, "terminal_width": 10_000}
    return " ".join(command.get_help(click.Context(command, **wide)).split())


@pytest.mark.parametrize(("name", "command"), [pytest.param(n, c, id=n) for n, c in _leaves(main, "stepsim")])
def test_each_default_stands_once(name: str, command: click.Command) -> None:
    text = _help(command)
    assert 'default: ""' not in text, name
    assert not re.search(r"\[\w+\] \[default", text), name


@pytest.mark.parametrize("program", [*READ.split(", "), "Megatron-LM", "torchtitan", "ms-swift", "vLLM", "SGLang"])
def test_convert_names_what_it_reads(program: str) -> None:
    assert program in _help(convert)
