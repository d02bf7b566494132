"""`[[ … ]]` and the other tests of a shell, on words as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.convert.scripts import lexer
from sim.convert.scripts.conditions import both, either, negated, of_classes
from sim.convert.scripts.parameters import Parameters, Status
from sim.convert.scripts.state import Variable
from sim.convert.scripts.unknown import held, known

if TYPE_CHECKING:
    from tree_sitter import Node

OPERATORS = ("&&", "||", "!", "(", ")", "==", "=", "!=", "=~", "<", ">", "-eq", "-ne", "-gt", "-ge", "-lt", "-le")


class Testing(Parameters):
    """A shell's tests."""

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

    def sum_status(self, text: str) -> Status:
        number = self.calculated(text)
        if number is None:
            self.because |= self.unknowns.sites(*(self.number_text(name, None) for name in lexer.NAME.findall(text)))
        return None if number is None else int(not number)


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
