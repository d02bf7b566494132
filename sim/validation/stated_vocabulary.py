"""Vocabularies that a table's assumptions state for models by name, where its rows have others.

An assumption is written for a person, with its basis. A row's `model.vocab` may be the default of a conversion. So if
an assumption "vocabulary: NAME NUMBER, …" names a row's model (the row's group begins with NAME) and the numbers
differ, the row is simulated with the assumption's, and `Measurement.not_believed` says so. Inferred assumptions do not
count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from sim.validation.records import Measurement

BELIEVED = ("stated", "definition")


def stated_vocabularies(assumptions: object) -> dict[str, int]:
    """Vocabulary by model's name, without case and marks.

    >>> fact = "vocabulary: Llama 2 32000, Llama 3 128256; others unknown (Nemotron 256000: known)"
    >>> stated_vocabularies([{"fact": fact, "basis": "definition"}])
    {'llama2': 32000, 'llama3': 128256, 'nemotron': 256000}
    >>> stated_vocabularies([{"fact": fact, "basis": "inferred"}])
    {}
    """
    found: dict[str, int] = {}
    for assumption in assumptions if isinstance(assumptions, list) else ():
        if not isinstance(assumption, Mapping) or assumption.get("basis") not in BELIEVED:
            continue
        said = re.match(r"vocabulary: (.*)", str(assumption.get("fact", "")))
        for clause in re.split(r"[,;:()]", said[1]) if said else ():
            named = re.fullmatch(r"\s*([A-Za-z].*) (\d{4,7})\s*", clause)
            if named:
                found[_plain(named[1])] = int(named[2])
    return found


def with_stated_vocabularies(rows: Sequence[Measurement], assumptions: object) -> list[Measurement]:
    """The rows, with the vocabulary that an assumption states for their model."""
    stated = stated_vocabularies(assumptions)
    return [_with_stated(row, stated) for row in rows] if stated else list(rows)


def _with_stated(row: Measurement, stated: Mapping[str, int]) -> Measurement:
    model = row.scenario.get("model")
    names = [name for name in stated if _begins_with(row.group, name)]
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), int) or not names:
        return row
    vocab = stated[max(names, key=len)]
    if vocab == model["vocab"]:
        return row
    why = f"model.vocab {model['vocab']} is not believed, because an assumption of the table states {vocab}"
    return replace(row, scenario={**row.scenario, "model": {**model, "vocab": vocab}}, not_believed=why)


def _begins_with(group: str, name: str) -> bool:
    """Whether a group's first words are a model's plain name, and not a longer number or word.

    >>> [_begins_with(group, "qwen2") for group in ("Qwen2-7B", "Qwen 2 7B", "Qwen 2.5 7B", "qwen25", "Qwen2VL 7B")]
    [True, True, False, False, False]
    """
    return bool(re.match(r"[^a-z0-9]*".join(name) + r"(?![a-z0-9]|\.[0-9])", group.lower()))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
