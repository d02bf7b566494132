"""Loops of a launch script that count and only append to variables, as the text that they stand for.

`for ((i=1; i<8; i++)); do P+='*E'; done` and the same over `$(seq 1 7)` or `{1..7}`. Other loops are read once, whose
variable then has no value.
"""

from __future__ import annotations

import re

from sim.convert.scripts.command_line import ASSIGNMENT, unquoted, with_own_values, with_values

BODY = r"[ \t]*;?\s*do\b((?:(?!\bdo\b|\bdone\b)[\s\S])*?)\bdone\b"
COUNTED = re.compile(
    r"(?m)^[ \t]*for[ \t]*\(\([ \t]*(\w+)[ \t]*=[ \t]*([^;\s]+)[ \t]*;[ \t]*\1[ \t]*(<=?)[ \t]*([^;\s]+)[ \t]*;"
    rf"[ \t]*(?:\1\+\+|\+\+\1)[ \t]*\)\){BODY}"
)
LISTED = re.compile(
    r"(?m)^[ \t]*for[ \t]+(\w+)[ \t]+in[ \t]+(?:\$\([ \t]*seq[ \t]+(?:([^\s()]+)[ \t]+)?([^\s()]+)[ \t]*\)|"
    rf"\{{(0|[1-9]\d*)\.\.(0|[1-9]\d*)\}}){BODY}"
)
APPENDS = re.compile(r"\w+\+=(?:\"[^\"\n]*\"|'[^'\n]*'|\([^()\n]*\)|[^\s;()]+)[ \t]*")
COMMENT = re.compile(r"(?m)(^|\s)#.*$")
MOST = 10_000  # repetitions


def unrolled(text: str) -> str:
    """The script with such loops written out, each on the first of its lines.

    >>> unrolled("P=x\\nfor ((i=1; i<4; i++)); do P+=$i; done")
    'P=x\\nP+=1; P+=2; P+=3'
    >>> unrolled("for i in {0..1}; do\\n  run $i\\ndone")
    'for i in {0..1}; do\\n  run $i\\ndone'
    >>> unrolled("for i in {2..1}; do P+=$i; done")
    'P+=2; P+=1'
    """
    counted = COUNTED.sub(lambda found: _written_out(found, text, found[2], found[4], found[3] == "<="), text)
    return LISTED.sub(
        lambda found: _written_out(found, counted, found[2] or found[4] or "1", found[3] or found[5], True), counted
    )


def _written_out(found: re.Match[str], text: str, first: str, last: str, through: bool) -> str:
    """The loop's repetitions, and as many empty lines as it had; the loop itself where it does something else."""
    body = [part.strip() for part in re.split(r"[;\n]", COMMENT.sub("", found[found.re.groups])) if part.strip()]
    before = with_own_values(text[: found.start()])
    values = {name: unquoted(value) for name, more, value in ASSIGNMENT.findall(before) if not more}
    bounds = [with_values(re.sub(r"^(?=[A-Za-z])", "$", bound), values) for bound in (first, last)]
    appends = bool(body) and all(APPENDS.fullmatch(part) for part in body)
    if not appends or not all(bound.isdecimal() for bound in bounds):
        return found[0]
    start, end = int(bounds[0]), int(bounds[1])
    braces = found.re is LISTED and found[4] is not None  # which count down, too
    numbers = range(start, end - 1, -1) if braces and end < start else range(start, end + through)
    if len(numbers) > MOST:
        return found[0]
    parts = [with_values(part, {found[1]: str(number)}) for number in numbers for part in body]
    return "; ".join(parts) + "\n" * found[0].count("\n")
