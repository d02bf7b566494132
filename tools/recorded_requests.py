"""Requests for the tools that record what real schedulers do, and the files that these write."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

KEYS = ("prompt_tokens", "output_tokens", "arrives", "prefix", "prefix_tokens")


def drawn(seed: int, count: int, prompts: tuple[int, int], outputs: tuple[int, int], last: int = 0) -> list[list[Any]]:
    """Requests with lengths from these ranges, which arrive while iterations 0 to `last` are computed."""
    draw = random.Random(seed)
    arrivals = sorted(draw.randint(0, last) for _ in range(count))
    return [[draw.randint(*prompts), draw.randint(*outputs), at, "", 0] for at in arrivals]


def sharing(seed: int, count: int, prefixes: int, shared: int, own: tuple[int, int], last: int = 0) -> list[list[Any]]:
    """Requests whose prompts begin with one of a few prefixes."""
    draw, found = random.Random(seed), drawn(seed, count, own, (4, 20), last)
    for row in found:
        row[0], row[3], row[4] = row[0] + shared, f"p{draw.randrange(prefixes)}", shared
    return found


class Common(NamedTuple):
    """Requests that every product's scheduler is recorded with."""

    mixed: list[list[Any]]
    long: list[list[Any]]
    late: list[list[Any]]
    alike: list[list[Any]]
    shared: list[list[Any]]
    shared_at_once: list[list[Any]]


def common() -> Common:
    """The requests of all products; each product's own ones are drawn in its tool."""
    return Common(
        mixed=drawn(1, 24, (20, 300), (2, 40)),
        long=drawn(2, 16, (500, 1500), (2, 24)),
        late=drawn(3, 30, (10, 200), (2, 30), last=60),
        alike=drawn(6, 8, (100, 110), (30, 60)),
        shared=sharing(4, 20, 3, 160, (5, 60), last=30),
        shared_at_once=sharing(5, 20, 2, 165, (5, 60)),
    )


def write(out: Path, product: str, version: str, block_tokens: int, cases: list[dict[str, Any]]) -> None:
    """A file that tests/sim/serve/test_real_schedulers.py reads."""
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    head = f'"{product}":"{version}","block_tokens":{block_tokens},"request":{json.dumps(KEYS)}'
    out.write_text(f'{{{head},"cases":[\n{rows}\n]}}\n')
