"""Arithmetic of a shell (bash's manual, "Shell Arithmetic"): 64 bits, with assignments, in bash's own order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from sim.convert.scripts.unknown import known

TOKEN = re.compile(
    r"\s*(?:(\d+#[0-9A-Za-z@_]+|0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)|"
    r"(<<=|>>=|\*\*|\+\+|--|[-+*/%&^|<>=!]=|<<|>>|&&|\|\||[-+*/%<>=!~&^|?:,()\[\]]))"
)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
DEEPEST = 50
BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: int(bool(a or b))),
    "&&": (2, lambda a, b: int(bool(a and b))),
    "|": (3, int.__or__),
    "^": (4, int.__xor__),
    "&": (5, int.__and__),
    "==": (6, int.__eq__),
    "!=": (6, int.__ne__),
    "<": (7, int.__lt__),
    "<=": (7, int.__le__),
    ">": (7, int.__gt__),
    ">=": (7, int.__ge__),
    "<<": (8, lambda a, b: a << (b % 64)),
    ">>": (8, lambda a, b: a >> (b % 64)),
    "+": (9, int.__add__),
    "-": (9, int.__sub__),
    "*": (10, int.__mul__),
    "/": (10, lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)),
    "%": (10, lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1)),
    "**": (11, lambda a, b: pow(a, b, 2**64)),
}
CHANGES = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")


class Problem(ValueError):
    """What bash refuses, too."""


class Variables(Protocol):
    """Where names get their values."""

    def number_text(self, name: str, index: str | None) -> str: ...
    def set_number(self, name: str, index: str | None, number: int | None) -> None: ...


def wrapped(number: int) -> int:
    """The number in 64 bits.

    >>> wrapped(2**63), wrapped(-1)
    (-9223372036854775808, -1)
    """
    return (number + 2**63) % 2**64 - 2**63


class Arithmetic:
    """One expression, evaluated while it is read; None is a number that is not known."""

    def __init__(self, text: str, variables: Variables, depth: int = 0) -> None:
        self.text, self.variables, self.depth = text, variables, depth
        self.tokens: list[tuple[str, int, int]] = []
        self.at = 0
        self.runs = True
        at, end = 0, len(text.rstrip())
        while at < end:
            found = TOKEN.match(text, at)
            if found is None:
                raise Problem(f"'{text[at : at + 20]}'")
            self.tokens.append((found[0].strip(), found.start(), found.end()))
            at = found.end()

    def value(self) -> int | None:
        """The value of the whole; 0 of nothing.

        Raises:
            Problem: for what is no expression, and a division by zero.
        """
        if not self.tokens:
            return 0
        if self.depth > DEEPEST:
            raise Problem("names that stand for each other without end")
        found = self._comma()
        if self.at < len(self.tokens):
            raise Problem(f"'{self._next()}'")
        return found

    def _next(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][0] if self.at <= len(self.tokens) else ""

    def _expect(self, word: str) -> None:
        if self._take() != word:
            raise Problem(f"'{word}' is missing")

    def _comma(self) -> int | None:
        found = self._ternary()
        while self._next() == ",":
            self._take()
            found = self._ternary()
        return found

    def _ternary(self) -> int | None:
        test = self._binary(1)
        if self._next() != "?":
            return test
        self._take()
        runs = self.runs
        self.runs = runs and bool(test)
        one = self._comma()
        self._expect(":")
        self.runs = runs and test is not None and not test
        other = self._ternary()
        self.runs = runs
        return None if test is None else one if test else other

    def _binary(self, least: int) -> int | None:
        left = self._unary()
        while (sign := self._next()) in BINARY and BINARY[sign][0] >= least:
            level, compute = BINARY[self._take()]
            runs = self.runs
            decided = (sign == "&&" and left == 0) or (sign == "||" and bool(left))
            self.runs = runs and not decided
            right = self._binary(level + (sign != "**"))
            self.runs = runs
            left = int(sign == "||") if decided else self._computed(sign, compute, left, right)
        return left

    def _computed(
        self, sign: str, compute: Callable[[int, int], int], left: int | None, right: int | None
    ) -> int | None:
        if not self.runs or left is None or right is None:
            return None
        if (sign in "/%" and right == 0) or (sign == "**" and right < 0):
            raise Problem("division by 0" if right == 0 else "exponent less than 0")
        return wrapped(int(compute(left, right)))

    def _unary(self) -> int | None:
        sign = self._take()
        if sign in ("+", "-", "!", "~"):
            number = self._unary()
            if number is None:
                return None
            return {"+": number, "-": wrapped(-number), "!": int(not number), "~": ~number}[sign]
        if sign in ("++", "--"):
            name, index = self._name(self._take())
            return self._changed(name, index, 1 if sign == "++" else -1, before=False)
        if sign == "(":
            number = self._comma()
            self._expect(")")
            return number
        if sign[:1].isdigit():
            return _number(sign)
        name, index = self._name(sign)
        after = self._next()
        if after in ("++", "--"):
            self._take()
            return self._changed(name, index, 1 if after == "++" else -1, before=True)
        if after in CHANGES:
            self._take()
            number = self._ternary()
            if after != "=":
                own = self._of(name, index)
                number = self._computed(after[:-1], BINARY[after[:-1]][1], own, number)
            if self.runs:
                self.variables.set_number(name, index, number)
            return number
        return self._of(name, index)

    def _name(self, word: str) -> tuple[str, str | None]:
        if not re.fullmatch(r"[A-Za-z_]\w*", word):
            raise Problem(f"'{word}'")
        if self._next() != "[":
            return word, None
        start, depth = self.tokens[self.at][2], 0
        while self.at < len(self.tokens):
            sign, begin, _ = self.tokens[self.at]
            depth += {"[": 1, "]": -1}.get(sign, 0)
            self.at += 1
            if not depth:
                return word, self.text[start : self.tokens[self.at - 1][2] - 1].strip()
            del begin
        raise Problem("']' is missing")

    def _of(self, name: str, index: str | None) -> int | None:
        if not self.runs:
            return None
        text = self.variables.number_text(name, index)
        return Arithmetic(text, self.variables, self.depth + 1).value() if known(text) else None

    def _changed(self, name: str, index: str | None, by: int, before: bool) -> int | None:
        if not self.runs:
            return None
        own = self._of(name, index)
        new = None if own is None else wrapped(own + by)
        self.variables.set_number(name, index, new)
        return own if before else new


def _number(word: str) -> int:
    """A number with its base.

    >>> [_number(word) for word in ("010", "0x1f", "16#fF", "12")]
    [8, 31, 255, 12]
    """
    base, mark, digits = word.partition("#")
    try:
        if not mark:
            return wrapped(int(word, 16) if word[:2] in ("0x", "0X") else int(word, 8) if word[0] == "0" else int(word))
        numbers = [DIGITS.index(digit if int(base) > 36 else digit.lower()) for digit in digits]
        if not 2 <= int(base) <= 64 or max(numbers) >= int(base):
            raise ValueError
    except ValueError:
        raise Problem(f"'{word}'") from None
    number = 0
    for digit in numbers:
        number = number * int(base) + digit
    return wrapped(number)
