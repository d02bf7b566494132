"""Requests of a serving workload: a pattern, or a trace in a file.

A pattern's lengths are drawn as those of `vllm bench serve --random-range-ratio` (vllm/benchmarks/datasets.py): uniform
whole numbers from length·(1 - ratio), rounded down, to length·(1 + ratio), rounded up.

A trace is CSV, or in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST25-release/traces): a JSON object on each
line with timestamp (milliseconds), input_length, output_length and hash_ids, one for each 512 tokens of the prompt.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sim.core.errors import InputError
from sim.core.files import read_text
from sim.core.json_text import parse_json
from sim.core.json_values import is_number
from sim.core.units import counted
from sim.inputs.engine_file import engine_of
from sim.inputs.input_source import show
from sim.inputs.serving_keys import HASHED_TOKENS
from sim.inputs.workloads import HASHED_SUFFIX, MAX_REQUESTS, MAX_TOKENS, Inference, RequestPattern, RequestTrace

MAX_TRACE_BYTES = 256 * 2**20
REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("prefix_id", "prefix_tokens", "adapter_id")
HASHED_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
MAX_HASHES = -(-MAX_TOKENS // HASHED_TOKENS)


class Request(NamedTuple):
    """One request. Prompts of equal `prefix_id` begin with the same tokens, as many as both mark in `prefix_tokens`;
    or `hashes` stand for the prompt's blocks, each with all before it. `adapter`: a LoRA adapter's name, empty for the
    base model."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str = ""
    prefix_tokens: int = 0
    hashes: tuple[int | str, ...] = ()
    adapter: str = ""

    @property
    def prefix(self) -> str | tuple[int | str, ...]:
        """What its beginning is known by; empty for one that nobody shares."""
        return self.hashes or self.prefix_id


def make_requests(requests: RequestPattern | RequestTrace) -> tuple[Request, ...]:
    """All requests in order of arrival.

    A pattern with a rate has independent gaps, the first request after the first gap: exponential ones, a Poisson
    process, or with a `burstiness` b other than 1 those of a gamma distribution of shape b and scale 1 / (b · rate)
    (`vllm bench serve --burstiness`, vllm/benchmarks/serve.py, get_request), whose standard deviation is their mean
    divided by the root of b. With `exact_rate` all gaps are scaled by one factor, so that the last request comes at
    count / rate (get_request since 0.10, pull request 21108). Gaps that are all 0 stay, as there.

    Raises:
        InputError: for a trace that is no such file.
    """
    if isinstance(requests, RequestTrace):
        return read_trace(requests.trace)
    n = requests.count
    if requests.rate_per_s is None and not requests.range_ratio:
        return (Request(0.0, requests.prompt_len, requests.output_len),) * n
    import numpy as np

    draw = np.random.default_rng(requests.seed)
    gaps = np.zeros(n)
    if requests.rate_per_s:
        mean_s, shape = 1.0 / requests.rate_per_s, requests.burstiness
        gaps = draw.exponential(mean_s, n) if shape == 1.0 else draw.gamma(shape, mean_s / shape, n)
        if requests.exact_rate and (total_s := gaps.sum()) > 0:
            gaps = gaps / total_s * (n * mean_s)
    prompts, outputs = (
        draw.integers(*requests.lengths(length), n, endpoint=True).tolist()
        for length in (requests.prompt_len, requests.output_len)
    )
    return tuple(map(Request, np.cumsum(gaps).tolist(), prompts, outputs))


def accepted(requests: tuple[Request, ...], inference: Inference) -> tuple[Request, ...]:
    """Return the requests that the engine does not refuse: those of at most `max_request_tokens`, less the engine's
    margin (`Engine.request_margin_tokens`).

    vLLM compares prompt and answer with max_model_len (0.11, v1/engine/processor.py and
    entrypoints/openai/serving_engine.py), SGLang with context_len (0.5.3, srt/managers/tokenizer_manager.py).
    """
    if inference.max_request_tokens is None:
        return requests
    most = inference.max_request_tokens - engine_of(inference.engine).request_margin_tokens
    return tuple([r for r in requests if r.prompt_tokens + r.output_tokens <= most])


def read_trace(path: str | Path) -> tuple[Request, ...]:
    """A trace: CSV, or lines of JSON with hashes in a file that ends in .jsonl.

    The CSV has a header with arrival_s, prompt_tokens, output_tokens and, where known, prefix_id, prefix_tokens and
    adapter_id.
    An empty prefix_id shares nothing; without prefix_tokens the whole prompt may be shared (the shorter of two
    prompts is then the beginning of the longer).

    Raises:
        InputError: naming the line and the column.
    """
    text = read_text(Path(path), MAX_TRACE_BYTES)
    if str(path).endswith(HASHED_SUFFIX):
        found = list(_lines(text, str(path)))
    else:
        try:
            found = list(_rows(csv.reader(io.StringIO(text, newline=""), strict=True), str(path)))
        except csv.Error as error:
            raise InputError(f"{path}: is no CSV: {error}") from None
    if not found:
        raise InputError(f"{path}: holds no requests; needs a line for each")
    return tuple(sorted(found, key=lambda r: r.arrival_s))


