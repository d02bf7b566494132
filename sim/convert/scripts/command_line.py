"""Flags of a launch script, read as text and never run.

Assignments of plain values (`TP=8`, `ARGS+=" --bf16"`), `$TP`, `${TP:-8}`, `$((TP * 2))` and arrays
(`sim.convert.scripts.arrays`) are put in. Continued lines are joined, and so is a command in quotes (`bash -c "…"`).
Slurm's directives say nodes and GPUs. Branches that are not taken are blank already (`sim.convert.scripts.branches`).
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

from sim.convert.scripts.arrays import QUOTED, taken_arrays, with_arrays
from sim.core.errors import InputError

COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")  # of a shell's script
ASSIGNMENT = re.compile(
    r"(?m)(?:^|;)[ \t]*(?:(?:export|readonly|local|declare|typeset)(?:[ \t]+-\w+)*[ \t]+)?"
    r"([A-Za-z_]\w*)(\+?)=((?:\"(?:\\[\s\S]|[^\"\\])*\"|'[^']*'|[^\s();\"'])*)[ \t]*(?=;|#|$)"
)
SWITCHES = {"true": True, "false": False}  # words of a flag that is on or off
PART = re.compile(r"\"((?:\\[\s\S]|[^\"\\])*)\"|'([^']*)'")  # in quotes, of a word: `" --a "x" --b "` has two
# `$TP`, `${TP:-8}` with a default, `${TP:?message}` without one.
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*)|:?\?[^{}]*)?\}|(\w+))")
BARE = re.compile(r"\$([A-Za-z_]\w*)")
ALTERNATIVE = re.compile(r"\$\{(\w+):?\+([^{}]*)\}")  # `${SP:+--sequence-parallel}`, of a variable with a value
# `$((NODES * (8 / TP)))`, kept as `$[NODES*‹8/TP›]`: brackets of arrays are dropped before variables are put in.
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
KEPT = re.compile(r"\$\[([^\[\]]*)\]")
EXPR = re.compile(r"\$\(\s*expr\s+([^()$`]*(?:\$\{?\w+\}?[^()$`]*)*)\)|`\s*expr\s+([^`]*)`")  # $(expr 16 / $NPROC)
INNER, OUTER = str.maketrans("()", "‹›"), str.maketrans("‹›", "()")  # of brackets
NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
OF_NO_ARRAY = re.compile(r"\$\{(\w+)\[@\]")  # `${ARGS[@]}` of a plain variable
SUM = re.compile(r"[0-9+*/%()<>=!-]{1,200}")
TERNARY = re.compile(r"([^?:]+)\?([^?:]+):([^?:]+)")
OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
DIRECTIVES = re.compile(r"(?m)^#SBATCH[ \t]+(.*)$")
WORDS = re.compile(r"[^\"'`$]*\s[^\"'`$]*")  # of a default that is assigned (`RUN=${RUN:-"-m train"}`): never split
OF_EVERY_SHELL = {"HOME": "~"}
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
QUOTED_COMMAND = re.compile(r"(?s)^(?!\w+\+?=).*\s--[A-Za-z]")  # not what a variable is given
QUOTED_FLAG = re.compile(r"--[A-Za-z][\w-]*\s")  # of an array, which a shell splits again: ("--fp8-format hybrid")
OF_SHELL = re.compile(r"(?:\S*/)?(?:ba)?sh -\w*c")  # before a command in quotes
REDIRECTS = re.compile(r"[0-9&]?>|<")  # output and input, which are no flag's values
ENDS = (";", "&", "&&", "|", "||")  # of a command
SHOWN = ("echo", "printf")  # commands whose words are shown and not run
MAX_CHARACTERS = 8 * 2**20
MOST_ROUNDS = 10  # of values put in for variables
LONGEST_VALUE = 100_000  # characters of a variable that is made of itself


def words_of(file: Path, text: str, ends: bool = False) -> list[str]:
    """The words of a script, without comments and brackets, and with values for variables and arrays.

    `ends`: the end of a line is the word `;`.
    """
    preset = OF_EVERY_SHELL | slurm_values(text)
    text = re.sub(r"(?m)(^|[^\S\n])#.*$", r"\1", text)  # a comment ends with its line, also behind a backslash
    text = text.replace("\\\n", " ")
    text = kept_arithmetic(text)
    text, arrays = taken_arrays(text)
    text = re.sub(rf"{QUOTED}|[()]", lambda found: found[1] or " ", text)
    for _ in range(MOST_ROUNDS):  # a variable or an array may be made of others
        before = text
        text = with_arrays(text, arrays)
        text = OF_NO_ARRAY.sub(lambda found: found[0] if found[1] in arrays else f"${{{found[1]}", text)
        text = _with_variables(_with_earlier_values(text, preset), preset)
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"{file}: variables make it longer than {MAX_CHARACTERS:,} characters")
        if text == before:
            break
    text = re.sub(rf"{QUOTED}|\n", lambda found: found[1] or " ; ", text) if ends else text
    again = (QUOTED_COMMAND.search, QUOTED_FLAG.match)
    outer = _split(text)
    of_shells = {i + 2 for i, pair in enumerate(pairwise(outer)) if OF_SHELL.fullmatch(" ".join(pair))}
    splits = (i in of_shells or any(found(word) for found in again) for i, word in enumerate(outer))
    inner = (_split(word) if twice else [word] for word, twice in zip(outer, splits, strict=True))
    return [KEPT.sub(_as_written, word) for words in inner for word in words]


def _as_written(found: re.Match[str]) -> str:
    """A sum that could not be computed, as a script has it."""
    return f"$(({found[1].translate(OUTER)}))"


def kept_arithmetic(text: str) -> str:
    """The text with `$((…))` as `with_values` reads it, and `$(expr …)` in the same form."""
    text = EXPR.sub(lambda found: f"$(({(found[1] or found[2]).replace(chr(92), '')}))", text)
    return ARITHMETIC.sub(lambda found: f"$[{''.join(found[1].split()).translate(INNER)}]", text)


def unquoted(word: str) -> str:
    """A word of a script without quotes, where text in quotes may be between other text.

    >>> unquoted('" --a "x=1" --b"')
    ' --a x=1 --b'
    """
    return PART.sub(lambda found: found[2] if found[1] is None else found[1], word)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def slurm_flags(text: str) -> dict[str, str]:
    """Nodes, tasks and GPUs of a node or of all by the script's `#SBATCH` lines."""
    given_by = {name: unquoted(value) for name, more, value in ASSIGNMENT.findall(text) if not more}
    directives = with_values(" ".join(DIRECTIVES.findall(text)), given_by)  # those of a command `sbatch` have variables
    words = re.sub(r"(^|\s)-N[ =]?(?=\d)", r"\1--nodes=", directives)
    words = re.sub(r"(^|\s)-n[ =]?(?=\d)", r"\1--ntasks=", words)
    words = re.sub(r"(^|\s)(?:-G|--gpus)[ =]?(?:[A-Za-z]\w*:)?(?=\d)", r"\1--gpus=", words)
    words = re.sub(r"--(?:gres|gpus-per-node)[ =](?:gpu:)?(?:[A-Za-z]\w*:)?(?=\d)", "--gpus-per-node=", words)
    given = flags_of(words.split())
    return {name: given[name] for name in (*SLURM, *OF_ALL_NODES) if str(given.get(name)).isdigit()}


