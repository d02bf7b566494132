"""Statements of a shell: lists, branches, loops, and what runs where a test is open."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from sim.convert.scripts import lexer
from sim.convert.scripts.conditions import either
from sim.convert.scripts.parameters import Status, Thunk
from sim.convert.scripts.shared import placed
from sim.convert.scripts.state import Break, Exit, Loop, MustChoose, Return, State, Variable, merged
from sim.convert.scripts.testing import Testing
from sim.convert.scripts.unknown import LOOSE, Site, Unknown, known
from sim.core.errors import InputError

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROUNDS = 10_000
DEEPEST = 60


class Statements(Testing):
    """How each compound statement changes a shell."""

    @abstractmethod
    def one(self, node: Node) -> Status:
        """Run a statement."""

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
            raise placed(error, self.source.file) from None
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
            exempt = self.source.text_of(node).startswith("!") or node.type == "list"
            if self.state.status and self.state.fails and not self.tested and not exempt:
                raise Exit
        return self.state.status

    def children(self, node: Node) -> list[Node]:
        return [child for child in node.children if child.is_named and child.type != "comment"]

    def group(self, node: Node) -> Status:
        if node.children[0].type == "((":
            return self.sum_status(self.source.between(node.children[0].end_byte, node.children[-1].start_byte))
        return self.several(node.children)

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
        outer, out = self.input, self.out
        parts = self.children(node)
        inverts = parts[0].type == "negated_command"  # the whole, not its first command
        parts = [parts[0].children[-1], *parts[1:]] if inverts else parts
        statuses: list[Status] = []
        try:
            for at, part in enumerate(parts):
                self.out = [] if at + 1 < len(parts) else out
                statuses.append(self.apart(lambda part=part: self.one(part)))  # type: ignore[misc]
                self.input = ["".join(self.out or [])] if at + 1 < len(parts) else self.input
        finally:
            self.input, self.out = outer, out
        status = statuses[-1]
        if self.state.pipes_fail:
            failing = [one for one in statuses if one]
            status = failing[-1] if failing else None if None in statuses else 0
        return status if not inverts or status is None else int(not status)

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
