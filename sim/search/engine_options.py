"""Options of an engine that a search for serving layouts may vary beside the layout: keys of `inference`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.core.errors import InputError
from sim.inputs.input_source import nearest
from sim.inputs.overrides import nested
from sim.inputs.synonyms import synonym
from sim.variants.engines import ENGINES

SECTION = "inference."
OPTIONS = (
    "engine",
    "max_running_requests",
    "max_batch_tokens",
    "max_prompt_tokens",
    "chunked_prefill",
    "prefix_cache",
    "preemption",
    "capacity_policy",
    "schedule_conservativeness",
    "cuda_graphs",
    "cuda_graph_max_size",
    "quantization",
    "async_scheduling",
    "all2all_backend",
    "two_batch_overlap",
    "stream_interval",
    "eplb.redundant_experts",
    "kv_cache.block_tokens",
    "kv_cache.dtype",
    "kv_cache.memory_fraction",
    "kv_cache.max_tokens",
)
Choice = Mapping[str, Any]  # values of some of `OPTIONS`
Axes = Sequence[tuple[tuple[str, ...], list[tuple[Any, ...]]]]  # keys that are varied together, rows of their values


def choices_of(axes: Axes) -> tuple[Choice, ...]:
    """All combinations of the axes' values, in the order in which they are written; one without values where there
    are no axes.

    Raises:
        InputError: for a key that is none of `OPTIONS`, or given twice.
    """
    written = [key for keys, _ in axes for key in keys]
    names = [key.removeprefix(SECTION) for key in written]
    for i, (key, name) in enumerate(zip(written, names, strict=True)):
        if name not in OPTIONS:
            allowed, hint = ", ".join(OPTIONS), synonym(name) or nearest(name, OPTIONS)
            hint = "; search each cluster by itself, with --cluster" if name == "cluster" else hint
            raise InputError(f"--vary {key}: --slo searches values of keys of inference{hint} (allowed: {allowed})")
        if name in names[:i]:  # with its section and without
            raise InputError(f"--vary {key}: is given twice")
    return tuple(
        dict(zip(names, itertools.chain(*chosen), strict=True))
        for chosen in itertools.product(*(rows for _, rows in axes))
    )


def by_engine(choices: Sequence[Choice]) -> tuple[tuple[Choice, ...], ...]:
    """The choices of each engine, in the order in which they are written: engines are compared, while of one engine's
    options the best are wanted."""
    found: dict[str, list[Choice]] = {}
    for choice in choices:
        found.setdefault(str(choice.get("engine")), []).append(choice)
    return tuple([tuple(own) for own in found.values()])


def of_one_host(engines: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Group engines that are shipped with the same host times, so that nothing measured tells them apart.

    >>> of_one_host(["vllm-0.2", "vllm-0.14", "vllm-0.17", "sglang-0.5"])
    (('vllm-0.14', 'vllm-0.17'),)
    """
    found: list[list[str]] = []
    for name in dict.fromkeys(engines):
        host = ENGINES[name].host if name in ENGINES else {}
        own = next((names for names in found if host and ENGINES[names[0]].host == host), None)
        if own is not None:
            own.append(name)
        elif host:
            found.append([name])
    return tuple(tuple(names) for names in found if len(names) > 1)


def as_section(choice: Choice) -> dict[str, Any]:
    """The changes of a scenario that a choice stands for.

    >>> as_section({"max_batch_tokens": 512, "kv_cache.dtype": "fp8"})
    {'inference': {'max_batch_tokens': 512, 'kv_cache': {'dtype': 'fp8'}}}
    """
    return nested({f"{SECTION}{key}": value for key, value in choice.items()})


def choice_words(choice: Choice) -> str:
    """Keys and values as `--set` has them, without the section.

    >>> choice_words({"max_batch_tokens": 512, "chunked_prefill": True})
    'max_batch_tokens=512 chunked_prefill=true'
    """
    return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in choice.items())
