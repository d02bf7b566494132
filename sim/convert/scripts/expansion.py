"""Expansions of a shell's words, in bash's order (its manual, "Shell Expansions")."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sim.convert.scripts import lexer
from sim.convert.scripts.arithmetic import Arithmetic, Problem
from sim.convert.scripts.conditions import compiled, matched_parts, pattern_of
from sim.convert.scripts.unknown import MARK, Unknown, Unknowns, held, known, loose
from sim.core.errors import InputError

SPECIAL = "@*#?$!-_0123456789"
PARAMETER = re.compile(r"(!?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[((?:[^\]\[]|\[[^\]]*\])*)\])?")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
DEFAULT = re.compile(r"(:?)([-=?+])")
GLOB = re.compile(r"[*?]")
MOST_CHARACTERS = 131_072  # of a word (Linux, MAX_ARG_STRLEN)
MOST_WORDS = 20_000  # of an array
TOO_LONG = f"longer than {MOST_CHARACTERS:,} characters or {MOST_WORDS:,} words"


class Part(NamedTuple):
    """A piece of a word. `kind`: `quoted`, `plain` as it is written, `split` of an expansion outside quotes, or `end`
    of a word."""

    text: str
    kind: str


END = Part("", "end")


class Expansion(ABC):
    """Expands words; what variables have and commands write, the shell says."""

    unknowns: Unknowns
    line: int

    @abstractmethod
    def elements(self, name: str, index: str | None) -> list[str] | None:
        """The values that a parameter stands for; None where it is unset."""

    @abstractmethod
    def keys_of(self, name: str) -> list[str]: ...

    @abstractmethod
    def is_set_by_nobody(self, name: str) -> bool: ...

    @abstractmethod
    def assign(self, name: str, index: str | None, value: str) -> None: ...

    @abstractmethod
    def output_of(self, script: str, shown: str) -> str:
        """What the commands of `$(…)` write."""

    @abstractmethod
    def separators(self) -> str:
        """IFS."""

    def unknown(self, shown: str, reason: str, *of: str, unset: bool = False) -> str:
        """A text for what is not known, for the parts that are not known of others."""
        return self.unknowns.mark(Unknown(shown, reason, self.line, unset, self.unknowns.sites(*of)))

    def number_text(self, name: str, index: str | None) -> str:
        """A parameter's text in arithmetic, where one that is unset is 0."""
        found = self.elements(name, index)
        if not found and self.is_set_by_nobody(name):
            return self.unknown(f"${name}", "nobody sets it", unset=True)
        return held(found[0]) if found else ""

    def set_number(self, name: str, index: str | None, number: int | None) -> None:
        value = self.unknown(f"${name}", "a sum that is not known") if number is None else str(number)
        self.assign(name, index, value)

    def calculated(self, text: str) -> int | None:
        """The value of an expression; None where it is not known."""
        expanded = self.text(text, quoted=True).replace('"', "")
        if not known(expanded):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", expanded):
                self.set_number(name, None, None)
            return None
        return Arithmetic(expanded, self).value()

    def fields(self, raw: str) -> list[str]:
        """The words that a written word becomes."""
        try:
            words = lexer.braces(raw)
        except InputError as error:
            raise InputError(f":{self.line}: {error}") from None
        return [field for one in words for field in self._fields(self.parts(one))]

    def text(self, raw: str, quoted: bool = False) -> str:
        """A word that is not split: an assignment's value, or a text in quotes."""
        return self.bounded(held("".join(" " if part is END else part.text for part in self.parts(raw, quoted))))

    def pattern(self, raw: str) -> str:
        """A regular expression of a word as a pattern; quotes hold for its characters."""
        return pattern_of([(part.text, part.kind == "quoted") for part in self.parts(raw)])

    def bounded(self, text: str) -> str:
        if len(text) > MOST_CHARACTERS:
            raise InputError(f":{self.line}: a value becomes {TOO_LONG}")
        return text

    def _fields(self, parts: list[Part]) -> list[str]:
        found, now, begun = list[str](), "", False
        blanks = self.separators()
        for text, kind in parts:
            if kind == "end":
                found, now, begun = [*found, now] if begun else found, "", False
            elif kind == "split":
                pieces = _split(text, blanks)
                for n, piece in enumerate(pieces):
                    if n:
                        found, now, begun = [*found, now] if begun else found, "", False
                    now, begun = now + piece, begun or bool(piece)
            else:
                now, begun = now + text, begun or bool(text) or kind == "quoted"
            self.bounded(now)
        return [*found, now] if begun else found

    def parts(self, raw: str, quoted: bool = False) -> list[Part]:
        """The pieces of a written word. `quoted`: it stands in double quotes."""
        found, at, size, count = list[Part](), 0, 0, 0
        kind = "quoted" if quoted else "plain"
        while at < len(raw):
            one, end = raw[at], lexer.skipped(raw, at)
            if one == "\\":
                escaped = raw[at + 1 : end]
                kept = quoted and escaped not in ("$", "`", '"', "\\", "\n")
                found.append(Part(f"\\{escaped}" if kept else "" if escaped == "\n" else escaped, "quoted"))
            elif one == "'" and not quoted:
                found.append(Part(raw[at + 1 : end - 1], "quoted"))
            elif one == '"' and not quoted:
                inner = self.parts(raw[at + 1 : end - 1], quoted=True)
                found += inner or ([] if _only_all(raw[at + 1 : end - 1]) else [Part("", "quoted")])
            elif one == "$" and raw[at + 1 : at + 2] == "'" and not quoted:
                found.append(Part(ANSI.sub(_ansi, raw[at + 2 : end - 1]), "quoted"))
            elif one == "$" and raw[at + 1 : at + 2] == '"' and not quoted:
                end = at + 1
            elif one == "$":
                inner, end = self._dollar(raw, at, end, quoted)
                found += inner
            elif one == "`":
                script = re.sub(r"\\([`$\\])", r"\1", raw[at + 1 : end - 1])
                found.append(Part(self.output_of(script, raw[at:end]), "quoted" if quoted else "split"))
            elif raw[at : at + 2] in ("<(", ">(") and not quoted:
                found.append(Part(self.unknown(raw[at:end], "a file of a command"), "quoted"))
            else:
                end = at + 1 if one in "\"'" else end
                found.append(Part(raw[at:end], kind if not MARK.match(one) or quoted else "split"))
            at = end
            size += sum(len(part.text) for part in found[count:])
            count = len(found)
            if size > MOST_CHARACTERS or count > MOST_WORDS:
                raise InputError(f":{self.line}: a value becomes {TOO_LONG}")
        return [Part(loose(part.text), "split") if part.kind == "split" else part for part in found]

    def _dollar(self, raw: str, at: int, end: int, quoted: bool) -> tuple[list[Part], int]:
        """What begins with a dollar, and where it ends."""
        kind = "quoted" if quoted else "split"
        whole = raw[at:end]
        if whole.startswith("$((") and lexer.closing(whole, 3, "()") == len(whole) - 1:
            return [Part(self._sum(whole[3:-2], whole), kind)], end
        if whole.startswith("$("):
            return [Part(self.output_of(whole[2:-1], whole), kind)], end
        if whole.startswith("${"):
            return self._braced(whole[2:-1], whole, quoted), end
        if raw[at + 1 : at + 2] == "[":
            end = raw.find("]", at) + 1 or len(raw)
            return [Part(self._sum(raw[at + 2 : end - 1], raw[at:end]), kind)], end
        name = lexer.NAME.match(raw, at + 1)
        word = name[0] if name else raw[at + 1 : at + 2]
        if not name and (not word or word not in SPECIAL):
            return [Part("$", "quoted" if quoted else "plain")], at + 1
        return self._parameter(word, None, quoted, f"${word}"), at + 1 + len(word)

    def _sum(self, text: str, shown: str) -> str:
        try:
            number = self.calculated(text)
        except Problem:
            number = None
        if number is not None:
            return str(number)
        names = set(lexer.NAME.findall(text))
        parts = [part for name in names for part in (self.elements(name, None) or [])]
        return self.unknown(shown, "a sum that is not known", *parts)

    def _parameter(self, name: str, index: str | None, quoted: bool, shown: str) -> list[Part]:
        values = self.elements(name, index)
        every = name in "@*" or index in ("@", "*")
        if values is None:
            if not self.is_set_by_nobody(name):
                return []
            return [Part(self.unknown(shown, "nobody sets it", unset=True), "quoted" if quoted else "split")]
        if not every:
            return [Part(values[0], "quoted" if quoted else "split")]
        return self._all(values, quoted, joined=name == "*" or index == "*")

    def _all(self, values: list[str], quoted: bool, joined: bool) -> list[Part]:
        if quoted and joined:
            return [Part(self.separators()[:1].join(values), "quoted")] if values else []
        kind = "quoted" if quoted else "split"
        found: list[Part] = []
        for value in values:
            alone = quoted and len(value) == 1 and not known(value) and len(values) == 1
            found += [END] if found else []
            found.append(Part(loose(value), "quoted") if alone else Part(value, kind))
        return found

    def _braced(self, inner: str, shown: str, quoted: bool) -> list[Part]:
        """`${…}`."""
        kind = "quoted" if quoted else "split"
        if len(inner) > 1 and inner[0] == "#" and (found := PARAMETER.fullmatch(inner, 1)):
            return [Part(self._length(found[2], found[3], shown), kind)]
        found = PARAMETER.match(inner)
        if found is None or (found[1] and found[2] in "@*#?$-"):
            raise InputError(f":{self.line}: {shown[:40]}: is not read")
        name, index, rest = found[2], found[3], inner[found.end() :]
        if found[1]:
            if index in ("@", "*"):
                return self._all(self.keys_of(name), quoted, joined=index == "*")
            if rest in ("@", "*"):
                return [Part(self.unknown(shown, "names of variables"), kind)]
            target = self.number_text(name, index)
            where = PARAMETER.fullmatch(target)
            if not known(target) or where is None:
                return [Part(self.unknown(shown, "a variable whose name is not known", target), kind)]
            name, index = where[2], where[3]
        if not rest:
            return self._parameter(name, index, quoted, shown)
        if default := DEFAULT.match(rest):
            return self._default(name, index, default, rest[default.end() :], quoted, shown)
        values = self.elements(name, index)
        if values is None:
            return self._parameter(name, index, quoted, shown)
        every = name in "@*" or index in ("@", "*")
        if every and rest[0] == ":":
            return self._all(self._slice(values, rest[1:], name in "@*", shown), quoted, joined="*" in (name, index))
        changed = [self._changed(value, rest, shown) for value in values]
        return self._all(changed, quoted, "*" in (name, index)) if every else [Part(changed[0], kind)]

    def _length(self, name: str, index: str | None, shown: str) -> str:
        values = self.elements(name, index) or []
        if name in "@*" or index in ("@", "*"):
            if len(values) == 1 and not known(values[0]) and not MARK.sub("", values[0]):
                return self.unknown(shown, "a number of words that is not known", *values)
            return str(len(values))
        text = values[0] if values else ""
        return str(len(text)) if known(text) else self.unknown(shown, "a length that is not known", text)

    def _default(
        self, name: str, index: str | None, found: re.Match[str], word: str, quoted: bool, shown: str
    ) -> list[Part]:
        """`${NAME:-word}` and its kin."""
        values, sign = self.elements(name, index), found[2]
        is_all = name in "@*" or index in ("@", "*")
        text = "" if values is None else " ".join(values)
        unset = values is None or (is_all and not values) or (bool(text) and not self.unknowns.without_unset(text))
        empty: bool | None = unset or (bool(found[1]) and self.unknowns.is_empty(text))
        if found[1] and not unset:
            empty = self.unknowns.is_empty(text)
        kind = "quoted" if quoted else "split"
        if empty is None:
            return [Part(self.unknown(shown, "a variable that may be empty", text), kind)]
        if sign == "+":
            return [] if empty else self.parts(word, quoted)
        if not empty:
            return self._parameter(name, index, quoted, shown)
        if sign == "?":
            return [Part(self.unknown(shown, "nobody sets it", unset=True), kind)]
        if sign == "=":
            self.assign(name, index, self.text(word, quoted))
            return self._parameter(name, index, quoted, shown)
        return [Part(part.text, "split") if part.kind == "plain" else part for part in self.parts(word, quoted)]

    def _offsets(self, text: str) -> tuple[int, int | None] | None:
        parts = lexer.split_at(text, ":")
        try:
            first = self.calculated(parts[0])
            count = self.calculated(parts[1]) if len(parts) > 1 else None
        except Problem:
            return None
        return None if first is None or (len(parts) > 1 and count is None) else (first, count)

    def _slice(self, values: list[str], text: str, positional: bool, shown: str) -> list[str]:
        offsets = self._offsets(text)
        if offsets is None or not known(*values[:1]):
            return [self.unknown(shown, "a part that is not known", *values)]
        first, count = offsets
        values = ["bash", *values] if positional else values
        start = max(0, len(values) + first) if first < 0 else first
        return values[start:] if count is None else values[start : start + max(0, count)]

    def _changed(self, value: str, rest: str, shown: str) -> str:
        """A value without a prefix, with parts replaced, or a part of it."""
        sign = rest[0]
        if not known(value):
            return self.unknown(shown, "made of a value that is not known", value)
        if sign == ":":
            offsets = self._offsets(rest[1:])
            if offsets is None:
                return self.unknown(shown, "a part that is not known")
            first, count = offsets
            start = max(0, len(value) + first) if first < 0 else first
            if first < -len(value):
                return ""
            end = len(value) if count is None else len(value) + count if count < 0 else start + count
            return value[start : max(start, end)]
        if rest in CASES:
            return CASES[rest](value)
        if sign in "#%":
            longest = rest[:2] == sign * 2
            pattern = self.pattern(rest[1 + longest :])
            cut = matched_parts(value, pattern, sign, longest) if known(pattern) else None
            return self.unknown(shown, "a pattern that is not known", pattern) if cut is None else cut
        if sign == "/":
            return self._replaced(value, rest[1:], shown)
        return self.unknown(shown, "an expansion that is not read")

    def _replaced(self, value: str, rest: str, shown: str) -> str:
        every, at = rest[:1] == "/", "" if rest[:1] not in ("#", "%") else rest[0]
        old, *new = lexer.split_at(rest[1:] if every or at else rest, "/")
        pattern, text = self.pattern(old), self.text("/".join(new))
        if not known(pattern, text) or not old:
            return value if not old else self.unknown(shown, "a pattern that is not known", pattern, text)
        expression = {"#": f"^(?:{pattern})", "%": f"(?:{pattern})$"}.get(at, pattern)
        return compiled(expression).sub(lambda _: text, value, count=0 if every else 1)


