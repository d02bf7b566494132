"""Names that other programs have for a scenario's keys, for the message about an unknown key."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

_FILE = Path(__file__).parents[1] / "presets" / "synonyms.yaml"
NO_KEY = "none"  # in place of a key, for names of what decides nothing


@cache
def synonyms() -> dict[str, str]:
    """The key of each name; `NO_KEY` where there is none."""
    words_of = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {word: key for key, words in words_of.items() for word in words.split()}


def synonym(word: object) -> str:
    """`; here it is parallelism.pp` for another program's name of a key, that there is none, or nothing.

    >>> synonym("pipeline-model-parallel-size"), synonym("colour")
    ('; here it is parallelism.pp', '')
    """
    key = synonyms().get(str(word).lower().lstrip("-").replace("-", "_"))
    if key == NO_KEY:
        return "; there is no such key here, since it changes neither a step's time nor its memory"
    return f"; here it is {key}" if key else ""
