"""Which request uses which LoRA adapter, and which adapters are on the GPU.

Adapters lie in host memory. `max_loras` of them have room on a GPU at once, set aside beside the weights (vLLM's
max_loras). A request is admitted when its adapter has a place there; one whose adapter has none is passed over by
those behind it (vLLM's scheduler). An adapter without a place takes a free one or that of the adapter that no running
sequence has used for longest, by a copy over the GPU's link to its host, while others compute (Sheng et al. 2023,
"S-LoRA", arXiv 2311.03285, section 5).

The popularity of adapter k = 1, 2, … is proportional to 1 / k^zipf (S-LoRA's section 7: a power law); each request's is
drawn from `seed`. Keys and values depend on the adapter, so prefixes are shared among requests of one adapter only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from msgspec import Struct, field

from sim.inputs.scenario import Scenario
from sim.inputs.serving_keys import ServedLora
from sim.serve.cache.host_copies import Copy, Link, copied
from sim.serve.requests import Request


def with_named(scenario: Scenario, requests: tuple[Request, ...]) -> Scenario:
    """The scenario with as many adapters as the trace names, where `adapters` says fewer."""
    inference = scenario.for_serving
    named = len({r.adapter for r in requests} - {""})
    if inference.lora is None or named <= inference.lora.adapters:
        return scenario
    lora = inference.lora.model_copy(update={"adapters": named})
    return scenario.unchecked_copy(update={"inference": inference.model_copy(update={"lora": lora})})


def with_adapters(requests: tuple[Request, ...], lora: ServedLora) -> tuple[Request, ...]:
    """The requests with an adapter each, drawn where the trace names none."""
    if not any(r.adapter for r in requests):
        import numpy as np

        weights = np.arange(1, lora.adapters + 1, dtype=float) ** -lora.zipf
        drawn = np.random.default_rng(lora.seed).choice(lora.adapters, len(requests), p=weights / weights.sum())
        requests = tuple([r._replace(adapter=str(n + 1)) for r, n in zip(requests, drawn.tolist(), strict=True)])
    return tuple([_of_its_own(r) for r in requests])


def _of_its_own(r: Request) -> Request:
    """With a prefix that only requests of the same adapter share."""
    if not r.adapter:
        return r
    prefix = f"{r.adapter}/{r.prefix_id}" if r.prefix_id else ""
    return r._replace(prefix_id=prefix, hashes=tuple([f"{r.adapter}/{h}" for h in r.hashes]))


class AdapterSlots(Struct):
    """The adapters of one replica: `places` of them at once, each copied in `copy_s`. `there`: when each has come, the
    least recently used first; `users`: running sequences of each."""

    places: int
    copy_s: float
    link: Link
    copies: list[Copy]
    there: OrderedDict[str, float] = field(default_factory=OrderedDict)
    users: Counter[str] = field(default_factory=Counter)

    def can(self, adapter: str) -> bool:
        """Whether a sequence of this adapter may be admitted."""
        return not adapter or adapter in self.there or len(self.users) < self.places

    def use(self, adapter: str, now_s: float) -> float:
        """A sequence is admitted; when its adapter is there."""
        if not adapter:
            return now_s
        if adapter not in self.there:
            if len(self.there) == self.places:
                del self.there[next(a for a in self.there if a not in self.users)]
            start_s, self.there[adapter] = copied((self.link,), True, now_s, self.copy_s)
            name = f"adapter {adapter}"
            self.copies.append(Copy(start_s, self.there[adapter], "LoRA adapter", "host", True, note=name))
        self.there.move_to_end(adapter)
        self.users[adapter] += 1
        return self.there[adapter]

    def leave(self, adapter: str) -> None:
        """A sequence ended or was preempted."""
        if adapter:
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]
