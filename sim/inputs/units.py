"""Numbers with units as people write them, by what a key's name ends with: `latency_s: 5us`, `memory_bytes: 96GB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from sim.inputs.input_source import Source, show
from sim.inputs.yaml_input import KeyPath

# Patterns are compiled when a number with a unit is read, which few scenarios have.
_NUMBER = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?)\s*"
_SIZE = _NUMBER + r"([A-Za-z]*)\s*"
_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_RATE = _NUMBER + r"([KMGTkmgt])(bps|bit/s|b/s|B/s|Bps)\s*"
_TIME = _NUMBER + r"(ns|us|µs|μs|ms|s|min|h|d)?\s*"
_SECONDS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PARTS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3}  # of a second: divided by, 5us is 5e-6 to the bit
_POWER = _NUMBER + r"(k?W)?\s*"
_FLOPS = _NUMBER + r"([GTPgtp])?(?:FLOPS|FLOP/s|flops|flop/s|Flop/s|Flops)?\s*"


def parse_size(value: Any) -> Any:
    """A size such as `25MiB` or `1.5 GB` as a number of bytes; what is no text comes back as it is.

    >>> parse_size("25MiB"), parse_size("80GB"), parse_size(7)
    (26214400, 80000000000, 7)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_SIZE, value[:60])
    if match is None or match[2].upper() not in _SIZES:
        raise ValueError("must be a number of bytes, or one with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return round(float(match[1]) * _SIZES[match[2].upper()])


def parse_rate(value: Any) -> Any:
    """A bandwidth such as `400Gbps` (bits) or `3.35TB/s` as bytes a second; what is no text comes back as it is.

    >>> parse_rate("400Gbps"), parse_rate("3.35 TB/s"), parse_rate(5e10)
    (50000000000.0, 3350000000000.0, 50000000000.0)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_RATE, value[:60])
    if match is None:
        raise ValueError("must be a number of bytes a second, or one with a unit, such as 50GB/s or 400Gbps")
    bits = match[3] in ("bps", "bit/s", "b/s")
    return float(match[1]) * 1000 ** ("KMGT".index(match[2].upper()) + 1) / (8 if bits else 1)


def parse_time(value: Any) -> Any:
    """A time such as `5us`, `3.4 ms` or `2h` as seconds; what is no text comes back as it is.

    >>> parse_time("5us"), parse_time("30min"), parse_time(2)
    (5e-06, 1800.0, 2)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_TIME, value[:60])
    if match is None:
        raise ValueError("must be a number of seconds, or one with a unit: ns, us, ms, s, min, h, d")
    number, unit = float(match[1]), match[2]
    return number / _PARTS[unit] if unit in _PARTS else number * _SECONDS[unit]


def parse_power(value: Any) -> Any:
    """A power such as `700W` or `1.2kW` as watts; what is no text comes back as it is.

    >>> parse_power("1.2kW"), parse_power("700 W")
    (1200.0, 700.0)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_POWER, value[:60])
    if match is None:
        raise ValueError("must be a number of watts, or one with a unit: W, kW")
    return float(match[1]) * (1000.0 if match[2] == "kW" else 1.0)


def parse_flops(value: Any) -> Any:
    """A peak such as `989TFLOPS` or `2.5 PFLOP/s` as flops a second; what is no text comes back as it is.

    >>> parse_flops("989TFLOPS"), parse_flops("2.5 PFLOP/s")
    (989000000000000.0, 2500000000000000.0)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_FLOPS, value[:60])
    if match is None:
        raise ValueError("must be a number of flops a second, or one with a unit: GFLOPS, TFLOPS, PFLOPS")
    return float(match[1]) * (1000.0 ** ("GTP".index(match[2].upper()) + 3) if match[2] else 1.0)


class Unit(Struct, frozen=True):
    """What a key with this ending holds."""

    ending: str
    parse: Callable[[Any], Any]


# The longer endings first: a rate's name ends as a time's does.
UNITS = (
    Unit("flops_per_s", parse_flops),
    Unit("bytes_per_s", parse_rate),
    Unit("_bytes", parse_size),
    Unit("_s", parse_time),
    Unit("_w", parse_power),
)
_OTHER = ("rate_per_s",)  # requests a second: a plain number


def unit_of(key: object) -> Unit | None:
    """The unit of a key by its name; None for a number without one.

    >>> unit_of("latency_s").parse.__name__, unit_of("memory_bytes").parse.__name__, unit_of("nodes")
    ('parse_time', 'parse_size', None)
    """
    name = str(key)
    if name.endswith(_OTHER):
        return None
    return next((unit for unit in UNITS if name.endswith(unit.ending)), None)


def with_units(given: Any, source: Source, path: KeyPath, skipped: tuple[str, ...] = ()) -> Any:
    """The value with all texts under keys of a unit as numbers of it; `skipped`: keys that are left as they are.

    Raises:
        InputError: for a text that is no number of its key's unit.
    """
    if isinstance(given, list):
        return [with_units(item, source, (*path, i), skipped) for i, item in enumerate(given)]
    if not isinstance(given, dict):
        return given
    return {key: value if key in skipped else _one(key, value, source, path, skipped) for key, value in given.items()}


def _one(key: str, value: Any, source: Source, path: KeyPath, skipped: tuple[str, ...]) -> Any:
    unit, at = unit_of(key), (*path, key)
    if isinstance(value, (list, dict)) and not (unit and isinstance(value, dict)):
        return with_units(value, source, at, skipped)
    if unit is None:
        return value
    if isinstance(value, dict):  # a peak for each dtype
        return {name: _parsed(unit, item, source, (*at, name)) for name, item in value.items()}
    return _parsed(unit, value, source, at)


def _parsed(unit: Unit, value: Any, source: Source, path: KeyPath) -> Any:
    try:
        return unit.parse(value)
    except ValueError as error:
        raise source.error(path, f"found {show(value)}; {error}") from None
