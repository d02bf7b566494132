"""Words and flags of the commands that a launch script starts, and Slurm's directives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.core.errors import InputError

if TYPE_CHECKING:
    from sim.convert.scripts.script_data import Script

SWITCHES = {"true": True, "false": False}  # words of a flag that is on or off
SLURM = ("nodes", "ntasks-per-node", "gpus-per-node")
OF_ALL_NODES = ("ntasks", "gpus")
SLURM_VARIABLES = {  # sbatch's manual, "output environment variables"
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NPROCS": "ntasks",
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
}
ENDS = (";", "&", "&&", "|", "||")  # of a command
SHOWN = ("echo", "printf")  # commands whose words are shown and not run


def words_of(script: Script) -> list[str]:
    """The words of all commands, with `;` behind each; lines that begin with a flag are one command's."""
    found: list[str] = []
    for command in script.commands:
        if found and not (found[0].startswith("-") and command.words[0].startswith("-")):
            found.append(";")
        found += command.words
    return [*found, ";"]


def words_that(words: list[str], trains: Callable[[list[str]], bool]) -> list[str]:
    """The words of those commands that train, without others' flags; all words where none does."""
    commands = [list(group) for ends, group in groupby(words, lambda word: word in ENDS) if not ends]
    found = [command for command in commands if command[0] not in SHOWN and trains(command)]
    return [word for command in found for word in (*command, ";")] or words


def slurm_flags(directives: Iterable[str]) -> dict[str, str]:
    """Nodes, tasks and GPUs of a node or of all by Slurm's options."""
    words = re.sub(r"(^|\s)-N[ =]?(?=\d)", r"\1--nodes=", " ".join(directives))
    words = re.sub(r"(^|\s)-n[ =]?(?=\d)", r"\1--ntasks=", words)
    words = re.sub(r"(^|\s)(?:-G|--gpus)[ =]?(?:[A-Za-z]\w*:)?(?=\d)", r"\1--gpus=", words)
    words = re.sub(r"--(?:gres|gpus-per-node)[ =](?:gpu:)?(?:[A-Za-z]\w*:)?(?=\d)", "--gpus-per-node=", words)
    given = flags_of(words.split())
    return {name: given[name] for name in (*SLURM, *OF_ALL_NODES) if str(given.get(name)).isdigit()}


def slurm_values(directives: Iterable[str]) -> dict[str, str]:
    """Variables that Slurm sets by its options."""
    flags = slurm_flags(directives)
    return {variable: flags[name] for variable, name in SLURM_VARIABLES.items() if name in flags}


def flags_of(words: list[str], short: bool = False, listed: Collection[str] = ()) -> dict[str, Any]:
    """Values by flag, without dashes and with `-` for `_`; True for a flag without one. `short`: one dash is enough.
    `listed`: flags with several values, which are joined by spaces; `;` ends them."""
    start = re.compile("--?[A-Za-z]" if short else "--")
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word == ";" or word == "--":
            name = ""
        elif start.match(word):
            name, separator, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            flags[name] = value if separator else True
        elif name and flags[name] is True:
            flags[name] = word
            name = name if name in listed else ""
        elif name in listed:
            flags[name] += f" {word}"
        else:
            name = ""
    return flags


def words_behind(file: Path, words: list[str], mark: str) -> list[str]:
    """The words behind a module's name, up to its command's end.

    Raises:
        InputError: where no command has it, and where several differ, of which one would be read and the others not.
    """
    found = [
        list(takewhile(lambda word: word not in ENDS, words[i + 1 :])) for i, word in enumerate(words) if word == mark
    ]
    if not found:
        raise InputError(f"{file}: {mark} stands in the file, but in no command that could be read")
    longest = max(found, key=len)
    if any(not {*pairwise(each)} <= {*pairwise(longest)} for each in found):
        raise InputError(f"{file}: {len(found)} commands of {mark} differ: keep the one that runs in the file")
    return longest


def require_one(file: Path, words: list[str], mark: str) -> None:
    """Refuse several commands with the flag `mark`, of which one would get the other's flags.

    Raises:
        InputError: where commands that have it differ, and the longest does not have all flags of the others. Those
            that only show them (`printf "$CMD\\n"`) count where no other has it.
    """
    groups = groupby(words, lambda word: word in ENDS)
    commands = [list(group) for ends, group in groups if not ends]
    having = [(command[0] in SHOWN, flags) for command in commands if mark in (flags := flags_of(command))]
    run = [flags for shown, flags in having if not shown]
    found = run or [flags for _, flags in having]
    longest = max(found, key=len, default={})
    if any(not flags.items() <= longest.items() for flags in found):
        given = ", ".join(dict.fromkeys(str(flags[mark]) for flags in found))
        raise InputError(f"{file}: {len(found)} commands have --{mark} ({given}): keep the one that runs in the file")
