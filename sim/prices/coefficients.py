"""Define the coefficients of a profile, and options that switch some of them off.

Each constant of a machine is a field with its unit, neutral value and meaning.

On disk (`profile/1`) they are a flat mapping of names to `{value, source}`. A field is written under its own name, an
entry of a field that is a mapping so:

    peak_DTYPE_flops_per_s      `peak_flops_per_s`
    memory_efficiency_KIND      `memory_efficiency_of`
    matmul_slowdown_KERNEL      `matmul_slowdown_of`
    KERNEL_PART                 `attention`, such as flash2_efficiency_128
    host_KIND_s                 `host_work_s`: Python besides operators
    CASE peak_bytes             `peak_bytes`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct

from sim.core.dtypes import DTYPES
from sim.core.errors import InputError
from sim.core.host_work import HOST_WORK, coefficient_of
from sim.core.operator_kinds import MEMORY_BOUND
from sim.core.program import TORCH_SOFTMAXES
from sim.inputs.input_source import nearest, show
from sim.variants.frameworks.parts import MATMUL_LIBRARIES, TRANSFORMER_ENGINE
from sim.variants.recipes import RECIPES

BURST_S = 1e-3  # on a CPU: computation before each message that is measured, about that of a small model's layer
USUAL_KERNEL = "attention"  # training's kernel if none is named
# Names that files of earlier versions have, which no price ever read: their entries are left out.
FORMER = ("host_bandwidth_bytes_per_s", "linear_forward_overhead_s", "linear_backward_overhead_s")
STRIDED = "strided"  # the efficiency of memory-bound operators that torch does not vectorize (`Compute.strided`)


class Coefficient(NamedTuple):
    """Hold a value in base units, and its source."""

    value: float
    source: str


def _constant(default: float | bool | None, meaning: str, positive: bool = False) -> Any:
    """Declare a field; `positive`: 0 is refused, because readers divide by it or take its logarithm."""
    return field(default=default, metadata={"meaning": meaning, "positive": positive})


def _entries(meaning: str, positive: bool = True) -> Any:
    """Declare a mapping; each of its entries is a coefficient of its own on disk."""
    return field(default_factory=dict, metadata={"meaning": meaning, "positive": positive})


# A dataclass, because fields of a Struct have no metadata: a test compares each `meaning` with docs/calibration.md.
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpeed:
    """Hold the speed of one fused attention kernel; `sim.prices.attention_speed` has the formulas."""

    efficiency_64: float | None = _constant(None, "part of the peak at head size 64, long sequences", True)
    efficiency_128: float | None = _constant(None, "part of the peak at head size 128, long sequences", True)
    efficiency_256: float | None = _constant(None, "part of the peak at head size 256, long sequences", True)
    backward_share: float = _constant(1.0, "efficiency of the backward ÷ efficiency of the forward", True)
    ramp_tokens: float = _constant(0.0, "time of a row of tiles' prologue and epilogue, as a number of keys")
    tile_rows: float = _constant(128.0, "queries of one thread block, forward")
    backward_tile_rows: float | None = _constant(
        None, "queries of one thread block, backward; if left out, `tile_rows`"
    )
    overlap: float = _constant(
        1.2, "exponent of the norm that combines total work and the longest row: 1 adds them", True
    )
    head_step: float = _constant(
        1.0, "head sizes are filled up to a multiple of this, forward, because the library has kernels for these", True
    )
    backward_head_step: float | None = _constant(None, "the same, backward; if left out, `head_step`", True)
    group_sums: bool = _constant(
        False, "1: the kernel leaves dK and dV for each query head, and they are summed afterwards"
    )
    dropout_clocks: float = _constant(0.0, "clocks of one SM for each score that dropout adds, forward")
    dropout_backward_clocks: float = _constant(0.0, "clocks of one SM for each score that dropout adds, backward")
    masked_slowdown: float = _constant(1.0, "time with a mask of numbers ÷ time without it, forward", True)
    masked_backward_slowdown: float = _constant(1.0, "the same, backward", True)


# Every neutral value leaves the roofline as it is. A profile that states nothing is therefore the bare data sheet.
@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Hold all coefficients of a profile. `sources`: by name on disk, for the coefficients that the profile states."""

    # None: the profile does not state it. 0 would mean that launches take no time.
    launch_overhead_s: float | None = _constant(
        None, "shortest time between two kernel launches; if left out, the GPU's own"
    )
    kernel_gap_s: float = _constant(0.0, "time added to each kernel that nothing hides")
    operator_in_model_s: float = _constant(0.0, "on a CPU: time that modules and autograd add to each kernel of a step")
    core_sharing_slowdown: float | None = _constant(
        None,
        "with more ranks than cores: time of computing ÷ (its time with one rank for each core · ranks per core)",
        True,
    )
    matmul_efficiency: float = _constant(
        1.0, "part of the peak that a matmul without measured points near it reaches", True
    )
    untuned_slowdown: float = _constant(
        1.0, "served: time of a library's default kernel ÷ time of one that was tuned for weights of these sizes", True
    )
    # The next two scale the points to one machine: two GPUs of one kind differ by clocks and cooling.
    matmul_speed: float = _constant(1.0, "speed of this machine's matmuls ÷ speed of the points", True)
    attention_speed: float = _constant(1.0, "speed of this machine's fused attention ÷ the stated speed", True)
    unaligned_matmul_slowdown: float | None = _constant(
        None, "time of a matmul of odd width ÷ time of a padded one; if left out, 2 on a GPU", True
    )
    fp8_gradient_slowdown: float = _constant(1.0, "time of fp8 gradient matmuls ÷ time of the points", True)
    matmul_slowdown_of: Mapping[str, float] = _entries("time of matmuls of this kernel ÷ time of the points")
    result_exposed: float = _constant(
        0.5, "part of a result's additional traffic that other tiles' matmuls do not hide"
    )
    group_launch_s: float = _constant(
        0.0,
        "least time of a group of a grouped matmul on the device; also host time of each launch in a loop over groups",
    )
    memory_efficiency: float | None = _constant(None, "part of the bandwidth that streaming kernels reach", True)
    memory_efficiency_of: Mapping[str, float] = _entries(
        "part of the bandwidth that streaming kernels of one kind reach"
    )
    memory_latency_s: float = _constant(0.0, "time that the start and end of a memory-bound kernel add")
    memory_bandwidth_bytes_per_s: float | None = _constant(None, "measured bandwidth; replaces the data sheet's", True)
    peak_flops_per_s: Mapping[str, float] = _entries("measured peak of this dtype; replaces the data sheet's")
    attention: Mapping[str, AttentionSpeed] = _entries(
        "speed of a fused attention kernel; `attention` is the default kernel"
    )
    # Relative to the limit, because the limit is a property of each GPU.
    power_at_peak: float = _constant(0.0, "power drawn at the tensor cores' peak ÷ power limit; 0: no limit")
    power_at_peak_8_bits: float = _constant(
        0.0, "power drawn at the peak of 8 and 4 bits ÷ power limit; 0: as in 16 bits"
    )
    power_spread: float = _constant(0.0, "spread (σ ÷ mean) of the clocks of equal GPUs at their power limit")
    # Two constants, because plain torch and Megatron's fused modules run different Python code for each kernel.
    host_operator_s: float = _constant(0.0, "host time for issuing one kernel in Megatron")
    host_operator_eager_s: float | None = _constant(
        None, "host time for issuing one kernel in plain torch; if left out, `host_operator_s`"
    )
    host_step_s: float = _constant(0.0, "host time of an optimizer step")
    host_collective_s: float = _constant(0.0, "host time for issuing a collective")
    host_work_s: Mapping[str, float] = _entries("host time of one call of a kind of Python besides operators", False)
    # NCCL's blocking send and receive make the host wait for the device, and the device then waits for the host.
    host_message_s: float = _constant(
        0.0, "time that a blocking message adds, because host and device wait for each other"
    )
    collective_sm_share: float = _constant(
        0.0, "part of the GPU that a collective within a node takes from kernels beside it"
    )
    # Not used in prices of operators:
    overlap_compute_slowdown: float | None = _constant(
        None, "time of matmuls beside all-reduces ÷ their time alone; for replays on a CPU only", True
    )
    overlap_comm_slowdown: float | None = _constant(
        None, "time of all-reduces beside matmuls ÷ their time alone; for replays on a CPU only", True
    )
    rank_skew_s: float = _constant(
        0.0, "on a CPU: seconds for which ranks wait for the last at a collective after 1 ms of computation"
    )
    peak_bytes: Mapping[str, float] = _entries("peak bytes of a measured fused case; shown only", False)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def streaming_efficiency(self) -> float:
        """Return the part of the bandwidth that streaming kernels reach; 1 if it is not stated."""
        return 1.0 if self.memory_efficiency is None else self.memory_efficiency

    def flat(self) -> dict[str, Coefficient]:
        """Return the coefficients by their names on disk: all that are stated or differ from their neutral value."""
        found = (*_plain(self), *_mapped(self))
        return {
            name: Coefficient(float(value), self.sources.get(name, ""))
            for name, value, neutral in found
            # A stated neutral value is kept with its source, so that a saved profile reads back unchanged.
            if value is not None and (name in self.sources or value != neutral)
        }

    def changed(self, stated: Mapping[str, Coefficient]) -> Coefficients:
        """Return these coefficients with `stated` (by names on disk) in place of the own values."""
        # Values go through their names on disk, so that one reader checks values from files and from code.
        return coefficients_from({**self.flat(), **stated})

    def shifted(self, shifts: Mapping[str, float]) -> Coefficients:
        """Return these coefficients with `shifts` (by names on disk) added to the logarithms of stated values."""
        stated = self.flat()
        return self.changed({k: stated[k]._replace(value=stated[k].value * math.exp(v)) for k, v in shifts.items()})


