"""A launch script, followed statement by statement without running anything: which commands it starts, and with what.

Exact, in bash's own order of evaluation: assignments (plain, `+=`, arrays, keyed arrays, `local`, `declare` with
-a -A -g -i -n -r -x, `export`, `unset`, before a command), all expansions of words, arithmetic, tests, patterns, lists,
groups, subshells, background commands, pipelines, `if`, `case`, all loops, functions with arguments, `return`, `exit`,
`break`, `set --`, `set -e`, `set -a`, `shift`, `getopts`, `read`, `mapfile`, `printf -v`, `let`, `eval`, `source`,
here-documents, files that the script writes, `trap … EXIT`, `bash -c` and scripts beside it that it starts, and the
output of echo, printf, cat, seq, expr, bc, wc, tr, cut, head, tail, basename, dirname. A loop has a bounded number of
rounds, a value a bounded number of characters.

Not known, and carried on as `sim.convert.scripts.unknown` has it: variables that nobody sets (taken to be unset where
a default or a test of emptiness asks), what other programs write and whether they succeed, files and their names. A
test that is not known runs all its branches, and what they leave different is not known after it. A file that is
sourced and not there, and an `eval` of what is not known, leave no variable known. Refused, with the line: text that
is no bash, assignments to read-only variables, `trap … DEBUG` and `ERR`, `coproc`, `shopt -s lastpipe`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.convert.scripts import lexer
from sim.convert.scripts.arithmetic import Problem
from sim.convert.scripts.conditions import Tests, both, either, negated, of_classes
from sim.convert.scripts.expansion import Expansion, unquoted_glob
from sim.convert.scripts.parser import HEREDOC, Heredoc, Source
from sim.convert.scripts.state import (
    ALWAYS_SET,
    Break,
    Command,
    Exit,
    Limits,
    Loop,
    MustChoose,
    Return,
    State,
    Variable,
    as_items,
    merged,
)
from sim.convert.scripts.unknown import LOOSE, Site, Unknown, Unknowns, held, known
from sim.core.errors import InputError
from sim.core.files import read_text

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_BYTES = 2**20
DIRECTIVES = re.compile(r"(?m)^#SBATCH[ \t]+(.*)$")
MOST_ROUNDS = 10_000
DEEPEST = 60
LEADING = re.compile(r"(?:\w+=\S*\s+)*")
OF_REGEX = re.compile(r"\[:(\w+):\]")
OPERATORS = ("&&", "||", "!", "(", ")", "==", "=", "!=", "=~", "<", ">", "-eq", "-ne", "-gt", "-ge", "-lt", "-le")
Status = int | None
Thunk = Callable[[], Status]


class Redirect(Struct, frozen=True):
    """`sign` is without the descriptor, which is `fd`."""

    fd: str
    sign: str
    target: str


class Shell(Expansion):
    """One shell: the state, and how each kind of statement changes it. `shared`: of all shells of a script."""

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

    # Parameters

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

    # Statements

    def run_text(self, text: str, file: str, first_line: int = 1) -> Status:
        """A script's statements."""
        if self.depth > DEEPEST:
            raise InputError(f"{file}:{first_line}: scripts and functions start each other without end")
        outer = self.source, self.line
        self.source = self.shared.parsed(file, text, first_line)
        self.depth += 1
        try:
            return self.several(self.source.root.children)
        except InputError as error:
            raise _placed(error, self.source.file) from None
        finally:
            self.source, self.line = outer
            self.depth -= 1

    def several(self, nodes: list[Node]) -> Status:
        """Statements one after another; those before `&` in a shell of their own."""
        for at, node in enumerate(nodes):
            if not node.is_named or node.type == "comment":
                continue
            if at + 1 < len(nodes) and nodes[at + 1].type == "&":
                self.apart(lambda node=node: self.one(node))  # type: ignore[misc]
                self.state.status = 0
            else:
                self.state.status = self.one(node)
            if self.state.status and self.state.fails and not self.tested and node.type != "list":
                raise Exit
        return self.state.status

    def one(self, node: Node) -> Status:
        """A statement; returns its status, None where it is not known."""
        self.line = self.source.line_of(node)
        self.shared.limits.step(self.source.file, self.line)
        run = KINDS.get(node.type)
        if run is None:
            raise InputError(f":{self.line}: {self.source.text_of(node)[:40]}: is not read")
        try:
            return run(self, node)
        except Problem as problem:
            raise InputError(f":{self.line}: {problem}: arithmetic that bash refuses, too") from None

    def children(self, node: Node) -> list[Node]:
        return [child for child in node.children if child.is_named and child.type != "comment"]

    def group(self, node: Node) -> Status:
        if node.children[0].type == "((":
            return self.sum_status(self.source.between(node.children[0].end_byte, node.children[-1].start_byte))
        return self.several(node.children)

    def sum_status(self, text: str) -> Status:
        number = self.calculated(text)
        if number is None:
            self.because |= self.unknowns.sites(*(self.number_text(name, None) for name in lexer.NAME.findall(text)))
        return None if number is None else int(not number)

    def subshell(self, node: Node) -> Status:
        return self.apart(lambda: self.several(node.children))

    def apart(self, run: Thunk) -> Status:
        """What runs in a shell of its own, of which files alone remain."""
        before = self.state
        self.state = before.copied()
        try:
            status = run()
        except Exit:
            status = self.state.status
        finally:
            files = self.state.files
            self.state = before
            self.state.files = files
        return status

    def listed(self, node: Node) -> Status:
        """`A && B`, `A || B`."""
        left, sign, right = node.children[0], node.children[1].type, node.children[-1]
        status = self.condition([left])
        self.state.status = status
        if status is None:
            if (
                sign == "&&"
                and not self.source.text_of(left).rstrip().endswith(("]", "))"))
                and self.only_starts(right)
            ):
                return None
            self.line = self.source.line_of(left)
            site = self.site(left, f"{self.source.text_of(left)} {sign}")
            return self.decide(site, [lambda: self.one(right), lambda: int(sign == "&&")])
        if (status == 0) is not (sign == "&&"):
            return status
        status = self.one(right)
        if status and self.state.fails and not self.tested and right.type != "list":
            raise Exit
        return status

    def only_starts(self, node: Node) -> bool:
        """Run what stands behind a program that is taken to succeed, if it starts others and changes nothing."""
        before, started, wrote = self.state, len(self.shared.commands), len(self.out or [])
        self.state = before.copied()
        try:
            self.one(node)
            same = ("variables", "functions", "arguments", "files", "traps")
            if all(getattr(before, name) == getattr(self.state, name) for name in same):
                return True
        except (Exit, Return, Loop, MustChoose):
            pass
        self.state = before
        del self.shared.commands[started:]
        if self.out is not None:
            del self.out[wrote:]
        return False

    def condition(self, nodes: list[Node]) -> Status:
        self.tested += 1
        try:
            return self.several(nodes)
        finally:
            self.tested -= 1

    def inverted(self, node: Node) -> Status:
        status = self.condition([node.children[-1]])
        return None if status is None else int(not status)

    def pipeline(self, node: Node) -> Status:
        """Each command reads what the one before wrote, all in shells of their own."""
        outer, status = self.input, None
        out, parts = self.out, self.children(node)
        try:
            for at, part in enumerate(parts):
                self.out = [] if at + 1 < len(parts) else out
                status = self.apart(lambda part=part: self.one(part))  # type: ignore[misc]
                self.input = ["".join(self.out or [])] if at + 1 < len(parts) else self.input
        finally:
            self.input, self.out = outer, out
        return status

    def if_statement(self, node: Node) -> Status:
        return self._if(node.children)

    def _if(self, nodes: list[Node]) -> Status:
        then = next(at for at, child in enumerate(nodes) if child.type == "then")
        body = [child for child in nodes[then + 1 :] if child.type not in ("elif_clause", "else_clause", "fi")]
        others = [child for child in nodes if child.type in ("elif_clause", "else_clause")]
        status = self.condition(nodes[1:then])

        def otherwise() -> Status:
            if not others:
                return 0
            if others[0].type == "else_clause":
                return self.several(others[0].children[1:]) if len(others[0].children) > 1 else 0
            return self._if([*others[0].children, *others[1:]])

        if status is None:
            self.line = self.source.line_of(nodes[1])
            words = self.source.between(nodes[1].start_byte, nodes[then].start_byte).strip().rstrip(";")
            return self.decide(self.site(nodes[1], words), [lambda: self.several(body), otherwise])
        return self.several(body) if status == 0 else otherwise()

    def case(self, node: Node) -> Status:
        """`case WORD in …`; `;&` goes on with the next clause, `;;&` with the next pattern that matches."""
        items = [child for child in node.children if child.type == "case_item"]
        first = next(child for child in node.children if child.type == "in")
        raw = self.source.between(node.children[0].end_byte, first.start_byte).strip()
        return self._case(node, items, self.text(raw), raw, falls=False)

    def _case(self, node: Node, items: list[Node], subject: str, raw: str, falls: bool) -> Status:
        for at, item in enumerate(items):
            bracket = next(n for n, child in enumerate(item.children) if child.type == ")")
            written = self.source.between(item.start_byte, item.children[bracket].start_byte).strip()
            patterns = lexer.split_at(written.removeprefix("("), "|")
            verdict: bool | None = falls
            for pattern in patterns if not falls else []:
                verdict = either(verdict, self._matches(subject, pattern.strip()))
            ends = item.children[-1].type
            rest = items[at + 1 :]

            def run(item: Node = item, bracket: int = bracket, ends: str = ends, rest: list[Node] = rest) -> Status:
                status = self.several([n for n in item.children[bracket + 1 :] if n.type not in (";;", ";&", ";;&")])
                goes_on = ends in (";&", ";;&") and rest
                return self._case(node, rest, subject, raw, ends == ";&") if goes_on else status

            if verdict is None:
                self.because |= self.unknowns.sites(subject)
                site = self.site(item, f"case {raw} in {written}", node)
                return self.decide(site, [run, lambda rest=rest: self._case(node, rest, subject, raw, False)])  # type: ignore[misc]
            if verdict:
                return run()
        return 0

    def _matches(self, subject: str, raw: str) -> bool | None:
        pattern = self.pattern(raw)
        if pattern == ".*":
            return True
        if not known(subject):
            plain = self.unknowns.without_unset(subject)
            return True if not plain and raw in ("''", '""') else None
        return self.tests.of_two(subject, "==", "", pattern) if known(pattern) else None

    # Loops

    def for_loop(self, node: Node) -> Status:
        body = node.children[-1]
        place = next(at for at, child in enumerate(node.children) if child.type == "variable_name")
        name = self.source.text_of(node.children[place])
        values = [child for at, child in enumerate(node.children) if node.field_name_for_child(at) == "value"]
        if values:
            raw = self.source.between(values[0].start_byte, values[-1].end_byte)
            items = [field for _, word in lexer.words(raw) for field in self.globbed(word)]
        else:
            items = [] if node.children[place + 1].type == "in" else list(self.state.arguments or [])
        items = [item for item in items if self.unknowns.without_unset(item) or known(item)]
        several = [item for item in items if (len(item) == 1 and ord(item) >= LOOSE) or self._of_files(item)]
        if node.children[0].type == "select" or several:
            shown = self.source.text_of(node).partition("\n")[0][:60]
            self.set(name, None, self.unknown(f"${name}", f"of `{shown}`", *items), adds=False)
            return self.perhaps(node, shown, lambda: self.several(body.children))
        status: Status = 0
        for item in items:
            self.set(name, None, item, adds=False)
            self.shared.limits.step(self.source.file, self.line)
            status, ended = self.round(body)
            if ended:
                break
        return status

    def _of_files(self, item: str) -> bool:
        return any(unknown.reason == "names of files" for unknown in self.unknowns.of(item))

    def round(self, body: Node) -> tuple[Status, bool]:
        """A round of a loop, and whether the loop ends with it."""
        self.looping += 1
        try:
            return self.several(body.children), False
        except Loop as signal:
            if signal.levels > 1:
                raise type(signal)(signal.levels - 1) from None
            return 0, isinstance(signal, Break)
        finally:
            self.looping -= 1

    def counted_loop(self, node: Node) -> Status:
        """`for ((A; B; C))`."""
        start = next(child for child in node.children if child.type == "((").end_byte
        end = next(child for child in node.children if child.type == "))").start_byte
        parts = self.source.between(start, end).split(";")
        first, test, after = (part.strip() for part in parts)
        self.calculated(first)
        body = node.children[-1]
        return self.while_(node, lambda: self.sum_status(test) if test else 0, body, after, f"(({test}))")

    def while_loop(self, node: Node) -> Status:
        body = node.children[-1]
        nodes, until = node.children[1:-1], node.children[0].type == "until"

        def test() -> Status:
            status = self.condition(nodes)
            return status if status is None or not until else int(not status)

        words = self.source.between(nodes[0].start_byte, body.start_byte).strip().rstrip(";")
        return self.while_(node, test, body, "", words)

    def while_(self, node: Node, test: Thunk, body: Node, after: str, words: str) -> Status:
        line = self.line
        for _ in range(MOST_ROUNDS):
            before = dict(self.state.variables), self.state.arguments, list(self.input or [])
            self.line = line
            holds = test()
            if holds is None:
                return self.perhaps(node, words, lambda: self.several(body.children))
            if holds:
                return 0
            _, ended = self.round(body)
            if ended:
                return 0
            if after:
                self.calculated(after)
            self.shared.limits.step(self.source.file, line)
            if before == (self.state.variables, self.state.arguments, list(self.input or [])):
                raise Exit  # nothing changes, so it goes on for ever
        raise InputError(f":{line}: a loop of more than {MOST_ROUNDS:,} rounds: give by --var what it computes")

    def perhaps(self, node: Node, words: str, run: Thunk) -> Status:
        """A loop whose number of rounds is not known: one round, after which what it changed is not known."""
        site = self.site(node, words)

        def rounds() -> Status:
            before, wrote = dict(self.state.variables), len(self.out or [])
            self.looping += 1
            try:
                run()
            except Loop as signal:
                if signal.levels > 1:
                    raise type(signal)(signal.levels - 1) from None
            finally:
                self.looping -= 1
            for name, own in self.state.variables.items():
                if own != before.get(name) and name not in self.shared.given:
                    value = self.unknown(f"${name}", f"changes in a loop while `{words[:40]}`")
                    self.state.variables[name] = Variable(value, exported=own.exported)
            if self.out is not None and len(self.out) > wrote:
                self.out[wrote:] = [self.unknown("$(…)", "the output of a loop")]
            return None

        return self.decide(site, [rounds, lambda: 0])

    # What is not decided

    def site(self, node: Node, words: str, statement: Node | None = None) -> Site:
        at = node.start_byte + (self.source.first_line << 24)
        return Site(self.source.file, at, self.source.line_of(statement or node), " ".join(words.split()))

    def decide(self, site: Site, branches: list[Thunk]) -> Status:
        """Run the branch that was chosen, or all of them, each from the same state."""
        because, self.because = self.because, frozenset()
        chosen = self.shared.choices.get(site)
        if chosen is not None:
            return branches[chosen]()
        if because:  # what the test asks for is decided by others
            raise MustChoose(min(because))
        before, line = self.state, self.line
        source, depth = self.source, self.depth
        ended: list[State] = []
        outer, given = self.out, self.input
        written: list[str] = []
        left: list[list[str] | None] = []
        self.shared.under.append(site)
        try:
            for run in branches:
                self.state = before.copied()
                self.out, self.input = None if outer is None else [], given
                try:
                    self.state.status = run()
                    ended.append(self.state)
                    written.append("".join(self.out or []))
                    left.append(self.input)
                except Exit:
                    pass
                except (Return, Loop):
                    raise MustChoose(site) from None
                self.source, self.depth, self.line = source, depth, line
        finally:
            self.shared.under.pop()
            self.state, self.out, self.input = before, outer, given
        if not ended:
            raise Exit
        self.input = left[0] if left.count(left[0]) == len(left) else None
        if outer is not None:
            sites = frozenset({site}) | self.unknowns.sites(*written)
            same = written.count(written[0]) == len(written)
            mark = Unknown("$(…)", f"depends on `{site.test[:60]}`", line, sites=sites)
            outer.append(written[0] if same else self.unknowns.mark(mark))
        self.state = merged(ended, site, line, self.unknowns)
        return self.state.status if len(ended) == 1 else None

    # Commands

    def function(self, node: Node) -> Status:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        assert name is not None
        assert body is not None
        self.state.functions[self.source.text_of(name)] = (self.source, body)
        return 0

    def call(self, name: str, words: list[str]) -> Status:
        found = self.state.functions[name]
        if found is None:
            raise InputError(f":{self.line}: {name}: which of its definitions holds is not known")
        if self.depth > DEEPEST:
            raise InputError(f":{self.line}: {name}: functions call each other without end")
        source, body = found
        outer = self.source, self.line, self.state.arguments
        self.source, self.state.arguments = source, words
        self.state.frames.append({})
        self.depth += 1
        self.called += 1
        try:
            return self.one(body)
        except Return as signal:
            return signal.status
        except InputError as error:
            raise _placed(error, source.file) from None
        finally:
            self.depth -= 1
            self.called -= 1
            for local, variable in self.state.frames.pop().items():
                self.state.put(local, variable)
            self.source, self.line, self.state.arguments = outer

    def test_command(self, node: Node) -> Status:
        text = self.source.text_of(node)
        words = [word for _, word in lexer.words(text)]
        if text.startswith("[["):
            verdict = self.double(_tokens(text[2:-2]))
        elif text.startswith("(("):
            return self.sum_status(text[2:-2])
        else:
            verdict = self.holds([held(field) for word in words[1:-1] for field in self.fields(word)])
        return None if verdict is None else int(not verdict)

    def holds(self, words: list[str]) -> bool | None:
        """Whether `[ … ]` holds."""
        verdict = self.tests.holds(words)
        if verdict is None:
            self.because |= self.unknowns.sites(*words)
        return verdict

    def double(self, tokens: list[str]) -> bool | None:
        """`[[ … ]]`."""
        verdict = self._and(tokens)
        while tokens and tokens[0] == "||":
            tokens.pop(0)
            verdict = either(verdict, self._and(tokens, runs=verdict is not True))
        return verdict

    def _and(self, tokens: list[str], runs: bool = True) -> bool | None:
        verdict = self._term(tokens, runs)
        while tokens and tokens[0] == "&&":
            tokens.pop(0)
            verdict = both(verdict, self._term(tokens, runs and verdict is not False))
        return verdict

    def _term(self, tokens: list[str], runs: bool) -> bool | None:
        first = tokens.pop(0)
        if first == "!":
            return negated(self._term(tokens, runs))
        if first == "(":
            depth, end = 1, 0
            while depth:
                depth += {"(": 1, ")": -1}.get(tokens[end], 0)
                end += 1
            inner = tokens[: end - 1]
            del tokens[:end]
            return self.double(inner) if runs else None
        words = [first]
        while tokens and tokens[0] not in ("&&", "||", ")"):
            words.append(tokens.pop(0))
        return self._compared(words) if runs else None

    def _compared(self, words: list[str]) -> bool | None:
        verdict = self._comparison(words)
        if verdict is None:
            self.because |= self.unknowns.sites(*(self.text(word) for word in words))
        return verdict

    def _comparison(self, words: list[str]) -> bool | None:
        left = self.text(words[0])
        if len(words) == 1:
            return negated(self.unknowns.is_empty(left))
        if len(words) == 2:
            return self.tests.of_one(words[0], self.text(words[1]))
        sign, right = words[1], words[2]
        if sign == "=~":
            return self._found(left, right)
        if sign.startswith("-") and sign in OPERATORS:
            numbers = [self.calculated(side) for side in (left, self.text(right))] if known(left) else [None]
            return None if None in numbers else self.tests.of_two(str(numbers[0]), sign, str(numbers[1]))
        return self.tests.of_two(left, sign, self.text(right), self.pattern(right) if sign not in "<>" else None)

    def _found(self, text: str, raw: str) -> bool | None:
        parts = self.parts(raw)
        expression = "".join(re.escape(part) if kind == "quoted" else of_classes(part) for part, kind in parts)
        if not known(text, expression):
            self.state.variables["BASH_REMATCH"] = Variable(self.unknown("$BASH_REMATCH", "a match", text, expression))
            return None
        try:
            found = re.search(expression, text)
        except re.error:
            return None
        groups = [] if found is None else [found[0], *(group or "" for group in found.groups())]
        self.state.variables["BASH_REMATCH"] = Variable().with_items({str(n): g for n, g in enumerate(groups)})
        return found is not None

    def redirected(self, node: Node) -> Status:
        bodies = [c for at, c in enumerate(node.children) if node.field_name_for_child(at) == "body"]
        redirects = [c for c in node.children if c.type.endswith("_redirect")]
        more = [c for c in node.children if c.is_named and c not in bodies and c not in redirects]
        if more:
            raise InputError(f":{self.line}: {self.source.text_of(node)[:40]}: is not read")
        found = [self._redirect(one) for one in redirects]
        return self.through(found, lambda: self.one(bodies[0]) if bodies else 0)

    def _redirect(self, node: Node) -> Redirect:
        fd = next((self.source.text_of(c) for c in node.children if c.type == "file_descriptor"), "")
        sign = next(c for c in node.children if not c.is_named)
        return Redirect(fd, sign.type, self.source.between(sign.end_byte, node.end_byte).strip())

    def through(self, redirects: list[Redirect], run: Thunk) -> Status:
        """Run something with its input and output redirected."""
        outer = self.out, self.input
        target, adds = None, False
        for one in redirects:
            if one.sign == "<<<":
                self.input = [self.text(one.target) + "\n"]
            elif one.sign == "<" and (found := HEREDOC.fullmatch(one.target)):
                self.input = [self.heredoc(int(found[1]))]
            elif one.sign == "<" and one.target.startswith("<("):
                self.input = [self.output_of(one.target[2:-1], one.target) + "\n"]
            elif one.sign == "<":
                name = self.text(one.target)
                text = self.state.files.get(Path(name).name)
                self.input = [self.unknown(f"$(<{self.unknowns.shown(name)})", "a file") if text is None else text]
            elif one.fd in ("", "1") and one.sign in (">", ">>", ">|", "&>", "&>>"):
                target, adds = self.text(one.target), one.sign.endswith(">>")
                self.out = []
            elif one.fd in ("", "1") and one.sign == ">&":
                self.out = [] if one.target != "1" else self.out
        try:
            return run()
        finally:
            if target is not None and self.out is not None and not target.startswith("/dev/"):
                name = Path(target).name
                self.state.files[name] = (self.state.files.get(name, "") if adds else "") + "".join(self.out)
                self.bounded(self.state.files[name])
            self.out, self.input = outer

    def heredoc(self, number: int) -> str:
        found = self.shared.heredocs[number]
        return found.text if found.plain else self.text(found.text, quoted=True)

    def output_of(self, script: str, shown: str) -> str:
        outer, self.out = self.out, []
        line = self.line
        if script.lstrip().startswith("<") and not script.lstrip().startswith(("<<", "<(")):
            script = f"cat {script}"
        try:
            self.state.status = self.apart(lambda: self.run_text(script, self.source.file, line))
            text = "".join(self.out).rstrip("\n")
        finally:
            self.out, self.line = outer, line
        if len(text) == 1 and not known(text):
            own = self.unknowns.of(text)[0]
            return self.unknowns.mark(replace(own, shown=own.shown if own.unset else shown))
        return self.bounded(text)

    def write(self, text: str) -> None:
        if self.out is not None:
            self.out.append(text)
            self.shared.limits.write(self.line, len(text))

    def take_input(self) -> str | None:
        """All that is left of the input; None where nobody says what it is."""
        return None if self.input is None else "".join(self.input)

    def simple(self, node: Node) -> Status:
        """Assignments, a command, or both."""
        from sim.convert.scripts.builtins import run_words

        redirects = [child for child in node.children if child.type.endswith("_redirect")]
        text, at = "", node.start_byte
        for one in redirects:
            text, at = f"{text}{self.source.between(at, one.start_byte)} ", one.end_byte
        text += self.source.between(at, node.end_byte)
        *before, text = lexer.split_at(text, "\n")  # the grammar joins lines of assignments with what follows them
        for line in before:
            run_words(self, [word for _, word in lexer.words(line)], [])
        words = [word for _, word in lexer.words(text)]
        assigned = []
        while words and lexer.ASSIGNMENT.match(words[0]):
            assigned.append(words.pop(0))
        found = [self._redirect(one) for one in redirects]
        return (
            self.through(found, lambda: run_words(self, assigned, words)) if found else run_words(self, assigned, words)
        )

    def environment(self) -> dict[str, str]:
        """What a command sees."""
        found = {
            name: one.value
            for name, one in self.state.variables.items()
            if one.exported and one.value is not None and one.items is None
        }
        return {name: self.unknowns.shown(value) for name, value in found.items()}

    def emit(self, words: list[str], loose_words: tuple[Unknown, ...]) -> None:
        """Note a command that is started."""
        exported = [one.value or "" for one in self.state.variables.values() if one.exported]
        sites = self.unknowns.sites(*words, *exported) | {*self.shared.under}
        shown = tuple(map(self.unknowns.shown, words))
        parts = (part for word in words for part in self.unknowns.of(word))
        unknown = frozenset(part.shown for part in parts if not part.unset)
        command = Command(
            shown, self.line, self.source.file, self.environment(), frozenset(sites), loose_words, unknown
        )
        self.shared.commands.append(command)

    def show(self, words: list[str]) -> None:
        """Note a command that only shows its words."""
        shown = tuple(map(self.unknowns.shown, words))
        self.shared.shown.append(Command(shown, self.line, self.source.file, {}))

    def child(self, arguments: list[str] | None) -> Shell:
        """A shell that this one starts, which sees exported variables alone."""
        exported = {
            name: one for name, one in self.state.variables.items() if one.exported or name in self.shared.given
        }
        state = State(exported, arguments=arguments, files=self.state.files, anything=self.state.anything)
        shell = Shell(self.folder, self.shared, state, self.depth + 1)
        shell.out, shell.input, shell.line = self.out, self.input, self.line
        return shell


