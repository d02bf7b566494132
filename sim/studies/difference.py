"""Differences between two results: keys of their scenarios, times, memory, critical path, communication, parts of the
model, operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sim.core.errors import InputError

Result = Mapping[str, Any]
OF_STEP = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "compute_s", "exposed_comm_s")
LATENCIES = ("request_latency_s", "time_to_first_token_s", "time_per_output_token_s")
DERIVED = ("model.", "parallelism.", "training.")  # sections whose defaults follow from other keys
EMPTY: tuple[Any, ...] = (None, [], {})  # a section that is left out, and one whose lists are empty, say the same
TIMES = (
    *(*OF_STEP, "bubble_fraction", "duration_s"),
    *(f"{name}.{statistic}" for name in LATENCIES for statistic in ("p50", "p99")),
    *("output_tokens_per_s", "output_tokens_per_s_per_gpu", "comm_share"),
)


def difference(a: Result, b: Result) -> dict[str, Any]:
    """The two results in the form of `--json`: format sim-diff/1.

    Every entry is `{a, b, change}`, `change` being b ÷ a − 1, null where a is 0. `keys`: of the resolved scenarios,
    those that differ, null where one side has none; `follow`: keys that differ because of them. `memory_bytes`: of
    the fullest ranks. `critical_path_s`: by kind. `buffer_bytes`: by kind and group, the sum of a rank's collectives
    and messages, of the rank with most; each as nccl-tests counts it (the whole buffer; a ring sends twice as much for
    an all-reduce).
    `parts_s`, `operators_s`: of the first class of ranks, where both results have them.
    """
    keys = {key: {"a": x, "b": y} for key, x, y in differing_keys(a["scenario"], b["scenario"]) if key != "name"}
    follow = following(keys, a["scenario"], b["scenario"])
    return {
        "format": "sim-diff/1",
        "names": [a["scenario"]["name"], b["scenario"]["name"]],
        "keys": {key: pair for key, pair in keys.items() if key not in follow},
        "follow": {key: keys[key] for key in keys if key in follow},
        "times": _pairs(*({n: v for n in TIMES if (v := _at(r, n)) is not None} for r in (a, b))),
        "fits_in_memory": {"a": a["fits_in_memory"], "b": b["fits_in_memory"]},
        "memory_bytes": _pairs(_memory(a), _memory(b)),
        "critical_path_s": _pairs(a.get("critical_path", {}), b.get("critical_path", {})),
        "buffer_bytes": _pairs(_buffers(a), _buffers(b)),
        "parts_s": _pairs(_parts(a), _parts(b)),
        "operators_s": _pairs(_operators(a), _operators(b)),
    }


def following(keys: Iterable[str], *scenarios: Mapping[str, Any]) -> set[str]:
    """Those keys of a model, a training and a layout that a scenario without them gets again from its other keys."""
    found: set[str] = set()
    for key in reversed(list(keys)):
        if key.startswith(DERIVED) and all(_same_without({*found, key}, scenario) for scenario in scenarios):
            found.add(key)
    return found


def _same_without(keys: set[str], scenario: Mapping[str, Any]) -> bool:
    from sim.inputs.scenario import parse_scenario

    left = {**scenario}
    for key in keys:
        section, name, *_ = key.split(".")
        left[section] = {k: v for k, v in (left.get(section) or {}).items() if k != name}
    try:
        again = parse_scenario(left).model_dump(mode="json")
    except InputError:
        return False
    return all(again.get(section) == scenario.get(section) for section in {key.split(".")[0] for key in keys})


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys, dotted, whose values differ; of a mapping that one side lacks, every key in it.

    >>> list(differing_keys({"tp": 8, "x": {"y": 1, "z": 2}}, {"tp": 4, "x": {"y": 1, "z": 3}}))
    [('tp', 8, 4), ('x.z', 2, 3)]
    """
    x, y = dict(_leaves(a, "")), dict(_leaves(b, ""))
    for key in dict.fromkeys([*x, *y]):
        if x.get(key) != y.get(key) and not (x.get(key) in EMPTY and y.get(key) in EMPTY):
            yield key, x.get(key), y.get(key)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _at(result: Result, dotted: str) -> float | None:
    value: Any = result
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def _memory(result: Result) -> dict[str, float]:
    if "pools" in result and "memory" not in result:  # an rl step: each pool's turns
        return {
            f"{pool['name']}: {turn}": size for pool in result["pools"] for turn, size in pool["peak_by_turn"].items()
        }
    worst = max(result["memory"], key=lambda row: row["peak"])
    return {key: value for key, value in worst.items() if key not in ("ranks", "rank", "count")}


def _buffers(result: Result) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in result.get("communication", []):
        name = f"{row['kind']} {row['group']}"
        out[name] = max(out.get(name, 0.0), row["bytes"])
    return out


def _operators(result: Result) -> dict[str, float]:
    out: dict[str, float] = {}
    for ranks in result.get("time_by_operator", [])[:1]:
        for row in ranks.get("operators", []) if isinstance(ranks, Mapping) else []:
            name = f"{row['operator']} {row['phase']}"
            out[name] = out.get(name, 0.0) + row["seconds"]
    return out


def _parts(result: Result) -> dict[str, float]:
    rows = [row for ranks in result.get("time_by_part", [])[:1] for row in ranks["parts"]]
    return {f"{row['group']} {row['part']}".strip(): row["seconds"] for row in rows}


def _pairs(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Values of either side that are not zero on both."""
    out = {}
    for key in dict.fromkeys([*a, *b]):
        x, y = a.get(key, 0.0), b.get(key, 0.0)
        if x or y:
            out[key] = {"a": x, "b": y, "change": y / x - 1 if x else None}
    return out
