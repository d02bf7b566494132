"""A launch script as what it starts: commands with their words, the variables that they see, files that it writes.

A test that the script leaves open is tried both ways where the result depends on it. Where all ways say the same
scenario, or only one of them says any, that is the reading; else the user has to say which one runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.convert.scripts.command_line import slurm_values
from sim.convert.scripts.commands import run_fields, run_words
from sim.convert.scripts.script_data import Script
from sim.convert.scripts.shared import Shared, directives_of
from sim.convert.scripts.shell import Shell
from sim.convert.scripts.state import Command, Exit, MustChoose, State, Variable, as_items
from sim.convert.scripts.unknown import MARK, Site
from sim.convert.settings import Converted
from sim.core.errors import InputError

NAME = re.compile(r"[A-Za-z_]\w*")
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*|\d|[@*])")
MOST_KEYS = 4  # that a message names
MOST_PATHS = 100  # that are followed
Choices = Mapping[Site, int]
Convert = Callable[[Script], Converted]


class Given(Struct, frozen=True):
    """Hold what --var and --args say: values of `variables`, which the script's own assignments do not change, and its
    `arguments`; None without --args."""

    variables: Mapping[str, str] = {}
    arguments: tuple[str, ...] | None = None


class Path_(Struct, frozen=True):
    """Choices between branches, and what the script says by them."""

    choices: Choices
    script: Script
    found: Converted | InputError


def given_values(variables: tuple[str, ...], arguments: str | None) -> Given:
    """The values of `--var NAME=VALUE` and `--args 'FIRST SECOND'`.

    Raises:
        InputError: for a variable without a name or a value, or an open quote.
    """
    found: dict[str, str] = {}
    for text in variables:
        name, separator, value = text.partition("=")
        if not separator or not NAME.fullmatch(name):
            raise InputError(f"--var: found '{text[:60]}'; must be NAME=VALUE, such as MODEL_SIZE=7B")
        found[name] = value
    try:
        return Given(found, None if arguments is None else tuple(shlex.split(arguments)))
    except ValueError as error:
        raise InputError(f"--args: found '{str(arguments)[:60]}': {error}") from None


def followed(file: Path, text: str, given: Given, choices: Choices | None = None) -> Script:
    """What the script starts. `choices`: branches of its open tests.

    Raises:
        InputError: for what the interpreter refuses, with the line.
        MustChoose: for a test that is to be among the choices.
    """
    if MARK.search(text):
        raise InputError(f"{file}: has characters of Unicode's private planes, which no script needs")
    shared = Shared(given.variables, choices or {}, run_fields, run_words)
    shared.directives = directives_of(text)
    preset = {**slurm_values(shared.directives), **given.variables}
    arguments = None if given.arguments is None else list(given.arguments)
    state = State({name: Variable(value) for name, value in preset.items()}, arguments=arguments)
    shell = Shell(file.parent, shared, state)
    try:
        with suppress(Exit):
            shell.run_text(text, str(file))
        if shell.state.traps.get("EXIT"):
            shell.run_text(shell.state.traps["EXIT"], str(file))
    except Exit:
        pass
    except RecursionError:
        raise InputError(f"{file}: is nested too deeply") from None
    texts = {str(file): text, **shared.texts}
    all_text = "\n".join(texts.values())
    if unknown := [name for name in given.variables if not re.search(rf"\b{name}\b", all_text)]:
        raise InputError(f"{file}: --var: the file has no variable {unknown[0]}")
    return _script(shell, texts, preset)


def _script(shell: Shell, texts: Mapping[str, str], preset: Mapping[str, str]) -> Script:
    shared, own = shell.shared, shell.state.variables
    last = {
        name: " ".join(as_items(one).values())
        for name, one in own.items()
        if name not in preset or name in shared.given
        if one.value is not None or one.items is not None
    }
    commands = shared.commands
    for before, after in pairwise(commands):
        if after.words[0].startswith("--") and not before.words[0].startswith("-"):
            why = "begins a command: the line before it is not continued, or ends with a comment"
            raise InputError(f"{after.file}:{after.line}: {after.words[0]}: {why}")
    if not any(word.startswith("-") for command in commands for word in command.words):
        commands = [*commands, *shared.shown]
    if not commands and last:  # a file that others source
        words = tuple(chain.from_iterable(shell.unknowns.shown(value).split() for value in last.values()))
        commands = [Command(words, 1, "", shell.environment(), shell.unknowns.sites(*last.values()))]
    return Script(
        texts=texts,
        commands=tuple(commands),
        variables={name: shell.unknowns.shown(value) for name, value in last.items()},
        exported=frozenset(name for name, one in own.items() if one.exported),
        files={shell.unknowns.shown(name): shell.unknowns.shown(value) for name, value in shell.state.files.items()},
        directives=tuple(shared.directives),
        absent=tuple(dict.fromkeys(shared.absent)),
    )


def overview(file: Path, text: str, given: Given) -> Script:
    """The script with all branches of its open tests, to tell whose it is."""
    choices: dict[Site, int] = {}
    found: list[Script] = []
    for _ in range(MOST_PATHS):
        try:
            found.append(followed(file, text, given, choices))
            if not choices:
                break
        except MustChoose as must:
            choices[must.site] = 0
            continue
        last = next((site for site in reversed(choices) if choices[site] == 0), None)
        if last is None:
            break
        choices = {site: n for site, n in choices.items() if site != last} | {last: 1}
        if len(found) > 8:
            break
    if not found:
        raise InputError(f"{file}: leaves more than {MOST_PATHS} tests open: {WAY_OUT}")
    return replace(found[0], commands=tuple(chain.from_iterable(one.commands for one in found)))


WAY_OUT = "give its variables by --var NAME=VALUE, or keep only the branches that run in the file"


def read_script(file: Path, text: str, given: Given, convert: Convert) -> Converted:
    """The script's reading, by `convert` of what it starts.

    Raises:
        InputError: for a test that decides about the scenario and that the file leaves open, for options that are not
            known, and as `convert` does.
    """
    paths = _Paths(file, text, given, convert)
    found = paths.explored({})
    said = [path for path in found if isinstance(path.found, Converted)]
    if not said:
        raise next(path.found for path in found if isinstance(path.found, InputError))
    first = said[0]
    assert isinstance(first.found, Converted)
    scenarios = [path.found.scenario for path in said if isinstance(path.found, Converted)]
    if keys := {key for scenario in scenarios for key in _differing(scenarios[0], scenario)}:
        raise InputError(_open(text, [path.choices for path in said], keys))
    paths.require_known(first)
    started = {command.words for command in first.script.commands}
    refused = [
        path
        for path in found
        if isinstance(path.found, InputError) and any(one.words not in started for one in path.script.commands)
    ]
    known = {part for command in first.script.commands for part in command.unknown}
    for path in refused:
        if any(command.unknown - known for command in path.script.commands):
            raise InputError(_of_refused(first.choices, path))
    notes = [_of_refused(first.choices, path) for path in refused]
    return replace(first.found, notes=(*first.found.notes, *dict.fromkeys(notes)))


class _Paths:
    """The ways through a script."""

    def __init__(self, file: Path, text: str, given: Given, convert: Convert) -> None:
        self.file, self.text, self.given, self.convert = file, text, given, convert
        self.count = 0

    def explored(self, choices: Choices) -> list[Path_]:
        """All ways that may differ, from these choices on."""
        path = self._path(choices)
        if isinstance(path, Site):
            return [each for n in (0, 1) for each in self.explored({**choices, path: n})]
        site = next(_sites(path.script, choices), None)
        if site is None:
            return [path]
        ways = [self._path({**choices, site: n}) for n in (0, 1)]
        results = [way.found for way in ways if isinstance(way, Path_)]
        same = [one.scenario for one in results if isinstance(one, Converted)]
        if len(same) == 2 and same[0] == same[1]:
            return self.explored({**choices, site: 0})
        return [each for n in (0, 1) for each in self.explored({**choices, site: n})]

    def _path(self, choices: Choices) -> Path_ | Site:
        self.count += 1
        if self.count > MOST_PATHS:
            raise InputError(f"{self.file}: leaves too many tests open: {WAY_OUT}")
        try:
            script = followed(self.file, self.text, self.given, choices)
        except MustChoose as must:
            return must.site
        return Path_(choices, script, self._converted(script))

    def _converted(self, script: Script) -> Converted | InputError:
        try:
            return self.convert(script)
        except InputError as error:
            return InputError(script.placed(self.file, str(error)))

    def require_known(self, path: Path_) -> None:
        """Refuse a command that is read, and whose options are not all known."""
        assert isinstance(path.found, Converted)
        for at, command in enumerate(path.script.commands):
            if not command.loose:
                continue
            commands = path.script.commands
            without = self._converted(replace(path.script, commands=commands[:at] + commands[at + 1 :]))
            if isinstance(without, InputError) or without.scenario != path.found.scenario:
                unknown = command.loose[0]
                name = VARIABLE.fullmatch(unknown.shown)
                way = f"give --var {name[1]}='…'" if name else "write its value into the file"
                why = f"{unknown.shown} may hold further options, and is not known ({unknown.reason})"
                raise InputError(f"{command.file}:{command.line}: {why}: {way}")


def _sites(script: Script, choices: Choices) -> Iterator[Site]:
    """Open tests on which commands depend, in their order."""
    return (site for command in script.commands for site in sorted(command.sites) if site not in choices)


def _of_refused(choices: Choices, path: Path_) -> str:
    """The note on a branch that would start what cannot be converted."""
    site = next((site for site, n in path.choices.items() if choices.get(site, n) != n), None)
    where = "" if site is None else f"{site.file}:{site.line}: the file does not decide `{site.test[:60]}`: "
    return f"{where}one of its branches cannot be read: {path.found}"


def _differing(one: Any, other: Any, path: str = "") -> set[str]:
    """Keys whose values differ, with their sections."""
    if not (isinstance(one, dict) and isinstance(other, dict)) or path.count(".") > 1:
        return set() if one == other else {path}
    return {
        found
        for key in one.keys() | other.keys()
        for found in _differing(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    }


def _open(text: str, ways: list[Choices], differing: set[str]) -> str:
    """Return the message for tests that the file leaves open although keys (`differing`) depend on them."""
    keys = sorted(differing)
    more = f" and {len(keys) - MOST_KEYS} more keys" if len(keys) > MOST_KEYS else ""
    sites = [site for site in dict.fromkeys(chain(*ways)) if len({way.get(site) for way in ways}) > 1]
    tests = ", ".join(f"`{site.test[:60]}`" for site in sites[:8])
    problem = f"the file does not decide {tests}, and {', '.join(keys[:MOST_KEYS])}{more} depend on it"
    return f"{sites[0].file}:{sites[0].line}: {problem}: {_advice(text, sites)}"


def _advice(text: str, sites: list[Site]) -> str:
    """Return how a user decides the tests: by --var, --args, or by editing the file."""
    names = dict.fromkeys(name for site in sites for name in VARIABLE.findall(site.test))
    named = [name for name in names if NAME.fullmatch(name)]
    assigned = [re.search(rf"(?m)\b{name}=[\"']?\$\{{?[\d@*]", text) for name in named]
    ways = [f"--var {' --var '.join(f'{name}=VALUE' for name in named)}"] if named else []
    if len(named) < len(names) or any(assigned):
        ways.append("--args 'FIRST SECOND …', the script's arguments")
    return f"give {' or '.join(ways)}" if ways else "keep only the branch that runs in the file"