class PriceOptions(Struct, frozen=True):
    """Hold which effects a price includes; an effect that a measurement did not have is switched off to predict it.

    `power`: the power limit slows kernels (short bursts end before it acts). `host`: the host takes time to issue
    work. `group_launch`: each group of a grouped matmul is a separate launch. `engine`: the engine and release whose
    kernels run ("vLLM 0.24.0"); empty: none of those that tables name.
    """

    power: bool = True
    host: bool = True
    group_launch: bool = True
    engine: str = ""

    def applied(self, c: Coefficients) -> Coefficients:
        """Return the coefficients, with neutral values for the effects that are switched off."""
        changes: dict[str, Any] = {}
        if not self.host:
            # With None plain torch has `host_operator_s`, which is 0 now.
            changes |= {"host_operator_s": 0.0, "host_operator_eager_s": None, "host_step_s": 0.0}
            changes |= {"host_collective_s": 0.0, "host_message_s": 0.0, "host_work_s": dict.fromkeys(HOST_WORK, 0.0)}
        if not self.group_launch:
            changes["group_launch_s"] = 0.0
        return replace(c, **changes) if changes else c


AS_STATED = PriceOptions()


class Place(Struct, frozen=True):
    """Hold the field of a name on disk; `key`: its key in a mapping; `part`: the part of an attention kernel."""

    field: str
    positive: bool
    key: str = ""
    part: str = ""


