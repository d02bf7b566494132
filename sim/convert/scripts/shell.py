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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.convert.scripts import lexer
from sim.convert.scripts.arithmetic import Problem
from sim.convert.scripts.parameters import Status, Thunk
from sim.convert.scripts.parser import HEREDOC
from sim.convert.scripts.shared import placed
from sim.convert.scripts.state import Command, Return, State
from sim.convert.scripts.statements import DEEPEST, Statements
from sim.convert.scripts.unknown import Unknown, known
from sim.core.errors import InputError

if TYPE_CHECKING:
    from tree_sitter import Node
QUOTES = re.compile(r"((?<!\\)(?:\\\\)*)\\(?=\")")  # a backslash before a quote, which a here-document keeps


class Redirect(Struct, frozen=True):
    """`sign` is without the descriptor, which is `fd`."""

    fd: str
    sign: str
    target: str


class Shell(Statements):
    """A shell: the commands that it runs."""

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
            raise placed(error, source.file) from None
        finally:
            self.depth -= 1
            self.called -= 1
            for local, variable in self.state.frames.pop().items():
                self.state.put(local, variable)
            self.source, self.line, self.state.arguments = outer

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
            if one.sign[0] == "<" and one.fd not in ("", "0"):
                continue
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
        return found.text if found.plain else self.text(QUOTES.sub(r"\1\\\\", found.text), quoted=True)

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
        redirects = [child for child in node.children if child.type.endswith("_redirect")]
        text, at = "", node.start_byte
        for one in redirects:
            text, at = f"{text}{self.source.between(at, one.start_byte)} ", one.end_byte
        text += self.source.between(at, node.end_byte)
        *before, text = lexer.split_at(text, "\n")  # the grammar joins lines of assignments with what follows them
        for line in before:
            self.shared.run_written(self, [word for _, word in lexer.words(line)], [])
        words = [word for _, word in lexer.words(text)]
        assigned = []
        while words and lexer.ASSIGNMENT.match(words[0]):
            assigned.append(words.pop(0))
        found = [self._redirect(one) for one in redirects]
        return (
            self.through(found, lambda: self.shared.run_written(self, assigned, words))
            if found
            else self.shared.run_written(self, assigned, words)
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
