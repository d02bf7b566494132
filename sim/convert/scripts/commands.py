"""Simple commands of a shell: functions, builtins, and programs, of which those that start a shell are followed."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from sim.convert.scripts import lexer
from sim.convert.scripts.builtins import BUILTINS, DECLARING, declare, hide, script_of
from sim.convert.scripts.parameters import Status
from sim.convert.scripts.shell import Shell
from sim.convert.scripts.state import Exit
from sim.convert.scripts.unknown import LOOSE, QUOTED, Unknown, held, known
from sim.convert.scripts.utilities import UTILITIES
from sim.core.errors import InputError

SHELLS = ("sh", "bash")
OF_SHELL = re.compile(r"-[a-z]*c")  # `-c`, `-lc`: the next word is a script
STARTERS = ("srun", "sbatch", "mpirun", "mpiexec", "nohup", "env", "sudo", "timeout", "salloc", *SHELLS)
QUOTED_COMMAND = re.compile(r"(?s)^(?![\w.]+\+?=)[^{\[-].*\s--[A-Za-z]")  # a command in one word, for another shell
QUOTED_FLAG = re.compile(r"--[A-Za-z][\w-]*\s")  # a flag and its value in one word
NOTHING = (
    *(":", "cd", "pushd", "popd", "wait", "ulimit", "umask", "hash", "alias", "unalias", "jobs", "disown", "enable"),
    *("history", "bind", "complete", "dirs", "fg", "bg", "times", "shopt", "logout", "suspend", "true"),
)


def run_words(shell: Shell, assigned: list[str], words: list[str]) -> Status:
    """A simple command as it is written: the assignments before it, and its words."""
    if words and words[0] in DECLARING:
        for word in assigned:
            shell.assignment(word)
        return declare(shell, words[0], words[1:])
    shell.state.status = 0
    expanded = shell.fields if words[:1] == ["let"] else shell.globbed  # whose signs are no names of files
    fields = [field for word in words for field in expanded(word)]
    written = tuple(map(held, fields))
    fields, loose = without_unset(shell, fields)
    if not fields:
        for word in assigned:
            shell.assignment(word)
        return shell.state.status
    if fields[0] == "time":
        fields = [field for field in fields[1:] if field != "-p"]
    if not assigned:
        return run_fields(shell, fields, loose, written)
    shell.state.frames.append({})
    for word in assigned:
        found = lexer.ASSIGNMENT.match(word)
        assert found is not None
        hide(shell, found[1])
        shell.assignment(word)
        name = shell.resolve(found[1])
        if name in shell.state.variables:
            shell.state.variables[name] = replace(shell.state.variables[name], exported=True)
    try:
        return run_fields(shell, fields, loose, written)
    finally:
        for name, variable in shell.state.frames.pop().items():
            shell.state.put(name, variable)


def without_unset(shell: Shell, fields: list[str]) -> tuple[list[str], tuple[Unknown, ...]]:
    """The words without those that are variables which nobody sets, and those that may be any options: words whose
    value is not known and which are no flag's value."""
    left: list[str] = []
    loose: list[Unknown] = []
    for field in fields:
        if len(field) == 1 and LOOSE <= ord(field) < QUOTED:
            unknown = shell.unknowns.of(field)[0]
            of_flag = bool(left) and left[-1].startswith("-") and "=" not in left[-1]
            if not of_flag and unknown.unset:
                continue
            loose += [] if of_flag else [unknown]
        left.append(held(field))
    return left, tuple(loose)


def run_fields(
    shell: Shell, fields: list[str], loose: tuple[Unknown, ...] = (), written: tuple[str, ...] = ()
) -> Status:
    """A command by its words: a function, a builtin, or a program, whose words (`written`) keep unset variables."""
    if not fields:
        return 0
    name, words = fields[0], fields[1:]
    if not known(name) and shell.evaluated and not shell.unknowns.of(name)[0].unset:
        shell.havoc("`eval` of a text that is not known")
    if name in shell.state.functions:
        return shell.call(name, words)
    if name in BUILTINS:
        return BUILTINS[name](shell, words)
    if name == "coproc":
        raise InputError(f":{shell.line}: coproc: is not read")
    if name in NOTHING:
        if name == "shopt" and "lastpipe" in words and "-s" in words:
            raise InputError(f":{shell.line}: shopt -s lastpipe: is not read")
        return 0
    if name in UTILITIES and (output := UTILITIES[name](words, shell.take_input())) is not None:
        if name in ("echo", "printf"):
            shell.show(fields)
        shell.write(output)
        return 0
    return start(shell, list(written) or fields, loose)


def start(shell: Shell, fields: list[str], loose: tuple[Unknown, ...]) -> Status:
    """A program; what it starts in turn by a shell's text, or a script that is beside this one, is followed."""
    for at, word in enumerate(fields):
        inner = _script_of_shell(fields, at, shell.take_input())
        file = None
        if inner is None and word.endswith((".sh", ".slurm", ".sbatch", ".bash")) and _starts(fields[:at]):
            file = script_of(shell, word, fields[:at])
        if inner is not None or file is not None:
            child = shell.child(fields[at + 1 :] if inner is None else inner[1])
            if at:
                shell.emit(fields[: at + 1 if inner is None else inner[2]], loose)
            try:
                if inner is not None:
                    child.run_text(inner[0], shell.source.file, shell.line)
                elif file is not None:
                    child.folder = file[0].parent
                    child.run_text(file[1], str(file[0]))
            except Exit:
                pass
            shell.state.files = child.state.files
            return None
    for at, word in enumerate(fields[1:], 1):
        if QUOTED_FLAG.match(word):
            fields = [*fields[:at], *word.split(maxsplit=1), *fields[at + 1 :]]
            return start(shell, fields, loose)
    shell.emit(fields, loose)
    if fields[0] in ("sed", "mv", "cp", "jq", "envsubst", "python", "python3") and len(fields) > 1:
        for word in fields[1:]:
            name = Path(word).name
            if name in shell.state.files and (fields[0] in ("mv", "cp") or "-i" in " ".join(fields)):
                shell.state.files[name] = shell.unknown(name, f"{fields[0]} changes it")
    if shell.out is not None:
        shell.write(shell.unknown(f"$({' '.join(map(shell.unknowns.shown, fields))})", "the output of a command"))
    return None


def _script_of_shell(fields: list[str], at: int, given: str | None) -> tuple[str, list[str], int] | None:
    """The text that `bash -c TEXT ARGUMENTS` or a command in one word runs, or a shell that reads its input (`given`);
    its arguments, and where it begins."""
    if fields[at].rpartition("/")[2] in SHELLS:
        for n, word in enumerate(fields[at + 1 :], at + 1):
            if OF_SHELL.fullmatch(word) and n + 1 < len(fields):
                return fields[n + 1], fields[n + 3 :], n + 1
            if not word.startswith(("-", "+")):
                break
    if at and QUOTED_COMMAND.match(fields[at]) and not fields[at - 1].startswith("--"):
        return fields[at], [], at
    behind = fields[at + 1 :]
    if fields[at].rpartition("/")[2] in SHELLS and given is not None:
        flags = list(takewhile(lambda word: re.fullmatch(r"[-+][a-z]+", word), behind))
        if not behind[len(flags) :] or flags[-1:] == ["-s"]:
            return given, [word for word in behind[len(flags) :] if word != "--"], len(fields)
    return None


def _starts(before: list[str]) -> bool:
    return not before or before[0].rpartition("/")[2] in STARTERS