# Built from the fields, so that reader, writer and messages know every coefficient that is added above.
_FIELDS = {f.name: f for f in fields(Coefficients) if f.metadata}
# These names do not occur on disk; each of their entries has its own name.
_MAPPINGS = (
    "memory_efficiency_of",
    "matmul_slowdown_of",
    "peak_flops_per_s",
    "attention",
    "host_work_s",
    "peak_bytes",
)
_PARTS = {f.name: f for f in fields(AttentionSpeed)}
_LONGEST_FIRST = sorted(_PARTS, key=len, reverse=True)  # `backward_tile_rows` ends with `tile_rows`
_CASE_END = " peak_bytes"
_KERNELS = [r.kernel for r in RECIPES.values() if r.kernel]
# A cast that finds a block's largest value is another kernel than a plain cast.
_AGAIN = {r.again for r in RECIPES.values() if r.again}
_KINDS = (*MEMORY_BOUND, *(f"cast_{kernel}" for kernel in (*_KERNELS, *sorted(_AGAIN))), STRIDED)
_KINDS += (*(f"softmax_{kernel}" for kernel in TORCH_SOFTMAXES), f"norm_{TRANSFORMER_ENGINE}")
# The names that are known without the names of kernels and cases.
_PLACES = {name: Place(name, f.metadata["positive"]) for name, f in _FIELDS.items() if name not in _MAPPINGS}
_PLACES |= {f"peak_{dtype}_flops_per_s": Place("peak_flops_per_s", True, dtype) for dtype in DTYPES}
_PLACES |= {f"memory_efficiency_{kind}": Place("memory_efficiency_of", True, kind) for kind in _KINDS}
_PLACES |= {coefficient_of(kind): Place("host_work_s", False, kind) for kind in HOST_WORK}
_PLACES |= {
    f"matmul_slowdown_{kernel}": Place("matmul_slowdown_of", True, kernel) for kernel in (*_KERNELS, *MATMUL_LIBRARIES)
}


