"""Job files of SkyPilot and dstack as the shell script that they run.

SkyPilot's task YAML (docs "Task YAML", sky/task.py: `envs`, `secrets`, `setup`, `run`; "Environment variables":
`SKYPILOT_NUM_GPUS_PER_NODE` and `SKYPILOT_NUM_NODES` are set for both scripts), and dstack's configuration (docs
".dstack.yml": `env`, `commands`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    """A program's keys: of scripts in order, of environments, and others of which a file has one."""

    scripts: tuple[str, ...]
    environments: tuple[str, ...]
    marks: tuple[str, ...]


KINDS = (
    _Kind(("setup", "run"), ("envs", "secrets"), ("resources", "envs", "setup", "num_nodes", "file_mounts", "service")),
    _Kind(("commands",), ("env",), ("resources", "image", "python", "fleets")),
)
GPUS, NODES = "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NUM_NODES"


def job_script(data: Mapping[str, Any]) -> tuple[str, list[object]] | None:
    """The script of a job, and the environments that it is started with; None for another mapping."""
    for kind in KINDS:
        scripts = [text for key in kind.scripts if (text := _text(data.get(key)))]
        if _text(data.get(kind.scripts[-1])) and any(mark in data for mark in kind.marks):
            return "\n".join(scripts), [_counts(data), *(data.get(key) for key in kind.environments)]
    return None


def _text(value: object) -> str:
    """A script, or the lines of one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else ""


def _counts(data: Mapping[str, Any]) -> dict[str, int]:
    """What SkyPilot sets: nodes, and the GPUs of each where all alternatives have as many."""
    nodes, resources = data.get("num_nodes", 1), data.get("resources")
    given = resources.get("accelerators") if isinstance(resources, dict) else None
    counts = {*_each(given)}
    gpus = {GPUS: counts.pop()} if len(counts) == 1 else {}
    return gpus | ({NODES: nodes} if type(nodes) is int else {})


def _each(given: object) -> Iterator[int]:
    """The number in `H100:8`, in `{H100: 8}`, and in each of several such."""
    if isinstance(given, str):
        number = given.partition(":")[2].strip() or "1"
        yield from [int(number)] if number.isdecimal() else []
    elif isinstance(given, dict):
        for name, number in given.items():
            yield from [number] if type(number) is int else _each(name) if number is None else []
    elif isinstance(given, list):
        for item in given:
            yield from _each(item)
