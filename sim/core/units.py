"""Numbers as people read them: the one place that scales base units for display."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_NAMED = 1000  # ranks that are looked at for their name
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LEAST_S = 1e-9  # nothing is so short: less is what rounding leaves of a sum of seconds that is zero


def seconds(value: float) -> str:
    """Seconds with four digits and a fitting unit.

    >>> seconds(0.01234), seconds(4.5e-5), seconds(2), seconds(7200), seconds(1.3e-10), seconds(-0.03)
    ('12.34 ms', '45.00 µs', '2.000 s', '2.000 h', '0 s', '−30.00 ms')
    """
    if abs(value) < LEAST_S:
        return "0 s"
    scale, unit = _time_unit(value)
    return f"{'−' * (value < 0)}{_digits(abs(value) / scale)} {unit}"


def seconds_between(low: float, high: float, figure: float) -> str:
    """Both ends of an interval of seconds in the unit of the figure that it belongs to, unless one is far from that.

    >>> seconds_between(48.0, 66.0, 57.0), seconds_between(0.9, 1.25, 1.1), seconds_between(0.002, 1.25, 0.9)
    ('48.00 s – 66.00 s', '0.900 s – 1.250 s', '2.000 ms – 1.250 s')
    """
    if low < figure / 100 or high > figure * 100 or figure < LEAST_S:
        return f"{seconds(low)} – {seconds(high)}"
    scale, unit = _time_unit(figure)
    return f"{_digits(low / scale)} {unit} – {_digits(high / scale)} {unit}"


def change_s(value: float) -> str:
    """A change of seconds with its sign.

    >>> change_s(3.81), change_s(-0.0005), change_s(0)
    ('+3.810 s', '−500.0 µs', '0 s')
    """
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{seconds(abs(value))}"


def n_bytes(value: float) -> str:
    """Bytes in powers of 1024.

    >>> n_bytes(85899345920), n_bytes(512), n_bytes(3 * 2**20)
    ('80.00 GiB', '512 B', '3.000 MiB')
    """
    return _scaled(value, 1024, BYTE_UNITS)


def allocated_reserved(allocated: float, reserved: float) -> str:
    """Bytes of tensors, and what the allocator holds for them, in one unit and few characters.

    >>> allocated_reserved(47.5 * 2**30, 149 * 2**30)
    '47.5/149 GiB'
    """
    unit = n_bytes(reserved).split(" ")[1]
    scale = 1024.0 ** BYTE_UNITS.index(unit)
    return f"{_digits(allocated / scale, 3)}/{_digits(reserved / scale, 3)} {unit}"


def rate(value: float, unit: str) -> str:
    """A rate in powers of 1000, as bandwidths and FLOP/s are quoted.

    >>> rate(3.12e14, "FLOP/s"), rate(2.5e10, "B/s")
    ('312.0 TFLOP/s', '25.00 GB/s')
    """
    return _scaled(value, 1000, tuple(prefix + unit for prefix in ("", "K", "M", "G", "T", "P", "E")))


def count(value: float) -> str:
    """A number with separators, or with as many digits as matter.

    >>> count(1234567), count(12.345)
    ('1,234,567', '12.3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def plain(value: float) -> str:
    """A number with at most twelve digits.

    >>> plain(700.0), plain(0.1 + 0.2)
    ('700', '0.3')
    """
    return f"{value:.12g}"


def counted(number: float, noun: str) -> str:
    """A number with its noun, in the plural unless the number is one.

    >>> counted(1, "rank"), counted(2048, "rank"), counted(2, "micro-batch"), counted(2, "mesh")
    ('1 rank', '2,048 ranks', '2 micro-batches', '2 meshes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "sh")) else "s"
    return f"{count(number)} {noun}{ending}"


def billions(value: float) -> str:
    """A number of parameters with three digits.

    >>> billions(8_030_261_248), billions(405.85e9), billions(124_439_808), billions(1.026e12)
    ('8.03B', '406B', '124M', '1.03T')
    """
    for scale, unit in ((1e12, "T"), (1e9, "B")):
        if value >= 0.9995 * scale:
            number = value / scale
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}{unit}"
    return f"{value / 1e6:.0f}M" if value >= 1e6 else f"{value:,.0f}"


def percent(value: float) -> str:
    """A fraction in percent.

    >>> percent(0.1795), percent(0.0004)
    ('17.9 %', '0.04 %')
    """
    return f"{'−' * (value < 0)}{abs(value) * 100:.{2 if 0 < abs(value) < 0.001 else 1}f} %"


def change_percent(value: float, digits: int = 1) -> str:
    """A change as a fraction, in percent with its sign; one that rounds to zero has none.

    >>> change_percent(0.2994), change_percent(-0.05), change_percent(-1e-9, 2)
    ('+29.9 %', '−5.0 %', '0.00 %')
    """
    rounded = round(value * 100, digits)
    sign = "+" if rounded > 0 else "−" if rounded < 0 else ""
    return f"{sign}{abs(rounded):.{digits}f} %"


def rank_numbers(ranks: Sequence[int]) -> str:
    """Ranks as the short text that results have.

    >>> rank_numbers(range(8)), rank_numbers(range(0, 127, 2)), rank_numbers([0, 3, 4]), rank_numbers([8, 9, 10, 12])
    ('0-7', '0-126 by 2', '0, 3, 4', '8-10, 12')
    """
    if len(ranks) < 3:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if isinstance(ranks, range) or tuple(ranks) == tuple(range(ranks[0], ranks[0] + step * len(ranks), step or 1)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    pieces: list[str] = []
    for _, run in groupby(enumerate(ranks[:MOST_NAMED]), key=lambda item: item[1] - item[0]):
        a, *rest = [rank for _, rank in run]
        pieces += [f"{a}-{rest[-1]}"] if len(rest) > 1 else map(str, [a, *rest])
    return ", ".join(pieces[:8]) + (" …" if len(pieces) > 8 or len(ranks) > MOST_NAMED else "")


def ranks_text(ranks: Any) -> str:
    """Ranks in words, from their numbers or from a result's text of them.

    >>> ranks_text("0-7"), ranks_text("3"), ranks_text([0]), ranks_text(range(8)), ranks_text([0, 1, 2, 3, 4, 6])
    ('ranks 0–7', 'rank 3', 'rank 0', 'ranks 0–7', 'ranks 0–4, 6')
    """
    if not isinstance(ranks, (int, str)):
        ranks = rank_numbers(ranks if isinstance(ranks, range) else [int(r) for r in ranks])
    if ranks == "":
        return "no rank"
    return f"rank{'' if str(ranks).isdigit() else 's'} {ranks}".replace("-", "–")


def as_written(value: Any) -> str:
    """A value as a scenario's file may have it.

    >>> [as_written(value) for value in (True, 0.5, 50e9, None, "zb_v", [1, 2])]
    ['true', '0.5', '50000000000', 'null', 'zb_v', '[1, 2]']
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


def finite(value: Any) -> Any:
    """The value, or 0 for a number that JSON cannot hold, such as a bandwidth over no time.

    >>> finite(2.5), finite(float("inf")), finite("x")
    (2.5, 0.0, 'x')
    """
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def _time_unit(value: float) -> tuple[float, str]:
    """The unit in which `value` seconds are shown: its length in seconds, and its name."""
    for limit, scale, unit in ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (600.0, 1.0, "s")):
        if abs(value) < limit:
            return scale, unit
    return (HOUR_S, "h") if abs(value) >= HOUR_S else (60.0, "min")


def _digits(value: float, digits: int = 4) -> str:
    """So many digits, a 0 before the point among them, without an exponent."""
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def _scaled(value: float, base: int, units: Iterable[str]) -> str:
    units = tuple(units)
    size, i = float(value), 0
    while abs(size) >= base and i < len(units) - 1:
        size, i = size / base, i + 1
    return f"{size:.0f} {units[0]}" if i == 0 else f"{_digits(size)} {units[i]}"