@lru_cache(maxsize=1024)  # each name of a profile is asked for twice
def place_of(name: str, where: str = "coefficients") -> Place:
    """Find the field of a name on disk.

    Raises:
        InputError: if there is none; the text has `where` and the most similar name.

    >>> place_of("flash2_efficiency_128")
    Place(field='attention', positive=True, key='flash2', part='efficiency_128')
    """
    if name in _PLACES:
        return _PLACES[name]
    if name.endswith(_CASE_END):
        return Place("peak_bytes", False, name.removesuffix(_CASE_END))
    # Any word may be a kernel's name, so this rule comes last.
    for part in _LONGEST_FIRST:
        kernel = name.removesuffix(f"_{part}")
        # Empty: the name is a part without a kernel. Equal: the name does not end with this part.
        if kernel not in ("", name):
            return Place("attention", _PARTS[part].metadata["positive"], kernel, part)
    raise InputError(f"{where}: unknown coefficient {show(name)}{nearest(name, (*_PLACES, *_usual_parts()))}")


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
        # A misspelt coefficient that ends like a part looks like a new kernel. Every real kernel has a speed at 128, so
        # this test tells the two apart.
        if kernel != USUAL_KERNEL and "efficiency_128" not in parts:
            name = f"{kernel}_{next(iter(parts))}"
            said = f"unknown coefficient {show(name)}{nearest(name, (*_FIELDS, *_usual_parts()))}"
            lacks = show(f"{kernel}_efficiency_128")
            raise InputError(f"{where}: {said}; attention kernel {show(kernel)} has no {lacks}")
    attention = {kernel: AttentionSpeed(**parts) for kernel, parts in kernels.items()}
    return Coefficients(**values, attention=attention, sources={name: c.source for name, c in stated.items()})


def _usual_parts() -> list[str]:
    return [f"{USUAL_KERNEL}_{part}" for part in _PARTS]


def _part(part: str, value: float, where: str) -> float | bool:
    # JSON profiles hold only numbers; a flag is written as 0 or 1.
    if not isinstance(_PARTS[part].default, bool):
        return value
    if value not in (0.0, 1.0):
        raise InputError(f"{where}.value: found {show(value)}; allowed: 0 or 1")
    return bool(value)


def _plain(c: Coefficients) -> Iterator[tuple[str, float | None, object]]:
    """Yield name on disk, value and neutral value of each field that is one number."""
    return ((name, getattr(c, name), f.default) for name, f in _FIELDS.items() if name not in _MAPPINGS)


def _mapped(c: Coefficients) -> Iterator[tuple[str, float | None, object]]:
    """Yield name on disk, value and neutral value of each entry of the mappings."""
    yield from ((f"memory_efficiency_{kind}", value, None) for kind, value in c.memory_efficiency_of.items())
    yield from ((f"matmul_slowdown_{kernel}", value, None) for kernel, value in c.matmul_slowdown_of.items())
    yield from ((f"peak_{dtype}_flops_per_s", value, None) for dtype, value in c.peak_flops_per_s.items())
    yield from ((coefficient_of(kind), value, None) for kind, value in c.host_work_s.items())
    for kernel, speed in c.attention.items():
        yield from ((f"{kernel}_{part}", getattr(speed, part), f.default) for part, f in _PARTS.items())
    yield from ((f"{case}{_CASE_END}", value, None) for case, value in c.peak_bytes.items())
