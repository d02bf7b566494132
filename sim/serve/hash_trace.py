"""Request traces with hashes of their prompts' blocks, in Mooncake's format: a JSON object on each line with timestamp
(milliseconds), input_length, output_length and hash_ids, one for each 512 tokens of the prompt.

Published: github.com/kvcache-ai/Mooncake, FAST25-release/traces (conversation, toolagent, synthetic).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.core.errors import InputError
from sim.core.json_text import parse_json
from sim.inputs.workloads import MAX_REQUESTS, MAX_TOKENS
from sim.serve.hashed_prefixes import HASHED_TOKENS

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
MAX_HASHES = -(-MAX_TOKENS // HASHED_TOKENS)


class HashedRequest(NamedTuple):
    """A line: when it arrives, its tokens, and hashes of the prompt's whole blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int | str, ...]


def hashed_requests(text: str, path: str) -> list[HashedRequest]:
    """The requests of a trace's text.

    Raises:
        InputError: naming the line and the key.
    """
    found: list[HashedRequest] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if len(found) >= MAX_REQUESTS:
            raise InputError(f"{where}: a trace may hold at most {MAX_REQUESTS:,} requests")
        found.append(_request(parse_json(line, str(path), line=number), where))
    return found


def _request(row: object, where: str) -> HashedRequest:
    if not isinstance(row, dict):
        raise InputError(f"{where}: found {_shown(row)}; each line of such a trace is an object")
    for key in KEYS[:3]:
        if key not in row:
            raise InputError(f"{where}: {key} is missing (keys: {', '.join(KEYS)})")
    at_ms = row["timestamp"]
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms <= 1e15:
        raise InputError(f"{where}: timestamp: found {_shown(at_ms)}; must be milliseconds from 0 to 1e15")
    prompt, output = (_tokens(row[key], f"{where}: {key}") for key in KEYS[1:3])
    hashes = row.get("hash_ids", [])
    plain = isinstance(hashes, list) and len(hashes) <= MAX_HASHES and all(type(h) in (int, str) for h in hashes)
    if not plain or any(len(str(h)) > 100 for h in hashes if isinstance(h, str)):
        raise InputError(f"{where}: hash_ids: found {_shown(hashes)}; must be a list of whole numbers or short texts")
    if len(set(hashes)) < len(hashes):
        raise InputError(f"{where}: hash_ids: holds one twice; a hash stands for its block and all before it")
    return HashedRequest(at_ms / 1000, prompt, output, tuple(hashes[: prompt // HASHED_TOKENS]))


def _tokens(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise InputError(f"{where}: found {_shown(value)}; must be a whole number from 1 to {MAX_TOKENS:,}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
