"""Branches of a launch script that its own variables decide: `if`, `case`, `while`, and a test before `&&` or `||`.

The script is read as text and never run. Arguments of the script and variables of the environment that nobody gives are
taken to be unset. A comparison with one of these is left open: all branches are kept, unless a choice says which one
runs (`sim.convert.scripts.script` tries them).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby

from msgspec import Struct, field

from sim.convert.scripts.command_line import (
    ASSIGNMENT,
    COMMENT,
    LONGEST_VALUE,
    kept_arithmetic,
    slurm_values,
    unquoted,
    with_values,
)

PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)|\\.|;;|[;\n]|[^'"$\\;\n]+|.""", re.DOTALL)
KEYWORD = re.compile(r"\s*(if|elif|else|then|fi|while|until|for|do|done|case|esac)(?=\s|$)")
CASE = re.compile(r"\s*(\S+)\s+in(?=\s|$)")
PATTERN = re.compile(r"\s*\(?([^()]+)\)")
TEST = re.compile(r"\s*(!?\s*(?:\[\[.*?\]\]|\[\s.*?\s\]|\(\(.*?\)\)))\s*")
SIGN = re.compile(r"&&|\|\|")
OPENS = re.compile(r"(?:^|&&|\|\|)\s*\{(?=\s|$)")  # a group, first or in a list
GROUP, END_OF_GROUP = re.compile(r"\s*\{(?=\s|$)"), re.compile(r"\s*\}(?=\s|$)\s*")
MATTERS = re.compile(r"(?m)(?:^|[\s;])(?:--[A-Za-z]|\w+\+?=)")  # a flag or an assignment
UNSET = re.compile(r"\$\{?\w+\}?")
NAMED = re.compile(r"(?<![\w$])[A-Za-z_]\w*")
BRACKETS = {"[": "]", "[[": "]]", "test": ""}
OF_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("-eq", "(==)"), int.__eq__),
    **dict.fromkeys(("-ne", "(!=)"), int.__ne__),
    **dict.fromkeys(("-gt", "(>)"), int.__gt__),
    **dict.fromkeys(("-ge", "(>=)"), int.__ge__),
    **dict.fromkeys(("-lt", "(<)"), int.__lt__),
    **dict.fromkeys(("-le", "(<=)"), int.__le__),
}


class OpenTest(Struct, frozen=True):
    """Branches between which the file does not decide. `at`: where they begin; `tests`: the condition of each;
    `may_skip`: none of them may run, either."""

    at: int
    line: int
    tests: tuple[str, ...]
    may_skip: bool

    @property
    def choices(self) -> range:
        """A number for each branch, and one for none of them where that may be."""
        return range(len(self.tests) + self.may_skip)


class _Block(Struct):
    """An open `if`, `case` or loop, or a group behind a test. `runs`: whether the branch that is read does, None where
    that is open; `settled`: a branch before was surely taken; `tests`: conditions of the branches of which one may run;
    `choice`: which one does; `held`: of a group, whether a `&&` behind it goes on."""

    word: str
    start: int
    runs: bool | None = True
    settled: bool = False
    tests: list[str] = field(default_factory=list)
    choice: int | None = None
    subject: str = ""  # of `case`
    wants_pattern: bool = False
    held: bool | None = True

    def branch(self, verdict: bool | None, condition: str) -> None:
        """Begin a branch whose condition has this verdict."""
        if self.settled or verdict is False:
            self.runs = False
            return
        self.runs = True
        if verdict is None or self.tests:
            self.tests.append(condition)
            self.runs = None if self.choice is None else self.choice == len(self.tests) - 1
        self.settled = bool(verdict)


