"""Read a profile from plain data: check every key, type and number; each error names its position.

pydantic is not used: building five models takes 7 ms of a run's start, reading a shipped profile here 2 ms. Several
checks would also be left: widths of shapes by operator, columns of one length, ascending sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeGuard, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from sim.core.dtypes import DTYPES
from sim.core.errors import InputError
from sim.core.operator_kinds import ATTENTION, ATTENTION_DECODE, MATMULS, MEMORY_BOUND
from sim.inputs.file_kinds import other_format
from sim.inputs.input_source import nearest, show
from sim.inputs.plain_data import listed, mapping, one_of, text, whole
from sim.inputs.training_config import SOFTWARE_DATE
from sim.inputs.yaml_input import one_line
from sim.prices.coefficients import FORMER, Coefficient, Coefficients, coefficients_from, place_of
from sim.prices.likeness import Features
from sim.prices.nearby import NearbyStep
from sim.prices.profile import FORMAT, HOST_COPIES, BlockPoint, CollectiveTable, Facts, PointTable, Profile

# More phases than `Phase`: a block may be timed as a whole backward, a recomputation or a served forward.
PHASES = ("forward", "backward", "input_grad", "weight_grad", "recompute", "optimizer", "inference")
MOST_COUNT = 10_000_000
LEAST, MOST = 1e-30, 1e30  # range of numbers other than 0, so that results stay finite
DIMENSIONS = {
    **dict.fromkeys(MATMULS, 4),
    **dict.fromkeys(ATTENTION, 8),
    ATTENTION_DECODE: 5,
    **dict.fromkeys(MEMORY_BOUND, 1),
}
T = TypeVar("T")


def profile_from(data: object, where: str = "profile") -> Profile:
    """Check and read plain data.

    Raises:
        InputError: for anything that is wrong; the text has `where`, the key, the value found and the values allowed.
    """
    # The format is checked first, because errors about the keys of another format would mislead.
    top = mapping(data, where)
    if top.get("format") != FORMAT:
        raise other_format(where, top, FORMAT)
    _keys(top, where, ("format", *Profile.__struct_fields__), required=("name",))
    # Kernels are scaled to another GPU by the ratio of two rooflines, which needs the reference.
    if top.get("kernels") and not top.get("reference"):
        raise InputError(f"{where}: reference: is missing; kernels are those of a GPU, which it names")
    coefficients = _coefficients(top.get("coefficients", {}), f"{where}: coefficients")
    return Profile(
        name=text(top["name"], f"{where}: name"),
        source=text(top.get("source", ""), f"{where}: source"),
        date=text(top.get("date", ""), f"{where}: date"),
        reference=text(top.get("reference", ""), f"{where}: reference"),
        hardware=_facts(top.get("hardware", {}), f"{where}: hardware"),
        software=_facts(top.get("software", {}), f"{where}: software"),
        settings=_facts(top.get("settings", {}), f"{where}: settings"),
        coefficients=coefficients,
        points=_each(top.get("points", []), f"{where}: points", _points),
        blocks=_each(top.get("blocks", []), f"{where}: blocks", _block),
        collectives=_each(top.get("collectives", []), f"{where}: collectives", _collective),
        kernels=text(top.get("kernels", ""), f"{where}: kernels"),
        nearby=_each(top.get("nearby", []), f"{where}: nearby", partial(_nearby, stated=coefficients.flat())),
    )


def _coefficients(data: object, where: str) -> Coefficients:
    given = {name: value for name, value in mapping(data, where).items() if name not in FORMER}
    places = {name: place_of(name, where) for name in given}  # unknown names first: their values may be anything
    read = {name: _coefficient(given[name], f"{where}.{name}", place.positive) for name, place in places.items()}
    return coefficients_from(read, where)


def _coefficient(data: object, where: str, positive: bool) -> Coefficient:
    item = mapping(data, where)
    _keys(item, where, ("value", "source"), required=("value",))
    source = text(item.get("source", ""), f"{where}.source")
    return Coefficient(_number(item["value"], f"{where}.value", positive), source)


def _points(data: object, where: str) -> PointTable:
    item = mapping(data, where)
    needed = ("op", "dtype", "shape", "seconds")
    _keys(item, where, (*needed, "spread", "samples", "source", "kernels"), needed)
    op, dtype = text(item["op"], f"{where}.op"), one_of(item["dtype"], DTYPES, f"{where}.dtype")
    seconds = _column(item["seconds"], f"{where}.seconds", positive=True)
    rows = listed(item["shape"], f"{where}.shape")
    if not rows or len(rows) != len(seconds):
        raise InputError(f"{where}.shape: found {len(rows)} rows; allowed: {max(1, len(seconds))}, as in seconds")
    # An unknown operator may have any width, if all rows have the same, so that new operators need no rule.
    first = rows[0]
    width = _dimensions(op) or (len(first) if _is_list(first) else 1)
    flagged = op.startswith("attention")
    for i, row in enumerate(rows):
        if not _is_shape(row, width, flagged):
            allowed = f"{width} whole numbers, 1 or more"
            raise InputError(f"{where}.shape[{i}]: found {one_line(repr(row))}; allowed: {allowed}")
    n = len(seconds)
    return PointTable(
        op,
        dtype,
        np.array(rows, dtype=np.int64),
        seconds,
        _column(item.get("spread", 0.0), f"{where}.spread", count=n),
        # Floats up to 1e30 are legal, but cannot be converted to int64.
        np.minimum(_column(item.get("samples", 1), f"{where}.samples", count=n), 2**53).astype(np.int64),
        *(text(item.get(key, ""), f"{where}.{key}") for key in ("source", "kernels")),
    )


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


@lru_cache(maxsize=256)
def _dimensions(op: str) -> int:
    """Return the width of a shape of this operator; 0 if any width is allowed."""
    # By prefix, because `gemm_input_grad` and `norm_eager` have the shapes of `gemm` and `norm`.
    return next((n for kind, n in DIMENSIONS.items() if op.startswith(kind)), 0)


def _is_shape(row: object, width: int, flagged: bool) -> bool:
    """Tell whether these are one point's dimensions; the last one of attention may be 0 (not causal)."""
    if not _is_list(row) or len(row) != width:
        return False
    for x in row:
        # `isinstance` takes True for an int. Larger numbers would overflow int64.
        if type(x) is not int or not 0 <= x < 2**62:
            return False
    return 0 not in (row[:-1] if flagged else row)


