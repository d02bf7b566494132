"""What a shell remembers while its script is followed: variables, functions, files that it wrote; and how it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from sim.convert.scripts.unknown import Site, Unknown, Unknowns
from sim.core.errors import InputError

if TYPE_CHECKING:
    from tree_sitter import Node

    from sim.convert.scripts.parser import Source

MOST_STEPS = 50_000  # statements and rounds
MOST_WRITTEN = 2**24  # characters of all values
ALWAYS_SET = frozenset(  # by bash itself (its manual, "Bash Variables")
    [
        "BASHPID",
        "BASH_SOURCE",
        "BASH_VERSION",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
        "HOME",
        "HOSTNAME",
        "LINENO",
        "OLDPWD",
        "OSTYPE",
        "PIPESTATUS",
        "PPID",
        "PWD",
        "RANDOM",
        "SECONDS",
        "SHLVL",
        "UID",
    ]
)


class Variable(Struct, frozen=True):
    """`value`: None where it is declared and unset; `items`: of an array, by key; `keyed`: by texts."""

    value: str | None = None
    items: Mapping[str, str] | None = None
    keyed: bool = False
    exported: bool = False
    integer: bool = False
    readonly: bool = False
    refers: str | None = None

    def with_items(self, items: Mapping[str, str]) -> Variable:
        if not self.keyed and all(key.isdigit() for key in items):
            items = dict(sorted(items.items(), key=lambda item: int(item[0])))
        return replace(self, value=None, items=items)


def as_items(variable: Variable) -> Mapping[str, str]:
    if variable.items is not None:
        return variable.items
    return {} if variable.value is None else {"0": variable.value}


class Command(Struct, frozen=True):
    """A command that a script starts, with the variables that it sees. `sites`: open tests on which it depends;
    `loose`: words of it that may be any options; `unknown`: parts of words that are not known, without unset
    variables."""

    words: tuple[str, ...]
    line: int
    file: str
    environment: Mapping[str, str]
    sites: frozenset[Site] = frozenset()
    loose: tuple[Unknown, ...] = ()
    unknown: frozenset[str] = frozenset()


class State(Struct):
    """`arguments`: None where nobody says them; `anything`: any variable may be set; `fails`, `exports`,
    `pipes_fail`, `globs`: of `set -e`, `set -a`, `set -o pipefail` and not `set -f`; `frames`: what functions' own
    variables hide; `status`: None if not known."""

    variables: dict[str, Variable]
    functions: dict[str, tuple[Source, Node] | None] = field(default_factory=dict)
    arguments: list[str] | None = None
    files: dict[str, str] = field(default_factory=dict)
    frames: list[dict[str, Variable | None]] = field(default_factory=list)
    traps: dict[str, str] = field(default_factory=dict)
    status: int | None = 0
    anything: bool = False
    fails: bool = False
    exports: bool = False
    pipes_fail: bool = False
    globs: bool = True
    option_at: int = 0  # of getopts, within a word

    def copied(self) -> State:
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            arguments=None if self.arguments is None else list(self.arguments),
            files=dict(self.files),
            frames=[dict(frame) for frame in self.frames],
            traps=dict(self.traps),
        )

    def put(self, name: str, variable: Variable | None) -> None:
        if variable is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = variable


class Limits:
    """How much a script may do before it is refused."""

    def __init__(self) -> None:
        self.steps = self.written = 0

    def step(self, file: str, line: int) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise InputError(
                f"{file}:{line}: runs more than {MOST_STEPS:,} statements: give by --var what they compute"
            )

    def write(self, line: int, characters: int) -> None:
        self.written += characters
        if self.written > MOST_WRITTEN:
            raise InputError(f":{line}: the script's values become longer than {MOST_WRITTEN:,} characters in all")


class Exit(Exception):
    """The shell ends."""


class Return(Exception):
    """A function or a sourced file ends."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status


class Loop(Exception):
    """So many loops end, or go on with their next rounds."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels


class Break(Loop): ...


class Continue(Loop): ...


class MustChoose(Exception):
    """An open test decides where the script goes on, so that its branches cannot be read as one."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site


def merged(states: list[State], site: Site, line: int, unknowns: Unknowns) -> State:
    """One state for all of the branches that ended: what they left different is not known."""
    first = states[0]
    if len(states) == 1:
        return first

    def differing(kinds: list[Mapping[str, object]]) -> Iterable[str]:
        for name in dict.fromkeys(name for kind in kinds for name in kind):
            if any(kind.get(name) != kinds[0].get(name) for kind in kinds[1:]):
                yield name

    def mark(shown: str, texts: Iterable[str]) -> str:
        sites = frozenset({site}) | unknowns.sites(*texts)
        return unknowns.mark(Unknown(shown, f"depends on `{site.test[:60]}`", line, sites=sites))

    if any(state.arguments != first.arguments for state in states):
        raise MustChoose(site)
    found = first.copied()
    for name in differing([state.variables for state in states]):
        own = [state.variables[name] for state in states if name in state.variables]
        texts = [text for one in own for text in as_items(one).values()]
        exported = any(one.exported for one in own)
        found.variables[name] = Variable(mark(f"${name}", texts), exported=exported)
    for name in differing([state.functions for state in states]):
        found.functions[name] = None
    for name in differing([state.files for state in states]):
        found.files[name] = mark(name, [state.files.get(name, "") for state in states])
    found.anything = any(state.anything for state in states)
    for key in ("fails", "exports", "pipes_fail"):
        setattr(found, key, all(getattr(state, key) for state in states))
    found.status = None
    return found
