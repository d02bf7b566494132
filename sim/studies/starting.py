"""The smallest change with which a serving engine starts that has no room for its cache or for its longest request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.serve.results.starts import room_for_longest, why_not_started
from sim.serve.simulation import make_pools

MOST_OF_GPU = 0.95  # of its memory: what makers of engines advise at most
Load = Callable[[Sequence[str]], Scenario]  # the scenario with more overrides


def change_that_starts(load: Load, profile: Profile) -> str | None:
    """Return the override of one key with which the engine starts, the first that does of `_proposals`; None if none
    does. Of a key's values the nearest to the scenario's own is taken."""
    return next((change for change in _proposals(load, profile) if _starts(load, change, profile)), None)


def _starts(load: Load, change: str, profile: Profile) -> bool:
    try:
        return why_not_started(make_pools(load([change]), profile)) is None
    except InputError:
        return False


def _proposals(load: Load, profile: Profile) -> Iterator[str]:
    """Changes of one key: first what takes no GPU and no precision, nearest values first."""
    scenario = load([])
    i, p = scenario.for_serving, scenario.parallelism
    for percent in range(int(100 * i.kv_cache.memory_fraction) + 1, int(100 * MOST_OF_GPU) + 1):
        yield f"inference.kv_cache.memory_fraction={percent / 100:g}"
    longest = room_for_longest(make_pools(scenario, profile))
    if longest is not None and longest[1]:
        yield f"inference.max_request_tokens={longest[1]}"
    for key in ("max_batch_tokens", "max_running_requests"):
        most = getattr(i, key)
        values = [most >> n for n in range(1, most.bit_length())]
        yield from (f"inference.{key}={value}" for value in values)
    if i.quantization == "none":
        yield "inference.quantization=fp8"
    yield from (f"parallelism.tp={p.tp * n}" for n in (2, 4, 8))