def taken_branches(
    text: str, given: Mapping[str, str] | None = None, choices: Mapping[int, int] | None = None
) -> tuple[str, tuple[OpenTest, ...]]:
    """The script with blanks in place of branches that are not taken, and the tests that are open.

    `given`: variables that keep these values; `choices`: by an open test's place, which of its branches runs. A script
    whose blocks do not close stays as it is.
    """
    reader = _Reader(text, given or {}, choices or {})
    try:
        for start, end, separator in _statements(reader.plain):
            reader.read(start, end)
            if separator == ";;" and reader.blocks and reader.blocks[-1].word == "case":
                reader.blocks[-1].wants_pattern, reader.blocks[-1].runs = True, True
    except IndexError:  # an end without a beginning
        return text, ()
    return (text, ()) if reader.blocks else (reader.result(), tuple(reader.open))


def _statements(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and separator of each; separators in quotes or a command's brackets are none."""
    start = 0
    for piece in PIECE.finditer(text):
        if piece[0] in (";", ";;", "\n"):
            yield start, piece.start(), piece[0]
            start = piece.end()
    yield start, len(text), ""


def _listed(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where each command of a list stands, with the `&&` or `||` before it; those in quotes or in a test are none."""
    begin = at = start
    while at < end:
        test = TEST.match(text, at, end) if text[begin:at].strip() in ("", "&&", "||") else None
        piece = None if test else PIECE.match(text, at, end)
        if piece is not None and (sign := SIGN.search(text, *piece.span())) and piece[0][0] not in "'\"$":
            if text[begin : sign.start()].strip():
                yield begin, sign.start()
                begin = sign.start()
            at = sign.end()
            continue
        found = test or piece
        at = found.end() if found else end
    yield begin, end


class _Reader:
    """Reads statements in order and remembers variables, open blocks and what is to be blank."""

    def __init__(self, text: str, given: Mapping[str, str], choices: Mapping[int, int]) -> None:
        self.text, self.given, self.choices = text, given, choices
        self.plain = COMMENT.sub(lambda found: " " * len(found[0]), text).replace("\\\n", "  ")
        self.variables = {**slurm_values(text), **given}
        self.blocks: list[_Block] = []
        self.blank: list[tuple[int, int]] = []
        self.open: list[OpenTest] = []

    def read(self, start: int, end: int) -> None:
        """A statement, with the keywords before it."""
        while True:
            if self.blocks and self.blocks[-1].wants_pattern and (pattern := PATTERN.match(self.plain, start, end)):
                start = self._pattern(pattern)
            ends = END_OF_GROUP.match(self.plain, start, end) if self.blocks and self.blocks[-1].word == "{" else None
            if ends:
                held = self.blocks.pop().held
                self.blank.append(ends.span())
                start = ends.end()
                if SIGN.match(self.plain, start, end) and all(block.runs is not False for block in self.blocks):
                    self._list(start, end, held)
                    return
            found = KEYWORD.match(self.plain, start, end)
            if found is None:
                break
            self.blank.append(found.span(1))
            start = self._keyword(found[1], found.end(), end)
        in_group = bool(self.blocks) and self.blocks[-1].word == "{"
        if any(block.runs is False for block in self.blocks):
            self.blank.append((start, end))
            if in_group and OPENS.search(self.plain[start:end]):  # whose end is not the outer group's
                self.blocks.append(_Block("{", start, runs=False))
        elif in_group and (group := GROUP.match(self.plain, start, end)):
            self.blocks.append(_Block("{", start))
            self.blank.append(group.span())
            self._plain(group.end(), end)
        elif self.plain[start:end].strip():
            self._plain(start, end)

    def _keyword(self, word: str, start: int, end: int) -> int:
        """Where the statement goes on behind a keyword and its condition."""
        choice = self.choices.get(start)
        if word == "for":
            self.blocks.append(_Block(word, start))
            self.blank.append((start, end))
            self.variables.pop("".join(self.plain[start:end].split()[:1]), None)  # which takes several values
            return end
        if word in ("if", "while", "until"):
            self.blocks.append(_Block(word, start, choice=choice))
        if word in ("if", "elif", "while", "until"):
            return self._condition(self.blocks[-1], start, end)
        if word == "else":
            self.blocks[-1].branch(True, "else")
        elif word == "case" and (found := CASE.match(self.plain, start, end)):
            self.blank.append(found.span())
            self.blocks.append(_Block(word, start, choice=choice, subject=found[1], wants_pattern=True))
            return found.end()
        elif word in ("fi", "done", "esac"):
            self._close(self.blocks.pop(), start)
        return start

    def _condition(self, block: _Block, start: int, end: int) -> int:
        """Begin the branch behind `if`, `elif`, `while` or `until`; return where the condition ends."""
        self.blank.append((start, end))
        condition = self.plain[start:end].strip()
        verdict = decided(condition, self.variables)
        if block.word in ("while", "until"):
            block.runs = verdict is not (block.word == "until")
        else:
            block.branch(verdict, condition)
        return end

    def _pattern(self, found: re.Match[str]) -> int:
        """Begin a branch of `case`; return where its pattern ends."""
        block = self.blocks[-1]
        if found[1].strip() == "esac":
            return found.start()
        self.blank.append(found.span())
        subject = _value(block.subject.strip("\"'"), self.variables)
        patterns = [part.strip().strip("\"'") for part in found[1].split("|")]
        verdict = any(fnmatchcase(subject, p) for p in patterns) if subject is not None else None
        block.branch(True if patterns == ["*"] else verdict, f"case {block.subject} in {found[1].strip()}")
        block.wants_pattern = False
        return found.end()

    def _close(self, block: _Block, end: int) -> None:
        """End a block. Open tests in it count only if a flag or an assignment depends on them."""
        if block.tests and MATTERS.search(self.plain, block.start, end):
            self._leave_open(block.start, block.tests, not block.settled)

    def _leave_open(self, at: int, tests: list[str], may_skip: bool) -> None:
        """Note an open test, unless a block around it surely does not run."""
        if all(outer.runs is not False for outer in self.blocks):
            self.open.append(OpenTest(at, self.text.count("\n", 0, at) + 1, tuple(tests), may_skip))

    def _plain(self, start: int, end: int) -> None:
        """A statement that runs, perhaps after tests."""
        test = TEST.match(self.plain, start, end)
        if test is None or SIGN.match(self.plain, test.end(), end) is None:
            self._assign(start, end)
            return
        self._list(start, end, True)

    def _list(self, start: int, end: int, goes_on: bool | None) -> None:
        """Commands with `&&` and `||` between them; `goes_on`: whether what stands before them held."""
        for begin, stop in _listed(self.plain, start, end):
            sign = SIGN.match(self.plain, begin, stop)
            first = sign.end() if sign else begin
            skips = sign is not None and goes_on is not None and goes_on is not (sign[0] == "&&")
            if group := GROUP.match(self.plain, first, stop):
                held = goes_on if skips or goes_on is None else True
                self.blocks.append(_Block("{", first, runs=False if skips else held, held=held))
                first = group.end()
            self.blank.append((begin, stop if skips else first))
            if skips:
                continue
            if test := TEST.fullmatch(self.plain, first, stop):
                self.blank.append((first, stop))
                goes_on = self._verdict(test[1], first, stop, end)
            else:
                self._assign(first, stop)
                goes_on = goes_on if goes_on is None else True

    def _verdict(self, test: str, start: int, stop: int, end: int) -> bool | None:
        """Whether a test before `&&` or `||` holds; None where that is open and no choice says it."""
        verdict, sign = decided(test, self.variables), SIGN.match(self.plain, stop, end)
        if verdict is not None or sign is None or not MATTERS.search(self.plain, sign.end(), end):
            return verdict
        self._leave_open(start, [f"{test} {sign[0]}"], may_skip=True)
        runs = {0: True, 1: False}.get(self.choices.get(start, -1))
        return None if runs is None else runs is (sign[0] == "&&")

    def _assign(self, start: int, end: int) -> None:
        """The variables that a command sets."""
        for name, more, quoted in ASSIGNMENT.findall(kept_arithmetic(self.plain[start:end]).strip()):
            if name in self.given:
                continue
            value = with_values(unquoted(quoted), self.variables)
            value = self.variables.pop(name, "") * bool(more) + value
            if len(value) <= LONGEST_VALUE:
                self.variables[name] = value

    def result(self) -> str:
        """The text with blanks; lines stay where they are."""
        characters = list(self.text)
        for start, end in self.blank:
            for at in range(start, end):
                if characters[at] != "\n":
                    characters[at] = " "
        return "".join(characters)


def decided(condition: str, variables: Mapping[str, str]) -> bool | None:
    """Whether a test in brackets holds; None where it is no such test, or a variable has no value."""
    if condition.startswith("((") and condition.endswith("))"):
        named = NAMED.sub(lambda name: f"${{{name[0]}}}", condition[2:-2].replace("$", ""))
        return _of_numbers(named.split(), variables)
    try:
        words = shlex.split(kept_arithmetic(condition))
    except ValueError:
        return None
    if any(word in ("(", ")") or "`" in word or "$(" in word for word in words):
        return None
    verdicts: list[bool | None] = []
    for either in _split(words, ("||", "-o")):
        found = [_term(term, variables) for term in _split(either, ("&&", "-a"))]
        verdicts.append(False if False in found else None if None in found else True)
    return True if True in verdicts else None if None in verdicts else False


def _split(words: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    """The words between separators.

    >>> _split(["a", "=", "b", "-o", "c"], ("||", "-o"))
    [['a', '=', 'b'], ['c']]
    """
    parts = groupby(words, lambda word: word in separators)
    return [list(part) for is_separator, part in parts if not is_separator]


def _term(words: list[str], variables: Mapping[str, str]) -> bool | None:
    """One comparison. Without any bracket it is a command, unless it stands between two in the same brackets."""
    negated = words.count("!") % 2 == 1
    inner = [word for word in words if word != "!"]
    if inner[:1] and inner[0] not in BRACKETS and len(inner) < 3:
        return {"true": True, "false": False}.get(" ".join(inner))
    verdict = _compared([word for word in inner if word not in ("[", "[[", "test", "]", "]]")], variables)
    return None if verdict is None else verdict != negated


def _compared(words: list[str], variables: Mapping[str, str]) -> bool | None:
    """Whether a comparison of strings or numbers holds; None where it is no such comparison, or open."""
    match words:
        case [word] | ["-n", word]:
            empty = _is_empty(word, variables)
            return None if empty is None else not empty
        case ["-z", word]:
            return _is_empty(word, variables)
        case ["", "=" | "==" | "!=" as sign, word] | [word, "=" | "==" | "!=" as sign, ""]:
            empty = _is_empty(word, variables)
            return None if empty is None else empty == (sign != "!=")
        case [left, "=" | "==" | "!=" as sign, right]:
            one, other = _value(left, variables), _value(right, variables)
            return None if one is None or other is None else fnmatchcase(one, other) == (sign != "!=")
        case [left, sign, right] if sign in OF_NUMBERS:
            return _of_numbers([left, sign, right], variables)
    return None


def _of_numbers(words: list[str], variables: Mapping[str, str]) -> bool | None:
    """Whether a comparison of two whole numbers holds; None where a side is none."""
    match words:
        case [left, sign, right]:
            compare = OF_NUMBERS.get(sign) or OF_NUMBERS.get(f"({sign})")
            numbers = [_value(word, variables) for word in (left, right)]
            if compare and all(number is not None and number.lstrip("-").isdecimal() for number in numbers):
                one, other = (int(str(number)) for number in numbers)
                return compare(one, other)
    return None


def _value(word: str, variables: Mapping[str, str]) -> str | None:
    """A word with values for its variables; None where one has none."""
    found = with_values(with_values(word, variables), variables).replace("$#", "0")
    return None if "$" in found or "`" in found else found


def _is_empty(word: str, variables: Mapping[str, str]) -> bool | None:
    """Whether a word is empty; a variable alone that has no value is, and text around one leaves it open (None)."""
    value = _value(word, variables)
    return not value if value is not None else True if UNSET.fullmatch(word) else None
