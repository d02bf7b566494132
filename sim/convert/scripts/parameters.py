"""Parameters of a shell: what names stand for, and how assignments change it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from sim.convert.scripts import lexer
from sim.convert.scripts.arithmetic import Problem
from sim.convert.scripts.conditions import Tests
from sim.convert.scripts.expansion import Expansion, unquoted_glob
from sim.convert.scripts.parser import Source
from sim.convert.scripts.shared import Shared
from sim.convert.scripts.state import ALWAYS_SET, State, Variable, as_items
from sim.convert.scripts.unknown import Site, Unknown, held, known
from sim.core.errors import InputError

Status = int | None
Thunk = Callable[[], Status]


class Parameters(Expansion):
    """A shell's state. `shared`: of all shells of a script."""

    def __init__(self, folder: Path, shared: Shared, state: State, depth: int = 0) -> None:
        self.folder, self.shared, self.state, self.depth = folder, shared, state, depth
        self.unknowns = shared.unknowns
        self.tests = Tests(self.unknowns, self._is_set, lambda name: Path(name).name in self.state.files)
        self.line = 1
        self.source = Source("", "", 1, [])
        self.out: list[str] | None = None
        self.input: list[str] | None = None  # what `read` has not yet taken
        self.tested = 0  # tests around the statement, in which `set -e` does not hold
        self.evaluated = self.looping = self.called = 0  # texts of `eval`, loops, functions and sourced files around it
        self.because: frozenset[Site] = frozenset()  # open tests that leave this one open

    def resolve(self, name: str) -> str:
        for _ in range(10):
            found = self.state.variables.get(name)
            if found is None or found.refers is None:
                return name
            name = found.refers
        raise InputError(f":{self.line}: {name}: refers to itself")

    def elements(self, name: str, index: str | None) -> list[str] | None:
        own = self.state.arguments
        if name in ("@", "*"):
            return list(own or [])
        if name == "#":
            return [str(len(own or []))]
        if name == "?":
            return [self._unknown_status() if self.state.status is None else str(self.state.status)]
        if name in ("0", "$", "!", "-", "_"):
            return [self.unknown(f"${name}", "known to the running shell only")]
        if name.isdigit():
            at = int(name) - 1
            return None if own is None or at >= len(own) else [own[at]]
        found = self.state.variables.get(name := self.resolve(name))
        if found is None and (name in ALWAYS_SET or self.state.anything):
            return [self.unknown(f"${name}", "known to the running shell only")]
        if found is None:
            return [] if index in ("@", "*") else None
        if index is None and found.items is None:
            return None if found.value is None else [found.value]
        items = as_items(found)
        if index in ("@", "*"):
            return list(items.values())
        key = self.key(found, index or "0")
        if not known(key):
            return [self.unknown(f"${{{name}[{index}]}}", "an element whose index is not known", key, *items.values())]
        if key not in items and any(not known(item) and len(item) == 1 for item in items.values()) and not found.keyed:
            return [self.unknown(f"${{{name}[{index}]}}", "an element that is not known", *items.values())]
        return [items[key]] if key in items else None

    def keys_of(self, name: str) -> list[str]:
        found = self.state.variables.get(self.resolve(name))
        return [] if found is None else list(as_items(found))

    def key(self, variable: Variable | None, index: str) -> str:
        """The key of an element, whose index is arithmetic unless the array has texts for keys."""
        if variable is not None and variable.keyed:
            return self.text(index)
        try:
            number = self.calculated(index)
        except Problem:
            number = None
        if number is None:
            return self.unknown(index, "an index that is not known", self.text(index, quoted=True))
        items = as_items(variable) if variable is not None else {}
        return str(number if number >= 0 else max(map(int, items), default=-1) + 1 + number)

    def is_set_by_nobody(self, name: str) -> bool:
        if name.isdigit():
            return self.state.arguments is None
        return self.resolve(name) not in self.state.variables

    def _is_set(self, name: str) -> bool | None:
        plain, _, index = name.partition("[")
        values = self.elements(plain, index.rstrip("]") or None)
        return values is not None and (None if values and not known(*values) else True)

    def separators(self) -> str:
        found = self.state.variables.get("IFS")
        if found is None:
            return " \t\n"
        if not known(found.value or ""):
            raise InputError(f":{self.line}: IFS has a value that is not known")
        return found.value or ("" if found.value == "" else " \t\n")

    def assign(self, name: str, index: str | None, value: str) -> None:
        self.set(name, index, value, adds=False)

    def set(self, name: str, index: str | None, value: str, adds: bool) -> None:
        """Give a variable or an element its value, as its attributes want it."""
        name = self.resolve(name)
        own = self.state.variables.get(name) or Variable()
        if name in self.shared.given:
            return
        if own.readonly:
            raise InputError(f":{self.line}: {name}: is read-only, and is assigned")
        if own.integer and known(value):
            try:
                number = self.calculated(f"{value} + ({(self.elements(name, index) or ['0'])[0]})" if adds else value)
            except Problem:
                number = None
            value, adds = self.unknown(f"${name}", "a sum that is not known") if number is None else str(number), False
        if len(value) == 1 and not known(value) and not (of := self.unknowns.of(value)[0]).unset and index is None:
            value = self.unknowns.mark(replace(of, shown=f"${name}"))
        before = ""
        if index is None and own.items is None:
            before = (own.value or "") if adds else ""
            changed = replace(own, value=self.bounded(before + value))
        else:
            items, key = as_items(own), self.key(own, index or "0")
            if not known(key):
                items = {each: self.unknown(f"${{{name}[{each}]}}", "an element that is not known") for each in items}
            else:
                before = items.get(key, "") if adds else ""
                items = {**items, key: self.bounded(before + value)}
            changed = own.with_items(items)
        self.shared.limits.write(self.line, len(before) + len(value))
        self.state.variables[name] = replace(changed, exported=own.exported or self.state.exports)

    def set_array(self, name: str, raw: str, adds: bool, keyed: bool) -> None:
        """`NAME=(…)`."""
        name = self.resolve(name)
        own = self.state.variables.get(name) or Variable()
        own = replace(own, keyed=own.keyed or keyed)
        items = dict(as_items(own)) if adds else {}
        following = max((int(key) for key in items if key.isdigit()), default=-1) + 1
        bare: list[str] = []
        for _, word in lexer.words(raw):
            found = re.match(r"\[((?:[^\]\[]|\[[^\]]*\])+)\](\+?)=", word)
            if found:
                key = self.key(own.with_items(items), found[1])
                items[key] = items.get(key, "") * bool(found[2]) + self.text(word[found.end() :])
                following = int(key) + 1 if key.isdigit() else following
                continue
            fields = self.globbed(word)
            bare += fields if own.keyed else []
            for field in [] if own.keyed else fields:
                items[str(following)] = held(field) if len(field) > 1 else field
                following += 1
        items |= dict(zip(bare[::2], bare[1::2], strict=False))
        if name in self.shared.given:
            return
        if own.readonly:
            raise InputError(f":{self.line}: {name}: is read-only, and is assigned")
        self.shared.limits.write(self.line, sum(map(len, items.values())) + len(items))
        self.state.variables[name] = replace(own.with_items(items), exported=own.exported or self.state.exports)

    def assignment(self, word: str, keyed: bool = False) -> None:
        """A written assignment."""
        found = lexer.ASSIGNMENT.match(word)
        assert found is not None
        name, index, adds, raw = found[1], found[2], bool(found[3]), word[found.end() :]
        if raw.startswith("(") and raw.endswith(")"):
            self.set_array(name, raw[1:-1], adds, keyed)
        else:
            self.set(name, index, self.text(raw), adds)

    def havoc(self, reason: str) -> None:
        """Forget all variables."""
        for name, own in self.state.variables.items():
            if name not in self.shared.given:
                value = self.unknowns.mark(Unknown(f"${name}", reason, self.line))
                self.state.variables[name] = Variable(value, exported=own.exported)
        self.state.anything = True

    def globbed(self, raw: str) -> list[str]:
        """The words of a written word, where a pattern of file names is not known."""
        fields = self.fields(raw)
        if not self.state.globs or not unquoted_glob(raw):
            return fields
        return [self.unknown(self.unknowns.shown(field), "names of files", field) for field in fields]

    def _unknown_status(self) -> str:
        return self.unknown("$?", "whether a program succeeds")
