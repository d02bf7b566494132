"""What small programs write, exactly: echo, printf, cat, seq, expr, bc, wc, tr, cut, head, tail, basename, dirname."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from sim.convert.scripts.arithmetic import Arithmetic, Problem
from sim.convert.scripts.expansion import ANSI, ESCAPES
from sim.convert.scripts.unknown import known

FORMAT = re.compile(r"%([-+ 0#]*)(\d*|\*)(?:\.(\d+))?([sdiufxXobqcgeG%])")
MOST_LINES = 10_000
Program = Callable[[list[str], str | None], str | None]


class _NoNames:
    def number_text(self, name: str, index: str | None) -> str:
        raise Problem(name)

    def set_number(self, name: str, index: str | None, number: int | None) -> None:
        raise Problem(name)


def _escaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        if found[1] or found[2] or found[3]:
            return chr(int(found[1] or found[2], 16) if found[1] or found[2] else int(found[3], 8) % 256)
        return ESCAPES.get(found[4], found[0] if found[4] not in "\\\"'" else found[4])

    return ANSI.sub(one, text)


def formatted(words: list[str]) -> str | None:
    """What `printf` makes of a format and its arguments; None where that is not known.

    >>> formatted(["%s-%02d\\\\n", "a", "3", "b", "4"])
    'a-03\\nb-04\\n'
    """
    if not words or not known(words[0]):
        return None
    pattern, arguments, found = _escaped(words[0]), list(words[1:]), ""
    while True:
        before, at = len(arguments), 0
        for part in FORMAT.finditer(pattern):
            found, at = found + pattern[at : part.start()], part.end()
            text = "%" if part[4] == "%" else _one(part, arguments.pop(0) if arguments else "")
            if text is None:
                return None
            found += text
        found += pattern[at:]
        if not arguments or before == len(arguments):
            return found


def _one(part: re.Match[str], value: str) -> str | None:
    flags, width, precision, kind = part.groups()
    if width == "*" or kind == "q" or (not known(value) and (kind != "s" or width or precision)):
        return None
    if kind in "sbc":
        text = _escaped(value) if kind == "b" else value[:1] if kind == "c" else value
        text = text[: int(precision)] if precision else text
        return text.ljust(int(width or 0)) if "-" in flags else text.rjust(int(width or 0))
    try:
        number: float = float(value or 0) if kind in "fegG" else int(Arithmetic(value or "0", _NoNames()).value() or 0)
        shown = f"%{flags}{width}{'.' + precision if precision else ''}{'d' if kind in 'iu' else kind}"
        return str(shown % number)
    except (ValueError, TypeError):
        return None


def echo(words: list[str], given: str | None) -> str | None:
    flags = ""
    while words and re.fullmatch(r"-[neE]+", words[0]):
        flags += words.pop(0)
    text = " ".join(words)
    return (_escaped(text) if "e" in flags else text) + "\n" * ("n" not in flags)


def cat(words: list[str], given: str | None) -> str | None:
    return given if words in ([], ["-"]) else None


def seq(words: list[str], given: str | None) -> str | None:
    blank = "\n"
    if words[:1] == ["-s"]:
        blank, words = words[1], words[2:]
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    first, step, last = 1, 1, int(words[-1])
    if len(words) > 1:
        first = int(words[0])
    if len(words) > 2:
        step = int(words[1])
    numbers = range(first, last + (1 if step > 0 else -1), step) if step else range(0)
    if len(numbers) > MOST_LINES:
        return None
    return blank.join(map(str, numbers)) + "\n" * bool(numbers)


def expr(words: list[str], given: str | None) -> str | None:
    if not known(*words) or not all(re.fullmatch(r"-?\d+|[-+*/%()<>=|&]|[<>!]=", word) for word in words):
        return None
    try:
        number = Arithmetic(" ".join("==" if word == "=" else word for word in words), _NoNames()).value()
    except Problem:
        return None
    return None if number is None else f"{number}\n"


def bc(words: list[str], given: str | None) -> str | None:
    """Sums of whole numbers; others have a scale of their own."""
    if given is None or any(word != "-q" for word in words):
        return None
    if not re.fullmatch(r"[\d\s+*()%/-]+", given) or len(given.strip().splitlines()) != 1:
        return None
    if re.search(r"\b0\d", given):
        return None
    try:
        return f"{Arithmetic(given, _NoNames()).value()}\n"
    except Problem:
        return None


def wc(words: list[str], given: str | None) -> str | None:
    if given is None or not known(given) or len(words) != 1:
        return None
    counts = {"-l": given.count("\n"), "-w": len(given.split()), "-c": len(given.encode()), "-m": len(given)}
    return f"{counts[words[0]]}\n" if words[0] in counts else None


def tr(words: list[str], given: str | None) -> str | None:
    if given is None or not known(given, *words) or not words:
        return None
    deletes = words[0] == "-d"
    sets = [_characters(word) for word in words[deletes:]]
    if len(sets) != (1 if deletes else 2) or None in sets or not all(sets):
        return None
    old, new = sets[0] or "", "" if deletes else sets[1] or ""
    if deletes:
        return "".join(one for one in given if one not in old)
    new = new.ljust(len(old), new[-1:])[: len(old)]
    return given.translate(dict(zip(map(ord, old), new, strict=True)))


def _characters(text: str) -> str | None:
    names = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9", "[:space:]": " \t\n\r\f\v"}
    text = _escaped(names.get(text, text))
    if text.startswith("-") or "[:" in text:
        return None if len(text) > 1 else text
    ranged = re.sub(r"(.)-(.)", lambda f: "".join(map(chr, range(ord(f[1]), ord(f[2]) + 1))), text, flags=re.DOTALL)
    return ranged


def cut(words: list[str], given: str | None) -> str | None:
    found = re.fullmatch(r"-d ?(.) -f ?(\d+)|-f ?(\d+) -d ?(.)", " ".join(words), re.DOTALL)
    if found is None or given is None or not known(given):
        return None
    mark, at = found[1] or found[4], int(found[2] or found[3])
    lines = [line.split(mark) for line in given.splitlines()]
    return "".join((line[0] if len(line) == 1 else (line + [""] * at)[at - 1]) + "\n" for line in lines)


def head(words: list[str], given: str | None) -> str | None:
    return _lines(words, given, lambda lines, n: lines[:n])


def tail(words: list[str], given: str | None) -> str | None:
    return _lines(words, given, lambda lines, n: lines[-n:] if n else [])


def _lines(words: list[str], given: str | None, part: Callable[[list[str], int], list[str]]) -> str | None:
    found = re.fullmatch(r"(?:-n ?|-)?(\d+)|", " ".join(words))
    if given is None or not known(given) or found is None:
        return None
    return "".join(part(given.splitlines(keepends=True), int(found[1] or 10)))


def basename(words: list[str], given: str | None) -> str | None:
    if not known(*words) or not 1 <= len(words) <= 2 or words[0].startswith("-"):
        return None
    name = words[0].rstrip("/").rpartition("/")[2]
    return (name.removesuffix(words[1]) if len(words) > 1 and name != words[1] else name) + "\n"


def dirname(words: list[str], given: str | None) -> str | None:
    if not known(*words) or len(words) != 1:
        return None
    folder, slash, _ = words[0].rstrip("/").rpartition("/")
    return (folder or slash or ".") + "\n"


UTILITIES: Mapping[str, Program] = {
    "echo": echo,
    "cat": cat,
    "seq": seq,
    "expr": expr,
    "bc": bc,
    "wc": wc,
    "tr": tr,
    "cut": cut,
    "head": head,
    "tail": tail,
    "basename": basename,
    "dirname": dirname,
}
