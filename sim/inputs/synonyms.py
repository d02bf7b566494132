"""Names that other programs have for a scenario's keys and values, for messages about unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PRESETS = Path(__file__).parents[1] / "presets"
NO_KEY = "none"  # in place of a key, for names of what decides nothing
ACCUMULATED = ("gradient_accumulation_steps", "accumulation_steps", "grad_accum")  # micro-batches of a step and replica


@cache
def synonyms() -> dict[str, str]:
    """The key of each name, the first one where there are several; `NO_KEY` where there is none."""
    return {word: keys[0] for word, keys in _keys().items()}


@cache
def _keys() -> dict[str, list[str]]:
    """All keys of each name: programs of several kinds may have it."""
    found: dict[str, list[str]] = {}
    for key, words in _read("synonyms.yaml").items():
        for word in words.split():
            found.setdefault(word, []).append(key)
    return found


@cache
def value_synonyms() -> dict[tuple[str, str], list[str]]:
    """The values of each pair of a key's last part and a word."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, words_of in _read("value_synonyms.yaml").items():
        for value, words in words_of.items():
            for word in words.split():
                found.setdefault((key, word), []).append(str(value))
    return found


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((_PRESETS / name).read_text(encoding="utf-8"))
    return found


def _plain(word: object) -> str:
    return str(word).lower().lstrip("-").replace("-", "_")


def synonym(word: object, section: str = "") -> str:
    """`; here it is parallelism.pp` for another program's name of a key, that there is none, or nothing. Of several
    keys, those of the `section` in which it was found.

    >>> synonym("pipeline-model-parallel-size"), synonym("colour")
    ('; here it is parallelism.pp', '')
    >>> synonym("block_size"), synonym("block_size", "inference")
    ('; here it is training.seq_len', '; here it is inference.kv_cache.block_tokens')
    >>> synonym("gpus", "cluster")
    '; here it is cluster.nodes or cluster.gpus_per_node'
    >>> synonym("gradient_accumulation_steps")
    '; here training.global_batch_size = micro_batch_size × dp × gradient_accumulation_steps'
    """
    if _plain(word) in ACCUMULATED:
        return f"; here training.global_batch_size = micro_batch_size × dp × {_plain(word)}"
    keys = _keys().get(_plain(word), [])
    keys = [one for one in keys if one.startswith(f"{section}.")] or keys[:1]
    if keys == [NO_KEY]:
        return "; there is no such key here, since it changes neither a step's time nor its memory"
    return f"; here it is {' or '.join(keys)}" if keys else ""


def value_synonym(path: Iterable[object], word: object) -> str:
    """`; here it is eager or compiled` for another program's word for a value of the key at `path`, or nothing.

    >>> value_synonym(("framework",), "torchtitan"), value_synonym(("framework",), "caffe")
    ('; here it is eager or compiled', '')
    """
    for part in path:
        if values := value_synonyms().get((str(part), _plain(word))):
            return f"; here it is {' or '.join(values)}"
    return ""