def slurm_values(text: str) -> dict[str, str]:
    """Variables that Slurm sets by the script's `#SBATCH` lines."""
    flags = slurm_flags(text)
    return {variable: flags[name] for variable, name in SLURM_VARIABLES.items() if name in flags}


def flags_of(words: list[str], short: bool = False, listed: Collection[str] = ()) -> dict[str, Any]:
    """Values by flag, without dashes and with `-` for `_`; True for a flag without one. `short`: one dash is enough.
    `listed`: flags with several values, which are joined by spaces; `;` ends them."""
    start = re.compile("--?[A-Za-z]" if short else "--")
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word == ";":
            name = "" if name in listed else name
        elif word == "--" or REDIRECTS.match(word):  # the end of a launcher's own flags, and what is no value
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


def _with_variables(text: str, preset: Mapping[str, str]) -> str:
    """The text with values for variables that it assigns, or of `preset`."""
    variables = dict(preset)
    for name, more, quoted in ASSIGNMENT.findall(text):
        variables[name] = variables.get(name, "") * bool(more) + unquoted(quoted)
    # One made of itself has no earlier value here, and would become longer each time.
    own = {
        name: re.sub(rf"\$(?:{name}\b|\{{{name}\}})", "", value) for name, value in variables.items() if "$" in value
    }
    return with_values(text, variables | {name: value for name, value in own.items() if value.strip()})


