"""Ways to break valid documents: their values, and their bytes."""

from __future__ import annotations

import pickle
import random
from typing import Any

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31,
    2**63,
    -(2**63),
    10**30,
    10**400,
    0.5,
    -0.5,
    1e-320,
    1e308,
    -1e308,
    1e18,
    "",
    "x",
    "0",
    "-1",
    "1e9",
    "nan",
    "inf",
    "1" * 400,
    "\x00",
    "\ud800",
    "é\n\t",
    "fp8",
    "gpt2",
    "node0",
    "../../etc/passwd",
    "!!python/object:os.system",
    [],
    {},
    [[]],
    [{}],
    {"": ""},
    {"x": None},
    [None],
    [0],
    [0, 1],
    ["a", "b"],
    {"preset": "x"},
    [1] * 100,
    {"preset": 3},
    {"mode": []},
]


def _copy(tree: Any) -> Any:
    """As `copy.deepcopy` of plain data, in an eighth of the time."""
    return pickle.loads(pickle.dumps(tree))


def break_tree(tree: Any, dice: random.Random) -> Any:
    """A copy of plain data with one to four places changed: replaced, left out, doubled, moved, or cut."""
    tree = _copy(tree)
    for _ in range(dice.choice([1, 1, 2, 4])):
        if not (isinstance(tree, dict | list) and tree):
            return _copy(dice.choice(ODD))
        holder, key = _place(tree, dice)
        what = dice.random()
        if what < 0.6:
            holder[key] = _copy(dice.choice(ODD))
        elif what < 0.7:
            del holder[key]
        elif what < 0.8:
            other, source = _place(tree, dice)
            holder[key] = _copy(other[source] if _has(other, source) else None)
        elif what < 0.9 and isinstance(holder, dict):
            holder[dice.choice(["", "x", f"{key}s", str(key)[:-1], "preset", "<name>"])] = holder.pop(key)
        elif isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
            holder[key] = holder[key] * dice.choice([-1, 0.1, 2, 3, 1e9, 1e-9])
        else:
            holder[key] = [holder[key], _copy(holder[key])]
    return tree


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else 0 <= key < len(holder)


def _place(tree: Any, dice: random.Random) -> tuple[Any, Any]:
    """A (container, key), found by going down: a key at the top is as likely as all that lies below another."""
    while True:
        key = dice.choice(list(tree)) if isinstance(tree, dict) else dice.randrange(len(tree))
        inner = tree[key]
        if not (isinstance(inner, dict | list) and inner) or dice.random() < 0.25:
            return tree, key
        tree = inner


TOKENS = [
    b"\x00",
    b"\xff",
    b"\xfe\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"-",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/none ",
    b"NaN",
    b"Infinity",
    b"1e999",
    b"\n",
    b"\t",
    b"  ",
    b"\x1f\x8b\x08",
    b"9" * 5000,
    b"[" * 200,
    b"%YAML 9.9\n",
]


def break_bytes(data: bytes, dice: random.Random) -> bytes:
    """A file with one to eight places flipped, cut, doubled, swapped or overwritten by what parsers stumble over."""
    out = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 4, 8])):
        at = dice.randrange(len(out) + 1)
        what = dice.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << dice.randrange(8)
        elif what == 1:
            del out[at : at + dice.choice([1, 2, 10, 1000])]
        elif what == 2:
            out[at:at] = out[at : at + dice.choice([1, 5, 50])]
        elif what == 3:
            out[at:at] = dice.choice(TOKENS)
        elif what == 4:
            out[at:] = b""
        else:
            out[at : at + 1] = bytes([dice.randrange(256)])
        if not out:
            break
    return bytes(out)
