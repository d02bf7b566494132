"""Arrays of a launch script, read as text: all their words, single elements, slices and lengths.

Bash's manual, "Arrays": `A=(a b)`, `A+=(c)`, `A[1]=b`, and `declare -A A=([k]=v)`; `${A[@]}`, `${A[@]:1:2}`, `${A[1]}`,
`${A[k]}`, `${#A[@]}`, and `$A`, which is the first element alone, as in `A="${A[@]} c"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OPENING = re.compile(
    r"(?:^|(?<=[;\s]))(?:(?:export|readonly|local|declare|typeset)(?:[ \t]+-\w+)*[ \t]+)?([A-Za-z_]\w*)(\+?)=\("
)
KEYED = re.compile(
    r"(?m)(?:^|(?<=;))[ \t]*([A-Za-z_]\w*)\[([^\]\s]+)\](\+?)=(\"[^\"]*\"|'[^']*'|[^\s();]*)[ \t]*(?=;|$)"
)
PLAIN = re.compile(  # of an array: of its first element
    r"(?m)(?:^|(?<=;))[ \t]*(?:(?:export|readonly|local|declare|typeset)[ \t]+)?([A-Za-z_]\w*)(\+?)="
    r"(\"[^\"]*\"|'[^']*'|[^\s();]*)[ \t]*(?=;|$)"
)
TOKEN = re.compile(r"(?:\[(\"[^\"]*\"|'[^']*'|[^\]\"']+)\]=)?((?:\"[^\"]*\"|'[^']*'|[^\s\"'])+)")
# `${#A[@]}`, `${A[1]}`, `${A[@]:1:2}`, `${A[k]:-default}`, `$A`
REFERENCE = r"\$(?:\{(#?)(\w+)(?:\[([^\[\]]*|\$\[[^\[\]]*\])\])?(:-?\d+(?::\d+)?|:?-[^{}]*)?\}|(\w+))"
ANY = re.compile(REFERENCE)
PIECE = re.compile(rf"\"[^\"]*\"|'[^']*'|{REFERENCE}")
BRACKETS = re.compile(r"\"[^\"]*\"|'[^']*'|[()]")
QUOTED = r"('[^']*'|\"[^\"]*\")"
ALL = ("@", "*")
MOST_CHARACTERS = 100_000  # of what references to arrays become

Array = dict[str, str]  # texts with their quotes, by key or number


def taken_arrays(text: str) -> tuple[str, dict[str, Array]]:
    """The text without assignments of arrays, and these. A text that refers to none of its arrays keeps them.

    >>> taken_arrays("A=(--bf16 --lr 1)\\nB=(--fp16)\\nrun ${A[@]}")
    ('\\n\\nrun ${A[@]}', {'A': {'0': '--bf16', '1': '--lr', '2': '1'}, 'B': {'0': '--fp16'}})
    """
    arrays: dict[str, Array] = {}
    rest, at = "", 0
    kinds = (OPENING, KEYED, PLAIN)
    for opening in sorted((found for kind in kinds for found in kind.finditer(text)), key=lambda found: found.start()):
        end = _closing(text, opening.end()) if opening.re is OPENING else opening.end()
        if opening.start() < at or end is None or (opening.re is PLAIN and opening[1] not in arrays):
            continue
        rest, at = rest + text[at : opening.start()], end
        array = arrays.setdefault(opening[1], {})
        if opening.re is PLAIN:
            value = with_arrays(opening[3], {opening[1]: array})
            array["0"] = array.get("0", "") * bool(opening[2]) + value
        elif opening.re is KEYED:
            array[_plain(opening[2])] = array.get(_plain(opening[2]), "") * bool(opening[3]) + opening[4]
        else:
            arrays[opening[1]] = _elements(text[opening.end() : end - 1], opening[1], array, bool(opening[2]))
    rest += text[at:]
    return (rest, arrays) if any(_name(found) in arrays for found in ANY.finditer(rest)) else (text, {})


def with_arrays(text: str, arrays: Mapping[str, Array]) -> str:
    """The text with what it refers to in arrays; a key with a variable is left for the next time.

    >>> with_arrays('"${A[@]:1}" ${#A[@]} ${A[-1]} ${B[big]}', {"A": {"0": "x", "1": "y"}, "B": {"big": '"z"'}})
    'y 2 y z'
    """
    left = MOST_CHARACTERS

    def value(found: re.Match[str], quoted: bool) -> str:
        nonlocal left
        result = _value(found, arrays)
        if result is None or len(result) > left:
            return found[0]
        left -= len(result)
        return re.sub(r"[\"']", "", result) if quoted else result

    def piece(found: re.Match[str]) -> str:
        inner = found[0][1:-1]
        if found[0][0] == '"' and (alone := ANY.fullmatch(inner)) and _name(alone) in arrays:
            result = value(alone, quoted=False)
            return found[0] if result == inner else result
        if found[0][0] == '"':
            return ANY.sub(lambda each: value(each, quoted=True), found[0])
        return found[0] if found[0][0] == "'" else value(found, quoted=False)

    return PIECE.sub(piece, text) if arrays else text


def _closing(text: str, start: int) -> int | None:
    """Where the bracket that opens before `start` has closed; None where it does not."""
    depth = 1
    for found in BRACKETS.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def _elements(text: str, name: str, before: Array, adds: bool) -> Array:
    """The elements of an array's text, which may refer to the array itself."""
    found = dict(before) if adds else {}
    plain = re.sub(rf"{QUOTED}|[()]", lambda part: part[1] or " ", text)
    number = max((int(key) for key in found if key.isdecimal()), default=-1)
    for token in TOKEN.finditer(with_arrays(plain, {name: before})):
        key = str(number + 1) if token[1] is None else _plain(token[1])
        number = int(key) if key.isdecimal() else number
        found[key] = token[2]
    return found


def _name(found: re.Match[str]) -> str:
    return found[2] or found[5]


def _plain(text: str) -> str:
    return text.strip("\"'")


def _value(found: re.Match[str], arrays: Mapping[str, Array]) -> str | None:
    """Return the text that a reference to a shell array expands to; None where it is unknown, or no array."""
    length, key, more = found[1], found[3], found[4] or ""
    array = arrays.get(_name(found))
    if array is None:
        return None
    if length:
        return str(len(array)) if key in ALL and not any("$" in word for word in array.values()) else None
    if key in ALL:
        chosen = _sliced([*array.values()], more)
        return None if chosen is None else " ".join(chosen)
    key = _plain(key or "0")
    if re.fullmatch(r"-\d+", key):
        key = str(len(array) + int(key))
    if key in array:
        return _plain(array[key])
    if re.fullmatch(r"[A-Za-z_]\w*", key) and all(known.isdecimal() for known in array):  # an index is arithmetic
        return f"${{{_name(found)}[${key}]}}"
    default = re.fullmatch(r":?-([^{}]*)", more)
    return _plain(default[1]) if default and not more[1:].isdecimal() and "$" not in key else None


def _sliced(words: list[str], more: str) -> list[str] | None:
    """The words from an offset, perhaps so many of them (`:1:2`)."""
    if not more:
        return words
    numbers = [int(number) for number in more[1:].split(":") if re.fullmatch(r"-?\d+", number)]
    if not more.startswith(":") or len(numbers) != more.count(":"):
        return words if words else None
    first = numbers[0]
    return words[first:] if len(numbers) == 1 else words[first : first + numbers[1]]