class Shared:
    """What all shells of a script have in common. `given`: variables that keep their values; `choices`: of branches;
    `under`: the open tests around what runs now."""

    def __init__(self, given: Mapping[str, str], choices: Mapping[Site, int]) -> None:
        self.given, self.choices = given, choices
        self.unknowns, self.limits = Unknowns(), Limits()
        self.commands: list[Command] = []
        self.shown: list[Command] = []
        self.under: list[Site] = []
        self.heredocs: list[Heredoc] = []
        self.absent: list[str] = []
        self.texts: dict[str, str] = {}
        self.directives: list[str] = []
        self._trees: dict[tuple[str, str, int], Source] = {}

    def read(self, file: Path, by: list[str] | None) -> str:
        """The text of a file that the script reads or starts; `by`: what starts it."""
        text = read_text(file, MAX_BYTES)
        if by is not None:
            options = " ".join(self.unknowns.shown(word) for word in by[1:]) if by[:1] == ["sbatch"] else ""
            self.directives += [*directives_of(text), *([options] if options else [])]
        self.texts[str(file)] = text
        return text

    def parsed(self, file: str, text: str, first_line: int) -> Source:
        key = (file, text, first_line)
        if key not in self._trees:
            self._trees[key] = Source(file, text, first_line, self.heredocs)
        return self._trees[key]


