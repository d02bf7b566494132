"""Priced items of a program: computations that follow each other, communications, and what both wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from msgspec import Struct, field

from sim.core.program import Comm, Compute, ModelPart
from sim.core.timeline import Detail
from sim.prices.price import Price, Priced, together_s

OfPart = tuple[ModelPart, str]  # part of the model, and of communication its group, else ""
Share = tuple[str, str, float]  # operator kind, source of its seconds, their uncertainty
Shares = dict[Share, float]  # seconds of each
K = TypeVar("K")
Label = Callable[[Compute | Comm, Priced], K]  # that by which seconds are summed


def share(item: Compute | Comm, priced: Priced) -> Share:
    """The kind of an item, and where its seconds come from."""
    return item.kind, priced.source, priced.uncertainty


def name(item: Compute | Comm, priced: Priced) -> str:
    """An operator's name, or a communication's group and kind."""
    return item.name if isinstance(item, Compute) else f"{item.group} {item.kind}"


def operator(item: Compute | Comm, priced: Priced) -> tuple[str, str]:
    """Name and phase of an item."""
    return name(item, priced), item.phase.value


def of_part(item: Compute | Comm, priced: Priced) -> OfPart:
    """The part of the model whose work an item is."""
    return (item.part, "") if isinstance(item, Compute) else (ModelPart.COMMUNICATION, item.group)


class Run(Struct, frozen=True, eq=False):
    """Computations that follow each other: their seconds on the device, and the host's and device's of each block.
    `sums`: results of `by`, for layers repeat their runs."""

    items: list[Compute]
    cuts: list[int]
    priced: list[Priced]
    seconds: float
    blocks: list[tuple[float, float]]
    detail: Detail
    sums: dict[Any, dict[Any, float]] = field(default_factory=dict)

    def by(self, label: Label[K]) -> dict[K, float]:
        """Sum the seconds by `label`, a function of an item and its price."""
        total: dict[K, float] | None = self.sums.get(label)
        if total is None:
            total = self.sums[label] = {}
            for op, p in zip(self.items, self.priced, strict=True):
                key = label(op, p)
                total[key] = total.get(key, 0.0) + p.seconds
        return total

    @property
    def phase(self) -> str:
        """The phase of the first computation."""
        return self.items[0].phase.value


class Sent(Struct, frozen=True, eq=False):
    """A communication with its price. `seconds` and `late_s`: with and of what it waits for the host;
    `sums` as in `Run`."""

    item: Comm
    priced: Priced
    stream: str
    seconds: float
    late_s: float
    detail: Detail
    sums: dict[Any, dict[Any, float]] = field(default_factory=dict)

    def by(self, label: Label[K]) -> dict[K, float]:
        """Sum the seconds by `label`, a function of an item and its price."""
        total: dict[K, float] | None = self.sums.get(label)
        if total is None:
            total = self.sums[label] = {label(self.item, self.priced): self.priced.seconds}
        return total

    @property
    def phase(self) -> str:
        """The phase of the communication."""
        return self.item.phase.value


class Spent(Struct, frozen=True):
    """Seconds of a task: what was priced, for how long that waits for the host, and what computing takes longer beside
    communications."""

    priced: Run | Sent
    late_s: float
    shared_s: float

    @property
    def longer(self) -> float:
        """The factor by which communication slows the computations beside it."""
        if self.shared_s <= 0:
            return 1.0
        own_s = sum(self.priced.by(operator).values())
        return 1.0 + self.shared_s / own_s if own_s > 0 else 1.0


def price_run(items: list[Compute], cuts: list[int], price: Price) -> Run:
    """The kernels of a run."""
    priced = [price(op) for op in items]
    blocks = [
        (sum([p.host_s for p in priced[start:end]]), sum([p.seconds for p in priced[start:end]]))
        for start, end in pairwise((0, *cuts, len(items)))
    ]
    words = items[0].name if len(items) == 1 else f"{items[0].name} … {items[-1].name}"
    sources = "+".join(dict.fromkeys([p.source for p in priced]))
    seconds = sum([device_s for _, device_s in blocks])
    return Run(items, cuts, priced, seconds, blocks, Detail(words, source=sources, operators=len(items)))


def price_comm(item: Comm, price: Price) -> Sent:
    """A communication, and for how long it waits for the host."""
    priced = price(item)
    late_s = together_s(priced.host_s, priced.seconds) - priced.seconds
    note = str(priced.choice or "")
    detail = Detail(item.name, item.bytes, priced.bus_bandwidth_bytes_per_s, priced.source, note)
    return Sent(item, priced, item.stream or item.group, priced.seconds + late_s, late_s, detail)


class Host:
    """The host: it issues kernels while the device executes earlier ones, and the device waits if the host is late.

    The seconds by which it is ahead (`ahead`) are kept across communications that it only starts. They are not kept
    across a communication that it waits for, nor from block to block (vTrain's times are sums over blocks).
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew, at a block or after a wait: host and device are level."""
        self.host_s = self.device_s = self.late_s = 0.0

    def issue(self, host_s: float, device_s: float) -> float:
        """Seconds for which the device waits for these kernels."""
        self.host_s += host_s
        self.device_s += device_s
        late_s = max(0.0, together_s(self.host_s, self.device_s) - self.device_s - self.late_s)
        self.late_s += late_s
        return late_s


def add_all(total: dict[K, float], each: Mapping[K, float], times: float = 1.0) -> None:
    """Add each value, `times` times, to the total of its key."""
    for key, value in each.items():
        total[key] = total.get(key, 0.0) + value * times
