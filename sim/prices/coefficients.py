"""Coefficients of a profile, and options that switch some off.

Each constant of a machine is a field with its unit, neutral value and meaning.

On disk (`profile/1`) they are a flat mapping of names to `{value, source}`. A field is written under its own name;
`peak_DTYPE_flops_per_s`, `memory_efficiency_KIND`, `matmul_slowdown_KERNEL`, `KERNEL_PART` (`flash2_efficiency_128`)
and `CASE peak_bytes` are entries of the mappings `peak_flops_per_s`, `memory_efficiency_of`, `matmul_slowdown_of`,
`attention` and `peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct

from sim.core.dtypes import DTYPES
from sim.core.errors import InputError
from sim.inputs.input_source import nearest, show
from sim.models.recipes import RECIPES
from sim.prices.roofline import MEMORY_BOUND

USUAL_KERNEL = "attention"  # the kernel of training where none is named
STRIDED = "strided"  # what memory-bound operators that torch does not vectorize (`Compute.strided`) reach


class Coefficient(NamedTuple):
    """A value in base units, and where it comes from."""

    value: float
    source: str


def _constant(default: float | bool | None, meaning: str, positive: bool = False) -> Any:
    """Declare a field; `positive`: 0 is refused, because readers divide by it or take its logarithm."""
    return field(default=default, metadata={"meaning": meaning, "positive": positive})


def _entries(meaning: str, positive: bool = True) -> Any:
    """Declare a mapping; each of its entries is a coefficient of its own on disk."""
    return field(default_factory=dict, metadata={"meaning": meaning, "positive": positive})


# A dataclass and no Struct, whose fields have no metadata: a test holds each `meaning` against the reference page.
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpeed:
    """Speed of one fused attention kernel, as `sim.prices.attention_speed` takes it."""

    efficiency_64: float | None = _constant(None, "part of the peak at head size 64, long sequences", True)
    efficiency_128: float | None = _constant(None, "part of the peak at head size 128, long sequences", True)
    efficiency_256: float | None = _constant(None, "part of the peak at head size 256, long sequences", True)
    backward_share: float = _constant(1.0, "backward's efficiency by the forward's", True)
    ramp_tokens: float = _constant(0.0, "keys' worth of prologue and epilogue of a row of tiles")
    tile_rows: float = _constant(128.0, "queries of one thread block, forward")
    backward_tile_rows: float | None = _constant(
        None, "queries of one thread block, backward; `tile_rows` where left out"
    )
    overlap: float = _constant(1.2, "exponent that says how far work hides behind the longest row: 1 adds them", True)
    group_sums: bool = _constant(False, "1: dK and dV of query heads that share a KV head are summed afterwards")


# Every neutral value leaves the roofline as it is. A profile that states nothing is therefore the bare data sheet.
@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """All coefficients that a profile may hold. `sources`: by name on disk, for those that were stated."""

    # None means that the profile says nothing. 0 would claim that launches cost no time.
    launch_overhead_s: float | None = _constant(None, "shortest time between two kernel launches; else the GPU's own")
    kernel_gap_s: float = _constant(0.0, "time of each kernel that nothing hides")
    operator_in_model_s: float = _constant(0.0, "on a CPU: what modules and autograd add to a kernel of a step")
    core_sharing_slowdown: float | None = _constant(
        None, "computing by more ranks than cores, by that of as many ranks as cores times ranks per core", True
    )
    matmul_efficiency: float = _constant(1.0, "part of the peak that a matmul without points near it reaches", True)
    # These two scale one machine against the machine of the points. Two GPUs of one kind differ by clocks and cooling.
    matmul_speed: float = _constant(1.0, "this machine's matmuls by those of the points", True)
    attention_speed: float = _constant(1.0, "this machine's fused attention by the speed that is stated", True)
    unaligned_matmul_slowdown: float = _constant(1.0, "time of a matmul of odd width by that of a padded one", True)
    fp8_gradient_slowdown: float = _constant(1.0, "time of fp8 gradient matmuls by that of the points", True)
    matmul_slowdown_of: Mapping[str, float] = _entries("time of matmuls of one kernel by that of the points")
    result_exposed: float = _constant(0.5, "part of a result's extra traffic that no other tile's matmul hides")
    group_launch_s: float = _constant(
        0.0, "least time of one group of a grouped matmul, on the device, and on the host that launches it in a loop"
    )
    memory_efficiency: float | None = _constant(None, "part of the bandwidth that streaming kernels reach", True)
    memory_efficiency_of: Mapping[str, float] = _entries(
        "part of the bandwidth that streaming kernels of one kind reach"
    )
    memory_latency_s: float = _constant(0.0, "time in which a memory-bound kernel starts and ends")
    memory_bandwidth_bytes_per_s: float | None = _constant(None, "measured bandwidth, in the data sheet's place", True)
    peak_flops_per_s: Mapping[str, float] = _entries("measured peaks by dtype, in the data sheet's place")
    attention: Mapping[str, AttentionSpeed] = _entries("speed of fused attention by kernel; `attention` is the usual")
    # The limit is a GPU's own property, so the draw is kept relative to it.
    power_at_peak: float = _constant(0.0, "draw at the tensor cores' peak, in parts of the power limit; 0: no limit")
    power_spread: float = _constant(0.0, "spread (sigma by mean) of the clocks of equal GPUs under their power limit")
    # Two constants, because plain torch runs more Python for each kernel than Megatron's fused modules do.
    host_operator_s: float = _constant(0.0, "host time in which Megatron issues one kernel")
    host_operator_eager_s: float | None = _constant(
        None, "host time in which plain torch issues one kernel; `host_operator_s` where left out"
    )
    host_step_s: float = _constant(0.0, "host time of an optimizer step")
    host_collective_s: float = _constant(0.0, "host time in which a collective is issued")
    # NCCL's blocking send and receive make the host wait for the device, and the device then waits for the host.
    host_message_s: float = _constant(0.0, "time that a blocking message adds")
    collective_sm_share: float = _constant(0.0, "part of the GPU that a collective within a node takes from kernels")
    # Measured and shown, read by no price:
    host_bandwidth_bytes_per_s: float | None = _constant(
        None, "bandwidth of copies to pinned host memory; shown only", True
    )
    overlap_compute_slowdown: float | None = _constant(
        None, "time of matmuls beside all-reduces by their time alone; shown only", True
    )
    overlap_comm_slowdown: float | None = _constant(
        None, "time of all-reduces beside matmuls by their time alone; shown only", True
    )
    peak_bytes: Mapping[str, float] = _entries("most bytes that a fused case held at once; shown only", False)
    linear_forward_overhead_s: float | None = _constant(
        None, "forward of a small Linear, as old profiles have it; read by nothing"
    )
    linear_backward_overhead_s: float | None = _constant(
        None, "backward of a small Linear, as old profiles have it; read by nothing"
    )
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def streaming_efficiency(self) -> float:
        """Part of the bandwidth that streaming kernels reach; all of it where nothing is known."""
        return 1.0 if self.memory_efficiency is None else self.memory_efficiency

    def flat(self) -> dict[str, Coefficient]:
        """Give the coefficients by their names on disk: all that were stated or differ from their neutral value."""
        found = (*_plain(self), *_mapped(self))
        return {
            name: Coefficient(float(value), self.sources.get(name, ""))
            for name, value, neutral in found
            # A stated neutral value is kept with its source, so that a profile that is saved reads back unchanged.
            if value is not None and (name in self.sources or value != neutral)
        }

    def changed(self, stated: Mapping[str, Coefficient]) -> Coefficients:
        """These coefficients with `stated`, by their names on disk, in the place of theirs."""
        # The detour over names on disk lets one reader check values from a file and values from code alike.
        return coefficients_from({**self.flat(), **stated})


class PriceOptions(Struct, frozen=True):
    """Effects that a measurement did not have, switched off where one is predicted.

    `power`: the power limit slows kernels down; a burst ends before it acts. `host`: the host takes time to issue
    work. `group_launch`: each group of a grouped matmul is a launch of its own.
    """

    power: bool = True
    host: bool = True
    group_launch: bool = True

    def applied(self, c: Coefficients) -> Coefficients:
        """Give the coefficients with those of what is switched off at their neutral values."""
        changes: dict[str, Any] = {}
        if not self.power:
            # `_throttled` takes 0 for a GPU without a limit.
            changes["power_at_peak"] = 0.0
        if not self.host:
            # None makes plain torch fall back to `host_operator_s`, which is 0 now.
            changes |= {"host_operator_s": 0.0, "host_operator_eager_s": None, "host_step_s": 0.0}
            changes |= {"host_collective_s": 0.0, "host_message_s": 0.0}
        if not self.group_launch:
            changes["group_launch_s"] = 0.0
        return replace(c, **changes) if changes else c


AS_STATED = PriceOptions()


class Place(Struct, frozen=True):
    """The field that a name on disk belongs to; in a mapping its key there, of an attention kernel also its part."""

    field: str
    positive: bool
    key: str = ""
    part: str = ""


# Built from the fields themselves. A coefficient that is added above is then known to reader, writer and messages.
_FIELDS = {f.name: f for f in fields(Coefficients) if f.metadata}
# On disk none of these is a name by itself. Each of their entries has one.
_MAPPINGS = ("memory_efficiency_of", "matmul_slowdown_of", "peak_flops_per_s", "attention", "peak_bytes")
_PARTS = {f.name: f for f in fields(AttentionSpeed)}
_LONGEST_FIRST = sorted(_PARTS, key=len, reverse=True)  # `backward_tile_rows` ends with `tile_rows`
_PEAKS = {f"peak_{dtype}_flops_per_s": dtype for dtype in DTYPES}
_EFFICIENCIES = {f"memory_efficiency_{kind}": kind for kind in MEMORY_BOUND}
# A cast that looks for a block's largest value is another kernel than a plain one.
_EFFICIENCIES |= {f"memory_efficiency_cast_{r.kernel}": f"cast_{r.kernel}" for r in RECIPES.values() if r.kernel}
_EFFICIENCIES[f"memory_efficiency_{STRIDED}"] = STRIDED
_SLOWDOWNS = {f"matmul_slowdown_{r.kernel}": r.kernel for r in RECIPES.values() if r.kernel}
_CASE_END = " peak_bytes"


@lru_cache(maxsize=1024)  # each name of a profile is asked for twice
def place_of(name: str, where: str = "coefficients") -> Place:
    """Find the field of a name on disk.

    Raises:
        InputError: naming `where` and the nearest name, if there is none.

    >>> place_of("flash2_efficiency_128")
    Place(field='attention', positive=True, key='flash2', part='efficiency_128')
    """
    # Exact names come first: `memory_efficiency` is a field, and the prefix of other names.
    if name in _FIELDS and name not in _MAPPINGS:
        return Place(name, _FIELDS[name].metadata["positive"])
    if name in _PEAKS:
        return Place("peak_flops_per_s", True, _PEAKS[name])
    if name in _EFFICIENCIES:
        return Place("memory_efficiency_of", True, _EFFICIENCIES[name])
    if name in _SLOWDOWNS:
        return Place("matmul_slowdown_of", True, _SLOWDOWNS[name])
    if name.endswith(_CASE_END):
        return Place("peak_bytes", False, name.removesuffix(_CASE_END))
    # Any word may be a kernel's name. This rule therefore comes last, and takes what no other rule has claimed.
    for part in _LONGEST_FIRST:
        kernel = name.removesuffix(f"_{part}")
        # Empty: the name is a part without a kernel. Equal: it does not end with this part.
        if kernel not in ("", name):
            return Place("attention", _PARTS[part].metadata["positive"], kernel, part)
    known = (*(n for n in _FIELDS if n not in _MAPPINGS), *_PEAKS, *_EFFICIENCIES, *_SLOWDOWNS, *_usual_parts())
    raise InputError(f"{where}: unknown coefficient {show(name)}{nearest(name, known)}")


def coefficients_from(stated: Mapping[str, Coefficient], where: str = "coefficients") -> Coefficients:
    """Read coefficients by their names on disk.

    Raises:
        InputError: for a name that is no coefficient, and for a kernel of no known speed.
    """
    values: dict[str, Any] = {}
    kernels: dict[str, dict[str, Any]] = {}
    for name, (value, _) in stated.items():
        place = place_of(name, where)
        if place.part:
            kernels.setdefault(place.key, {})[place.part] = _part(place.part, value, f"{where}.{name}")
        elif place.key:
            values.setdefault(place.field, {})[place.key] = value
        else:
            values[place.field] = value
    for kernel, parts in kernels.items():
        # A misspelt coefficient that ends like a part reads as a new kernel. No real kernel lacks a speed at 128, so
        # this tells the two apart.
        if kernel != USUAL_KERNEL and "efficiency_128" not in parts:
            name = f"{kernel}_{next(iter(parts))}"
            said = f"unknown coefficient {show(name)}{nearest(name, (*_FIELDS, *_usual_parts()))}"
            raise InputError(f"{where}: {said}; attention kernel {show(kernel)} has no {kernel}_efficiency_128")
    attention = {kernel: AttentionSpeed(**parts) for kernel, parts in kernels.items()}
    return Coefficients(**values, attention=attention, sources={name: c.source for name, c in stated.items()})


def _usual_parts() -> list[str]:
    return [f"{USUAL_KERNEL}_{part}" for part in _PARTS]


def _part(part: str, value: float, where: str) -> float | bool:
    # JSON profiles hold numbers alone; a flag is written as 0 or 1.
    if not isinstance(_PARTS[part].default, bool):
        return value
    if value not in (0.0, 1.0):
        raise InputError(f"{where}.value: found {show(value)}; allowed: 0 or 1")
    return bool(value)


def _plain(c: Coefficients) -> Iterator[tuple[str, float | None, object]]:
    """Name on disk, value and neutral value of each field that is one number."""
    return ((name, getattr(c, name), f.default) for name, f in _FIELDS.items() if name not in _MAPPINGS)


def _mapped(c: Coefficients) -> Iterator[tuple[str, float | None, object]]:
    """Name on disk, value and neutral value of each entry of the mappings."""
    yield from ((f"memory_efficiency_{kind}", value, None) for kind, value in c.memory_efficiency_of.items())
    yield from ((f"matmul_slowdown_{kernel}", value, None) for kernel, value in c.matmul_slowdown_of.items())
    yield from ((f"peak_{dtype}_flops_per_s", value, None) for dtype, value in c.peak_flops_per_s.items())
    for kernel, speed in c.attention.items():
        yield from ((f"{kernel}_{part}", getattr(speed, part), f.default) for part, f in _PARTS.items())
    yield from ((f"{case}{_CASE_END}", value, None) for case, value in c.peak_bytes.items())
