"""Tests of a shell: `[ … ]`, `[[ … ]]` and patterns (bash's manual, "Bash Conditional Expressions").

A test of files, and one of a value that is not known, is None. A variable that nobody sets is taken to be unset where
the other side is empty; what else it may be compared with is left open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from sim.convert.scripts.unknown import MARK, Unknowns, known

NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}
OF_FILES = (
    "-a",
    "-b",
    "-c",
    "-d",
    "-e",
    "-f",
    "-g",
    "-h",
    "-k",
    "-p",
    "-r",
    "-s",
    "-t",
    "-u",
    "-w",
    "-x",
    "-G",
    "-L",
    "-N",
    "-O",
    "-S",
    "-o",
)
BETWEEN_FILES = ("-nt", "-ot", "-ef")
REPEATED = {"@": "", "+": "+", "?": "?", "*": "*"}
EXTENDED = re.compile(r"[@+?*!]\(")
CLASS = re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|[^\]])*)\]")
CLASSES = {"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z"}


def pattern_of(parts: list[tuple[str, bool]]) -> str:
    """The regular expression of a pattern whose parts are in quotes or not.

    >>> pattern_of([("a*", False), ("*", True), ("[!0-9]", False)])
    'a.*\\\\*[^0-9]'
    """
    text = "".join(re.sub(r"(.)", r"\\\1", part, flags=re.DOTALL) if quoted else part for part, quoted in parts)
    return _pattern(text)


@lru_cache(maxsize=1000)
def _pattern(text: str) -> str:
    found, at = "", 0
    while at < len(text):
        one = text[at]
        if EXTENDED.match(text, at) and one in REPEATED and (end := text.find(")", at)) > 0:
            found += f"(?:{'|'.join(map(_pattern, text[at + 2 : end].split('|')))}){REPEATED[one]}"
            at = end
        elif one == "\\":
            at += 1
            found += _literal(text[at : at + 1])
        elif one in "*?":
            found += ".*" if one == "*" else "."
        elif one == "[" and (brackets := CLASS.match(text, at)):
            found += f"[{'^' * bool(brackets[1])}{of_classes(brackets[2]).replace(chr(92), chr(92) * 2)}]"
            at = brackets.end() - 1
        else:
            found += _literal(one)
        at += 1
    return found


def _literal(one: str) -> str:
    return one if MARK.match(one) else re.escape(one)


def of_classes(text: str) -> str:
    """A bracket's characters with POSIX's classes as ranges."""
    return re.sub(r"\[:(\w+):\]", lambda found: CLASSES.get(found[1], found[0]), text)


def matches(text: str, pattern: str) -> bool:
    return compiled(pattern).fullmatch(text) is not None


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern's expression; one that is none matches nothing."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error:
        return re.compile("(?!)")


def matched_parts(value: str, pattern: str, end: str, longest: bool) -> str:
    """The value without the longest or shortest part at its beginning (`#`) or end (`%`) that the pattern matches."""
    sizes = range(len(value), -1, -1) if longest else range(len(value) + 1)
    expression = compiled(pattern)
    for size in sizes:
        part = value[:size] if end == "#" else value[len(value) - size :]
        if expression.fullmatch(part):
            return value[size:] if end == "#" else value[: len(value) - size]
    return value


class Tests:
    """Tests on words that are expanded. `is_set`: tells of `-v`; `is_file`: of a file that the script writes."""

    def __init__(
        self, unknowns: Unknowns, is_set: Callable[[str], bool | None], is_file: Callable[[str], bool]
    ) -> None:
        self.unknowns, self.is_set, self.is_file = unknowns, is_set, is_file

    def holds(self, words: list[str]) -> bool | None:
        """Whether the words of `[ … ]` hold; None where that is not known."""
        match words:
            case []:
                return False
            case ["!", *rest] if len(words) != 3 or rest[0] not in ("=", "==", "!=", *NUMBERS):
                return negated(self.holds(rest))
            case [word]:
                return negated(self.unknowns.is_empty(word))
            case [sign, word]:
                return self.of_one(sign, word)
            case [left, sign, right] if sign in ("=", "==", "!=", "<", ">", *NUMBERS, *BETWEEN_FILES):
                return self.of_two(left, sign, right)
            case ["(", *inner, ")"] if "(" not in inner:
                return self.holds(inner)
        for sign, of_both in (("-o", either), ("-a", both)):
            places = [at for at, word in enumerate(words) if word == sign and 0 < at < len(words) - 1]
            if places:
                return of_both(self.holds(words[: places[0]]), self.holds(words[places[0] + 1 :]))
        return None

    def of_one(self, sign: str, word: str) -> bool | None:
        if sign in ("-z", "-n"):
            empty = self.unknowns.is_empty(word)
            return empty if sign == "-z" else negated(empty)
        if sign == "-v":
            return self.is_set(word) if known(word) else None
        if sign in OF_FILES:
            return True if sign in ("-f", "-e", "-r", "-s") and self.is_file(word) else None
        return None

    def of_two(self, left: str, sign: str, right: str, pattern: str | None = None) -> bool | None:
        """A comparison; `pattern`: the right side's regular expression in `[[`."""
        if sign in BETWEEN_FILES:
            return None
        if sign in NUMBERS:
            if not known(left, right):
                return None
            try:
                return NUMBERS[sign](int(left), int(right))
            except ValueError:
                return False
        if not known(left, right):
            plain = [self.unknowns.without_unset(side) for side in (left, right)]
            alike = plain[0] == plain[1] and known(*plain)
            apart = known(*plain) and "" in plain
            return (sign != "!=") if alike else (sign == "!=") if apart else None
        if sign in "<>":
            return left < right if sign == "<" else left > right
        found = left == right if pattern is None else matches(left, pattern)
        return found != (sign == "!=")


def negated(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def either(one: bool | None, other: bool | None) -> bool | None:
    return True if True in (one, other) else None if None in (one, other) else False


def both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True
