"""Processes that are shipped: each function makes one for `simulate(…, processes=[…])`, and a scenario's section
`processes` lists them by name.

>>> from sim import load_scenario, simulate
>>> step = simulate(load_scenario("scenarios/dp8.yaml"), processes=[thermal_throttling(ranks=3, at_s=0.1, scale=0.7)])
>>> step.step_time_s > step.without_processes_s
True
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from sim.inputs.processes_input import Processes
from sim.processes.cluster import Cluster, Process, Ranks
from topology.shares import LinkKind

if TYPE_CHECKING:
    from simpy import Environment
    from simpy.events import Event

    Waiting = Generator[Event, Any, Any]


def listed_in(processes: Processes) -> tuple[Process, ...]:
    """The processes of a scenario."""
    made = {f.__name__: f for f in (thermal_throttling, link_flap, background_traffic, checkpoint, storage_read)}
    return tuple(made[name](**dict(arguments)) for name, _, arguments in processes.listed())


def thermal_throttling(ranks: Ranks | None, at_s: float, scale: float, for_s: float | None = None) -> Process:
    """From `at_s` seconds into the step GPUs compute at `scale` times their speed, for `for_s` seconds or for ever."""

    def thermal_throttling(env: Environment, cluster: Cluster) -> Waiting:
        if at_s:
            yield env.timeout(at_s)
        cluster.set_clock(scale, ranks=ranks)
        if for_s is not None:
            yield env.timeout(for_s)
            cluster.set_clock(1.0, ranks=ranks)

    return thermal_throttling


def link_flap(
    ranks: Ranks | None, at_s: float, down_s: float, link: LinkKind = "nic", up_s: float = 0.0, times: int = 1
) -> Process:
    """A link carries nothing for `down_s` seconds, `times` times with `up_s` seconds in between, from `at_s` on."""

    def link_flap(env: Environment, cluster: Cluster) -> Waiting:
        yield env.timeout(at_s)
        for _ in range(times):
            cluster.set_link(link, 0.0, ranks=ranks)
            yield env.timeout(down_s)
            cluster.set_link(link, 1.0, ranks=ranks)
            yield env.timeout(up_s)

    return link_flap


def background_traffic(source: int, target: int, n_bytes: float, every_s: float = 0.0) -> Process:
    """Another job's messages of `n_bytes` between two GPUs' links, one after the other, each at least `every_s` seconds
    after the one before began (0: at once when that is over)."""

    def background_traffic(env: Environment, cluster: Cluster) -> Waiting:
        while True:
            sent = cluster.transfer(n_bytes, source=source, target=target, name="BACKGROUND")
            yield sent & env.timeout(every_s)

    return background_traffic


def checkpoint(
    n_bytes: float, bytes_per_s: float | None = None, ranks: Ranks | None = None, asynchronous: bool = False
) -> Process:
    """At the step's start, each rank writes `n_bytes` to storage over its NICs, no faster than `bytes_per_s`. Nothing
    computes there meanwhile, unless `asynchronous`: then only the links are shared."""

    def checkpoint(env: Environment, cluster: Cluster) -> Waiting:
        chosen = cluster.chosen(ranks)
        if asynchronous:
            yield _all_at_once(env, cluster, chosen, n_bytes, bytes_per_s, "CHECKPOINT", write=True)
            return
        with cluster.hold(chosen, "CHECKPOINT") as hold:
            yield hold.granted
            yield _all_at_once(env, cluster, chosen, n_bytes, bytes_per_s, "WRITE", write=True)

    return checkpoint


def storage_read(n_bytes: float, bytes_per_s: float, ranks: Ranks | None = None) -> Process:
    """Each rank reads its batch, `n_bytes`, from storage before it computes anything, no faster than `bytes_per_s`."""

    def storage_read(env: Environment, cluster: Cluster) -> Waiting:
        chosen = cluster.chosen(ranks)
        with cluster.hold(chosen, "LOAD") as hold:
            yield hold.granted
            yield _all_at_once(env, cluster, chosen, n_bytes, bytes_per_s, "READ", write=False)

    return storage_read


def _all_at_once(
    env: Environment,
    cluster: Cluster,
    ranks: tuple[int, ...],
    n_bytes: float,
    bytes_per_s: float | None,
    name: str,
    write: bool,
) -> Event:
    """A transfer between storage and each rank; the event: all are over."""
    ends = [(rank, None) if write else (None, rank) for rank in ranks]
    return env.all_of(
        [cluster.transfer(n_bytes, source=a, target=b, bytes_per_s=bytes_per_s, name=name) for a, b in ends]
    )