def _placed(error: InputError, file: str) -> InputError:
    """An error that begins with its line, with the file before it."""
    return InputError(f"{file}{error}") if str(error).startswith(":") else error


def directives_of(text: str) -> list[str]:
    """The options of Slurm in a script's comments."""
    return DIRECTIVES.findall(text)


def _tokens(text: str) -> list[str]:
    """The words of `[[ … ]]`, with brackets apart except those of a regular expression."""
    return list(_apart(text))


def _apart(text: str) -> Iterator[str]:
    before = ""
    for _, word in lexer.words(text):
        if before == "=~" or word in OPERATORS:
            yield word
        else:
            while word.startswith(("(", "!(")) and word not in ("()",):
                if word[0] == "!":
                    yield "!"
                    word = word[1:]
                end = lexer.closing(word, 1, "()")
                yield "("
                yield from _apart(word[1 : end - 1])
                yield ")"
                word = word[end:]
            if word:
                yield word
        before = word


KINDS: Mapping[str, Callable[[Shell, Node], Status]] = {
    "program": lambda shell, node: shell.several(node.children),
    "compound_statement": Shell.group,
    "do_group": Shell.group,
    "subshell": Shell.subshell,
    "list": Shell.listed,
    "negated_command": Shell.inverted,
    "pipeline": Shell.pipeline,
    "if_statement": Shell.if_statement,
    "case_statement": Shell.case,
    "for_statement": Shell.for_loop,
    "c_style_for_statement": Shell.counted_loop,
    "while_statement": Shell.while_loop,
    "function_definition": Shell.function,
    "test_command": Shell.test_command,
    "redirected_statement": Shell.redirected,
    **dict.fromkeys(
        (
            *("command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"),
            *("array",),
        ),
        Shell.simple,
    ),
}
