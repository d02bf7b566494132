"""Where words, quotes and brackets of a shell's text end (POSIX, "Token Recognition")."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sim.core.errors import InputError

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^\]\[]|\[[^\]]*\])*)\])?(\+?)=")
RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
MOST_OF_RANGE = 10_000


def skipped(text: str, at: int) -> int:
    """Where the character, quote or expansion that begins here has ended."""
    first, pair = text[at], text[at : at + 2]
    if first == "\\":
        return min(at + 2, len(text))
    if first == "'" or pair == "$'":
        at += len(pair) - 1 if pair == "$'" else 0
        end = at + 1
        while end < len(text) and text[end] != "'":
            end += 2 if pair == "$'" and text[end] == "\\" else 1
        return min(end + 1, len(text))
    if first in '"`':
        end = at + 1
        while end < len(text) and text[end] != first:
            end = skipped(text, end) if text[end] in "\\$`" and (first == '"' or text[end] == "\\") else end + 1
        return min(end + 1, len(text))
    if pair == "${":
        return closing(text, at + 2, "{}")
    if pair in ("$(", "<(", ">("):
        return closing(text, at + 2, "()")
    return at + 1


def closing(text: str, at: int, brackets: str) -> int:
    """Behind the bracket that closes one whose inside begins here."""
    depth = 1
    while at < len(text):
        if text[at] == brackets[1]:
            depth -= 1
            if not depth:
                return at + 1
        elif text[at] == brackets[0]:
            depth += brackets != "{}"
        elif brackets == "()" and text[at] == "#" and text[at - 1] in " \t\n;":
            at = min((text + "\n").index("\n", at), len(text) - 1)
            continue
        at = skipped(text, at) if text[at] in "\\'\"`$" else at + 1
    return len(text)


def words(text: str) -> Iterator[tuple[int, str]]:
    """Each word as it is written, with where it begins; comments are none.

    >>> [word for _, word in words("a 'b c'$(d e) X=(1 2) # f")]
    ['a', "'b c'$(d e)", 'X=(1 2)']
    """
    at, start = 0, -1
    while at < len(text):
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in " \t\n\r":
            if start >= 0:
                yield start, text[start:at]
            at, start = at + 1, -1
        elif text[at] == "#" and start < 0:
            at = (text + "\n").index("\n", at)
        else:
            start = at if start < 0 else start
            opens = text[at] == "(" and (text[at - 1 : at] in tuple("=@?*+!~|(^") or start == at)
            at = closing(text, at + 1, "()") if opens else skipped(text, at)
    if start >= 0:
        yield start, text[start:]


def split_at(text: str, mark: str) -> list[str]:
    """The parts between marks that stand in no quotes and no brackets."""
    parts, start, at = [], 0, 0
    while at < len(text):
        if text.startswith(mark, at):
            parts.append(text[start:at])
            at = start = at + len(mark)
        elif text[at] == "(":
            at = closing(text, at + 1, "()")
        else:
            at = skipped(text, at)
    return [*parts, text[start:]]


def braces(word: str) -> list[str]:
    """The words of a brace expansion, or the word itself.

    >>> braces("a{b,c}{1..3..2}"), braces("{a}"), braces("${A}{x,'y,z'}")
    (['ab1', 'ab3', 'ac1', 'ac3'], ['{a}'], ['${A}x', "${A}'y,z'"])
    """
    at = 0
    while at < len(word):
        if word[at] != "{":
            at = skipped(word, at)
            continue
        end = closing_brace(word, at + 1)
        inner = word[at + 1 : end - 1]
        several = _brace_parts(inner) if end else []
        if several:
            behind = braces(word[end:])
            ahead = [one for part in several for one in braces(part)]
            if len(ahead) * len(behind) > MOST_OF_RANGE:
                raise InputError(f"{word[:40]}: becomes more than {MOST_OF_RANGE:,} words")
            return [f"{word[:at]}{one}{rest}" for one in ahead for rest in behind]
        at += 1
    return [word]


def closing_brace(word: str, at: int) -> int:
    """Behind the brace that closes; 0 where none does."""
    depth = 1
    while at < len(word):
        depth += {"{": 1, "}": -1}.get(word[at], 0)
        if not depth:
            return at + 1
        at = skipped(word, at) if word[at] not in "{}" else at + 1
    return 0


def _brace_parts(inner: str) -> list[str]:
    parts, start, at, depth = list[str](), 0, 0, 0
    while at < len(inner):
        depth += {"{": 1, "}": -1}.get(inner[at], 0)
        if inner[at] == "," and not depth:
            parts.append(inner[start:at])
            start = at + 1
        at = skipped(inner, at) if inner[at] not in "{}," else at + 1
    if parts:
        return [*parts, inner[start:]]
    found = RANGE.fullmatch(inner)
    if found is None or found[1].lstrip("-").isdigit() != found[2].lstrip("-").isdigit():
        return []
    of_numbers = found[1].lstrip("-").isdigit()
    first, last = (int(found[n]) if of_numbers else ord(found[n]) for n in (1, 2))
    step = abs(int(found[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if len(numbers) > MOST_OF_RANGE:
        return []
    width = max((len(found[n].lstrip("-")) for n in (1, 2) if found[n].lstrip("-").startswith("0")), default=0)
    return [f"{number:0{width}d}" if of_numbers else chr(number) for number in numbers]