def _block(data: object, where: str) -> BlockPoint:
    item = mapping(data, where)
    _keys(item, where, ("key", "phase", "run", "seconds", "spread"), ("key", "phase", "seconds"))
    return BlockPoint(
        text(item["key"], f"{where}.key"),
        one_of(item["phase"], PHASES, f"{where}.phase"),
        whole(item.get("run", 0), f"{where}.run", 0, MOST_COUNT),
        _number(item["seconds"], f"{where}.seconds", positive=True),
        _number(item.get("spread", 0.0), f"{where}.spread"),
    )


def _collective(data: object, where: str) -> CollectiveTable:
    item = mapping(data, where)
    needed = ("op", "ranks", "bytes", "seconds")
    _keys(item, where, (*needed, "spread", "ranks_per_core", "source"), needed)
    size = _column(item["bytes"], f"{where}.bytes")
    # Look-ups bisect the sizes; in an unsorted column they would find a wrong price.
    if not len(size) or (size[1:] <= size[:-1]).any():
        raise InputError(f"{where}.bytes: allowed: at least one size, each larger than the one before")
    op = text(item["op"], f"{where}.op")
    return CollectiveTable(
        op,
        whole(item["ranks"], f"{where}.ranks", 1 if op in HOST_COPIES else 2, MOST_COUNT),
        size,
        _column(item["seconds"], f"{where}.seconds", count=len(size), positive=True),
        _column(item.get("spread", 0.0), f"{where}.spread", count=len(size)),
        _number(item.get("ranks_per_core", 1.0), f"{where}.ranks_per_core", positive=True),
        text(item.get("source", ""), f"{where}.source"),
    )


