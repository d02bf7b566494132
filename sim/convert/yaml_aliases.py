"""A YAML with anchors and aliases (`&name`, `*name`, `<<: *name`), which the simulator's own files must not have and
other programs' often do, as one without (YAML 1.1, "Merge Key Language-Independent Type")."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sim.core.errors import InputError
from sim.inputs.yaml_input import MAX_DEPTH, parse_yaml

ALIAS = re.compile(r"(?m)(?:^|[\s\[,:-])\*\w")
SET = re.compile(r"(?m)((?:^|[:-])[ ]+)!!set(?=[ ]*(?:$|\{))")  # a mapping without values (`peft` of Megatron-Bridge)
MERGE = "tag:yaml.org,2002:merge"
MOST_NODES = 20_000  # of a file in which aliases are put in their places


def parsed(text: str, label: str) -> Any:
    """The value of a YAML text. `label` starts error messages.

    Raises:
        InputError: for text that is no YAML, and one that aliases make too long.
    """
    text = SET.sub(r"\1", text)
    return parse_yaml(_without_aliases(text, label) if ALIAS.search(text) else text, label)[0]


def _without_aliases(text: str, label: str) -> str:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return text  # whose error `parse_yaml` says
    left = [MOST_NODES]
    return str(yaml.serialize(_copy(root, left, 0, label), Dumper=yaml.SafeDumper, width=2**20))


def _copy(node: Any, left: list[int], depth: int, label: str) -> Any:
    """A node that shares none with others; `left`: how many more there may be."""
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise InputError(
            f"{label}: aliases make it longer than {MOST_NODES:,} values, or deeper than {MAX_DEPTH} levels"
        )
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, [_copy(item, left, depth + 1, label) for item in node.value])
    if isinstance(node, yaml.MappingNode):
        pairs = [(_copy(k, left, depth, label), _copy(v, left, depth + 1, label)) for k, v in _merged(node, left)]
        return yaml.MappingNode(node.tag, pairs)
    return yaml.ScalarNode(node.tag, node.value, style=node.style)


def _merged(node: Any, left: list[int]) -> list[tuple[Any, Any]]:
    """A mapping's pairs, and before them those of the mappings that `<<` names and that it does not have itself."""
    left[0] -= len(node.value)
    own = [(key, value) for key, value in node.value if key.tag != MERGE]
    seen = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
    found: list[tuple[Any, Any]] = []
    for key, value in node.value:
        named = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for other in named if key.tag == MERGE and left[0] > 0 else []:
            pairs = _merged(other, left) if isinstance(other, yaml.MappingNode) else []
            found += [(k, v) for k, v in pairs if k.value not in seen]
            seen |= {k.value for k, _ in pairs if isinstance(k, yaml.ScalarNode)}
    return [*found, *own]