CASES: Mapping[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
    "@U": str.upper,
    "@L": str.lower,
    "@Q": lambda text: "'" + text.replace("'", "'\\''") + "'",
}


def _only_all(inner: str) -> bool:
    """Whether a text in quotes is all words of an array, of which there may be none."""
    return bool(re.fullmatch(r"\$(?:@|\{@\}|\{\w+\[@\][^{}]*\}|\{@:[^{}]*\})", inner))


def _ansi(found: re.Match[str]) -> str:
    if found[1] or found[2]:
        return chr(int(found[1] or found[2], 16))
    return chr(int(found[3], 8)) if found[3] else ESCAPES.get(found[4], found[4])


def _split(text: str, blanks: str) -> list[str]:
    """The fields of an expansion (POSIX, "Field Splitting"); an empty one at an end separates words.

    >>> _split(" a  b", " \\t\\n"), _split("a::b", ":")
    (['', 'a', 'b'], ['a', '', 'b'])
    """
    white = "".join(blank for blank in blanks if blank in " \t\n")
    hard = "".join(blank for blank in blanks if blank not in " \t\n")
    if not blanks:
        return [text]
    space = f"[{re.escape(white)}]" if white else "(?!)"
    sign = f"{space}*[{re.escape(hard)}]{space}*|" if hard else ""
    return re.split(f"{sign}{space}+", text)


def unquoted_glob(raw: str) -> bool:
    """Whether a written word has a pattern of file names outside quotes."""
    at = 0
    while at < len(raw):
        if GLOB.match(raw, at):
            return True
        at = lexer.skipped(raw, at)
    return False