def _nearby(data: object, where: str, stated: Mapping[str, object]) -> NearbyStep:
    item, names = mapping(data, where), tuple(FEATURE_KINDS)
    _keys(item, where, ("features", "factors"), ("features", "factors"))
    features = mapping(item["features"], f"{where}.features")
    _keys(features, f"{where}.features", names, names)
    factors = mapping(item["factors"], f"{where}.factors")
    _keys(factors, f"{where}.factors", tuple(stated), ())
    read = {name: FEATURE_KINDS[name](features[name], f"{where}.features.{name}") for name in names}
    return NearbyStep(Features(**read), {k: _number(v, f"{where}.factors.{k}", True) for k, v in factors.items()})


def _truth(data: object, where: str) -> bool:
    if not isinstance(data, bool):
        raise InputError(f"{where}: found {show(data)}; allowed: true or false")
    return data


def _month(data: object, where: str) -> str:
    """Read the date of a training framework; empty: of the newest."""
    found = text(data, where)
    if found and not re.fullmatch(SOFTWARE_DATE, found):
        raise InputError(f"{where}: found {show(data)}; allowed: a date such as 2024-10 or 2024-10-31, or nothing")
    return found


def _each(data: object, where: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(listed(data, where)))


def _keys(item: Mapping[str, object], where: str, known: tuple[str, ...], required: tuple[str, ...]) -> None:
    for key in item.keys() - set(known):
        raise InputError(f"{where}: unknown key {show(key)}{nearest(key, known)} (allowed: {', '.join(known)})")
    for key in required:
        if key not in item:
            raise InputError(f"{where}: {key} is missing")


def _facts(data: object, where: str) -> Facts:
    item = mapping(data, where)
    for key, value in item.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        if not finite or not isinstance(value, str | int | float):
            rule = "text, a finite number, true or false"
            raise InputError(f"{where}.{key}: found {show(value)}; allowed: {rule}")
    return dict(item)


def _number(data: object, where: str, positive: bool = False) -> float:
    if not _is_number(data, positive):
        raise InputError(f"{where}: found {show(data)}; allowed: {_rule(positive)}")
    return float(data)


def _is_number(value: object, positive: bool) -> TypeGuard[float]:
    """Tell whether a value is a finite number, not negative, and not 0 if it must be `positive`."""
    # JSON's true is an int in Python, but a mistake here.
    if not isinstance(value, (int, float)) or value is True or value is False:
        return False
    # NaN and infinity fail the comparison.
    return LEAST <= value <= MOST or (value == 0 and not positive)


def _rule(positive: bool) -> str:
    return f"a number from {LEAST} to {MOST}{'' if positive else ', or 0'}"


def _column(data: object, where: str, count: int | None = None, positive: bool = False) -> NDArray[np.float64]:
    """Read a column of finite numbers, none negative; one number means `count` equal ones."""
    # `spread` and `samples` are mostly one number for a whole table.
    if count is not None and not isinstance(data, list):
        return np.full(count, _number(data, where))
    rows = listed(data, where)
    for i, value in enumerate(rows):
        if not _is_number(value, positive):
            raise InputError(f"{where}[{i}]: found {show(value)}; allowed: {_rule(positive)}")
    if count is not None and len(rows) != count:
        raise InputError(f"{where}: found {len(rows)} numbers; {count} are needed, one a point")
    return np.array(rows, dtype=np.float64)


# How each feature of a fitted step is read, by its type.
_READERS: Mapping[type, Callable[[object, str], Any]] = {
    str: text,
    int: partial(whole, least=0, most=MOST_COUNT),
    float: _number,
    bool: _truth,
}
FEATURE_KINDS = {name: _READERS[kind] for name, kind in get_type_hints(Features).items()} | {"date": _month}
