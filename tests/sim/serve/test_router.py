"""The router that sends requests where most of their prefix went, as SGLang's does.

sgl-model-gateway/src/policies/cache_aware.rs, with the defaults of its router_args.py: cache_threshold 0.3,
balance_abs_threshold 64, balance_rel_threshold 1.5.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sim.inputs.serving_keys import HASHED_TOKENS
from sim.serve.replicas.router import PrefixAware
from sim.serve.requests import Request


def chosen(loads: tuple[int, ...], request: Request, sent: dict[int | str, int]) -> int:
    """The replica of these loads that gets a request, where prefixes went to those of `sent`."""
    replicas: Any = [SimpleNamespace(waiting=[], running=[0] * load) for load in loads]
    router = PrefixAware(replicas)
    router._sent.update(sent)
    sequence: Any = SimpleNamespace(request=request)
    return router.choose(sequence)


@pytest.mark.parametrize(
    ("loads", "tokens", "found"),
    [
        ((40, 0), 100, 0),
        ((64, 0), 100, 0),
        ((65, 0), 100, 1),
        ((300, 199), 100, 1),
        ((300, 200), 100, 0),  # not more than one and a half times as many
        ((3, 0), 31, 0),
        ((3, 0), 30, 1),  # most of the prompt is new
    ],
)
def test_prefixes_lead_unless_loads_are_apart_or_little_is_known(
    loads: tuple[int, int], tokens: int, found: int
) -> None:
    assert chosen(loads, Request(0.0, 100, 8, "a", tokens), {"a": 0}) == found


def test_loads_are_apart_whatever_the_third_replica_has() -> None:
    assert chosen((10, 100, 0), Request(0.0, 100, 8, "a", 100), {"a": 0}) == 2


@pytest.mark.parametrize(("known", "found"), [((1, 2), 1), ((1,), 2), ((), 2)])
def test_hashes_count_as_far_as_they_are_known(known: tuple[int, ...], found: int) -> None:
    """Of four hashes two are half of the prompt, and one is a quarter."""
    request = Request(0.0, 4 * HASHED_TOKENS, 8, "", 4 * HASHED_TOKENS, (1, 2, 3, 4))
    assert chosen((5, 5, 0), request, dict.fromkeys(known, 1)) == found