def with_own_values(text: str) -> str:
    """The text with values for the variables that it assigns, as often as these are made of others."""
    text = kept_arithmetic(text)
    for _ in range(MOST_ROUNDS):
        before, text = text, _with_variables(_with_earlier_values(text, {}), {})
        if text == before or len(text) > MAX_CHARACTERS:
            break
    return text


def _with_earlier_values(text: str, preset: Mapping[str, str]) -> str:
    """The text with a variable's earlier value, or its default, where it is made of itself (`TP=${TP:-8}`)."""
    earlier = dict(preset)

    def rewritten(found: re.Match[str]) -> str:
        name, more, quoted = found.groups()
        before = {name: earlier[name]} if name in earlier else {}
        value = with_values(quoted, before, {name})
        if len(value) > LONGEST_VALUE:
            return found[0]
        earlier[name] = earlier.get(name, "") * bool(more) + unquoted(value)
        value = f'"{value}"' if WORDS.fullmatch(value) else value
        return found[0][: found.start(3) - found.start()] + value + found[0][found.end(3) - found.start() :]

    return ASSIGNMENT.sub(rewritten, text)


def with_values(text: str, variables: Mapping[str, str], only: Collection[str] | None = None) -> str:
    """The text with values for these variables, and defaults (`${TP:-8}`) for others that have one. `only`: defaults
    of these alone.

    >>> with_values("$TP ${PP:-2} ${SP:+--sp}${CP:+--cp}", {"TP": "8", "SP": "1", "CP": ""})
    '8 2 --sp'
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        if name in variables:
            return BARE.sub(r"${\1}", variables[name])  # which may stand before letters: `${OF}_x`, of OF=$TP
        has_default = default is not None and (only is None or name in only)
        return default.strip("\"'") if has_default else found[0]

    def alternative(found: re.Match[str]) -> str:
        return found[0] if found[1] not in variables else found[2].strip("\"'") if variables[found[1]] else ""

    def number(found: re.Match[str]) -> str:
        result = _computed(NAME.sub(lambda name: variables.get(name[1], name[0]), found[1].translate(OUTER)))
        return found[0] if result is None else str(result)

    return KEPT.sub(number, VARIABLE.sub(value, ALTERNATIVE.sub(alternative, text)))


def _computed(terms: str) -> int | None:
    """Whole numbers added, multiplied, divided and compared as a shell does; None where that is no number."""
    if chosen := TERNARY.fullmatch(terms):
        test = _computed(chosen[1])
        return None if test is None else _computed(chosen[2 if test else 3])
    if not SUM.fullmatch(terms):
        return None
    try:
        return _value(ast.parse(terms.replace("//", "?").replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, operation, right) | ast.Compare(left, [operation], [right]):
            if type(operation) in OPERATIONS:
                return int(OPERATIONS[type(operation)](_value(left), _value(right)))
    raise ValueError