def _rows(reader: Iterator[list[str]], path: str) -> Iterator[Request]:
    header = [name.strip() for name in next(reader, [])]
    allowed = (*REQUIRED, *OPTIONAL)
    if not header:
        raise InputError(f"{path}: has no line of column names; needs {', '.join(REQUIRED)}")
    for name in REQUIRED:
        if name not in header:
            raise InputError(f"{path}:1: column {name} is missing; found {show(', '.join(header))}")
    if len(set(header)) != len(header):
        raise InputError(f"{path}:1: a column stands there twice: {show(', '.join(header))}")
    for count, row in enumerate(reader):
        line = count + 2
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"{path}:{line}: has {len(row)} values; the header has {len(header)} columns")
        if count >= MAX_REQUESTS:
            raise InputError(f"{path}:{line}: a trace may hold at most {MAX_REQUESTS:,} requests")
        cells = {name: text.strip() for name, text in zip(header, row, strict=True) if name in allowed}
        yield _request(cells, f"{path}:{line}")


def _request(cells: dict[str, str], where: str) -> Request:
    prompt = _whole(cells["prompt_tokens"], 1, MAX_TOKENS, f"{where}: prompt_tokens")
    output = _whole(cells["output_tokens"], 1, MAX_TOKENS, f"{where}: output_tokens")
    prefix, adapter = (_name(cells, key, where) for key in ("prefix_id", "adapter_id"))
    shared = prompt if prefix else 0
    if prefix and cells.get("prefix_tokens"):
        shared = _whole(cells["prefix_tokens"], 0, prompt, f"{where}: prefix_tokens")
    arrival_s = _seconds(cells["arrival_s"], f"{where}: arrival_s")
    return Request(arrival_s, prompt, output, prefix, shared, (), adapter)


def _name(cells: dict[str, str], key: str, where: str) -> str:
    name = cells.get(key, "")
    if len(name) > 1000:
        raise InputError(f"{where}: {key}: found {show(name)}; at most 1,000 characters")
    return name


def _whole(text: str, least: int, most: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= most):
        raise InputError(f"{where}: found {show(text)}; must be a whole number from {least:,} to {most:,}")
    return int(text)


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text) if len(text) <= 64 else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 <= value <= 1e12):
        raise InputError(f"{where}: found {show(text)}; must be a number of seconds from 0 to 1e12")
    return value


def _lines(text: str, path: str) -> Iterator[Request]:
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if count >= MAX_REQUESTS:
            raise InputError(f"{where}: a trace may hold at most {MAX_REQUESTS:,} requests")
        count += 1
        yield _hashed(parse_json(line, path, line=number), where)


def _hashed(row: object, where: str) -> Request:
    if not isinstance(row, dict):
        raise InputError(f"{where}: found {show(row)}; each line of such a trace is an object")
    for key in HASHED_KEYS[:3]:
        if key not in row:
            raise InputError(f"{where}: {key} is missing (keys: {', '.join(HASHED_KEYS)})")
    at_ms = row["timestamp"]
    if not is_number(at_ms) or not 0 <= at_ms <= 1e15:
        raise InputError(f"{where}: timestamp: found {show(at_ms)}; must be milliseconds from 0 to 1e15")
    prompt, output = (_tokens(row[key], f"{where}: {key}") for key in HASHED_KEYS[1:3])
    hashes = row.get("hash_ids", [])
    plain = isinstance(hashes, list) and len(hashes) <= MAX_HASHES and all(type(h) in (int, str) for h in hashes)
    if not plain or any(len(str(h)) > 100 for h in hashes if isinstance(h, str)):
        raise InputError(f"{where}: hash_ids: found {show(hashes)}; must be a list of whole numbers or short texts")
    if len(set(hashes)) < len(hashes):
        raise InputError(f"{where}: hash_ids: holds one twice; a hash stands for its block and all before it")
    if len(hashes) > (most := prompt // HASHED_TOKENS + 1):
        found = f"found {len(hashes):,} for a prompt of {counted(prompt, 'token')}"
        raise InputError(f"{where}: hash_ids: {found}; each stands for {HASHED_TOKENS} tokens, so at most {most:,}")
    known = tuple(hashes[: prompt // HASHED_TOKENS])
    return Request(at_ms / 1000, prompt, output, "", len(known) * HASHED_TOKENS, known)


def _tokens(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise InputError(f"{where}: found {show(value)}; must be a whole number from 1 to {MAX_TOKENS:,}")
    return value
