"""The unit of a key by what its name ends with, and numbers in it as people write them: `latency_s: 5us`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from sim.core.units import DAY_S, HOUR_S, n_bytes, plain, rate, seconds
from sim.inputs.input_source import Source, show
from sim.inputs.yaml_input import KeyPath

_NUMBER = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?)\s*"
_SECONDS = {None: 1.0, "s": 1.0, "min": 60.0, "h": HOUR_S, "d": DAY_S}
_PARTS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3}  # of a second: divided by, 5us is 5e-6 to the bit


LEAST_RATE = 1e6  # bytes a second; a number below it lacks its unit
MOST_LATENCY_S = 1.0  # of a link or a disk; a number from it on lacks its unit


class Unit(Struct, frozen=True):
    """Hold the unit of keys with one ending. `pattern`: of the text after the number; `read`: gives number and unit in
    base units; `what`: what a message says is allowed; `write`: gives the number as people read it."""

    ending: str
    pattern: str
    read: Callable[[float, re.Match[str]], float]
    what: str
    write: Callable[[float], str]

    def parse(self, value: Any) -> Any:
        """A text as a number in base units; what is no text comes back as it is.

        >>> TOKENS.parse("15T"), TOKENS.parse("300b"), TOKENS.parse("15e12")
        (15000000000000.0, 300000000000.0, 15000000000000.0)
        >>> FLOPS.parse("2.5 PFLOP/s"), RATE.parse("400GbE"), BYTES.parse("25MiB"), TIME.parse("5us"), POWER.parse(700)
        (2500000000000000.0, 50000000000.0, 26214400, 5e-06, 700)
        """
        if not isinstance(value, str):
            return value
        # The pattern is compiled here, because few scenarios have a number with a unit.
        found = re.fullmatch(_NUMBER + self.pattern + r"\s*", value[:60])
        try:
            if found is not None:
                return self.read(float(found[1]), found)
        except OverflowError:
            pass  # 1e400 is infinite, and no whole number of bytes
        raise ValueError(f"must be a number of {self.what}")


def _power_of(base: int, prefix: str | None) -> int:
    return base ** (1 + "KMGTP".index(prefix.upper())) if prefix else 1


def _flops(number: float, found: re.Match[str]) -> float:
    return number * _power_of(1000, found[2])


BITS = ("bps", "bit/s", "b/s", "bE")  # 100GbE is Ethernet of 100 Gb/s


def _bytes_per_s(number: float, found: re.Match[str]) -> float:
    return number * _power_of(1000, found[2]) / (8 if found[3] in BITS else 1)


def _bytes(number: float, found: re.Match[str]) -> float:
    return round(number * _power_of(1024 if (found[3] or "").upper() == "IB" else 1000, found[2]))


def _tokens(number: float, found: re.Match[str]) -> float:
    return number * 1000.0 ** (1 + "KMBT".index(found[2].upper()) if found[2] else 0)


def _seconds(number: float, found: re.Match[str]) -> float:
    return number / _PARTS[found[2]] if found[2] in _PARTS else number * _SECONDS[found[2]]


def _watts(number: float, found: re.Match[str]) -> float:
    return number * (1000.0 if found[2] == "kW" else 1.0)


FLOPS = Unit(
    "flops_per_s",
    r"([GTPgtp])?(?:FLOPS|FLOP/s|flops|flop/s|Flop/s|Flops)?",
    _flops,
    "flops a second, or one with a unit: GFLOPS, TFLOPS, PFLOPS",
    lambda value: rate(value, "FLOP/s"),
)
RATE = Unit(
    "bytes_per_s",
    r"([KMGTkmgt])(bps|bit/s|b/s|bE|B/s|Bps)",
    _bytes_per_s,
    "bytes a second, or one with a unit, such as 50GB/s or 400Gbps",
    lambda value: rate(value, "B/s"),
)
BYTES = Unit(
    "_bytes",
    r"(?i:([KMGT])(i?B)?|B)?",
    _bytes,
    "bytes, or one with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB",
    n_bytes,
)
TIME = Unit(
    "_s", r"(ns|us|µs|μs|ms|s|min|h|d)?", _seconds, "seconds, or one with a unit: ns, us, ms, s, min, h, d", seconds
)
POWER = Unit("_w", r"(k?W)?", _watts, "watts, or one with a unit: W, kW", plain)
TOKENS = Unit(  # of a training
    "tokens", r"([KMBTkmbt])?", _tokens, "tokens, or one with K, M, B or T, such as 15T", plain
)
UNITS = (FLOPS, RATE, BYTES, TIME, POWER)  # the longer endings first: a rate's name ends as a time's does
_PER_S = "_per_s"  # a plain number of requests, tokens or whatever else in a second
MOST_S = 1e9  # of an option that gives a time: 32 years


def parse_time_s(text: str) -> float:
    """Return the seconds that an option of a command gives.

    >>> parse_time_s("4.1"), parse_time_s("350ms")
    (4.1, 0.35)

    Raises:
        ValueError: unless it is a time above 0 and below `MOST_S`; the error's text says so.
    """
    try:
        time_s = float(TIME.parse(text))
    except ValueError:
        time_s = -1.0
    # NaN fails the comparison and is refused, too.
    if not 0.0 < time_s < MOST_S:
        raise ValueError(f"must be a time above 0 and below {MOST_S:.0e} s")
    return time_s


def unit_of(key: object) -> Unit | None:
    """The unit of a key by its name, of a scenario, a result or a measurement; None for a number without one.

    >>> unit_of("latency_s").ending, unit_of("mtbf_s_per_gpu").ending, unit_of("nodes"), unit_of("requests_per_s")
    ('_s', '_s', None, None)
    """
    name = str(key).removesuffix("_per_gpu")
    found = next((unit for unit in UNITS if name.endswith(unit.ending)), None)
    return None if found is TIME and name.endswith(_PER_S) else found


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
        number = unit.parse(value)
    except ValueError as error:
        raise source.error(path, f"found {show(value)}; {error}") from None
    if unit is RATE and isinstance(number, int | float) and 0 < number < LEAST_RATE and number is value:
        unsaid = f"{value:g} bytes a second? write {value:g}GB/s or {value:g}Gbps"
        raise source.error(path, f"found {show(value)}; {unsaid}")
    if path[-1] == "latency_s" and isinstance(number, int | float) and number >= MOST_LATENCY_S and number is value:
        raise source.error(path, f"found {show(value)}; {value:g} seconds? write {value:g}us or {value:g}ms")
    return number
