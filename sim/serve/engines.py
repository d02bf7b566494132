"""What a serving engine does its own way: its host's time, its CUDA graphs, its kernels, its limits.

`inference.engine` names one of `ENGINES`. Adding an engine is one more record there: the key's allowed values and the
JSON Schema follow from the dict, and nothing else in the simulator asks for an engine's name.

Seconds called "fitted" are printed by `python tools/fit_engines.py`: least squares on every second row of one table in
`scenarios/published`; docs/accuracy_causes.md has the errors on the other rows, and those of the table left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

DecodeAttention = Literal["grouped", "per_head"]


class HostTimes(NamedTuple):
    """Seconds of an engine's host beside GPUs of one architecture; what is left out takes none."""

    iteration_s: float = 0.0  # of every iteration: scheduling, input tensors, sampling, detokenizing
    rank_s: float = 0.0  # of every iteration, for each tensor-parallel rank beyond the first
    sequence_s: float = 0.0  # of every iteration, for each sequence in it
    prompt_s: float = 0.0  # more where an iteration computes prompts
    oversize_s: float = 0.0  # for each token and rank of an iteration beyond `Engine.sized_tokens`
    launch_s: float = 0.0  # to issue one kernel outside of a CUDA graph
    collective_s: float = 0.0  # that an all-reduce takes beyond the profile's: ranks that arrive one after another
    request_s: float = 0.0  # before a request reaches the engine: HTTP, tokenizer


class Defaults(NamedTuple):
    """What keys of `inference` are where a scenario leaves them out."""

    max_running_requests: int = 256
    max_batch_tokens: int = 8192
    block_tokens: int = 16
    memory_fraction: float = 0.9


T = TypeVar("T")


def fact(default: T, meaning: str) -> T:
    """A field of `Engine`: the bundled engine's value, and what it means."""
    found: T = field(default=default, metadata={"meaning": meaning})
    return found


@dataclass(frozen=True, slots=True)
class Engine:
    """The facts of one engine; those that a record leaves out are the bundled one's."""

    name: str  # the key's value
    product: str  # what tables call it
    since: tuple[int, ...]  # the first version that is so
    date: str  # of that version: year and month
    source: str

    host: Mapping[str, HostTimes] = field(
        default_factory=dict,
        metadata={"meaning": "host seconds by GPU architecture; others take those of the last one"},
    )
    overlaps: bool = fact(False, "the host prepares an iteration while the GPU computes the one before")
    graph_sizes: tuple[int, ...] = fact(
        (), "batches of single tokens that CUDA graphs are kept for; others between are padded, above none is used"
    )
    decode_attention: DecodeAttention = fact(  # noqa: RUF009  a Literal
        "grouped", "single tokens' attention reads a KV head once, or once for each of its query heads"
    )
    reserves_output: bool = fact(
        False,
        "a request enters once the cache has room for all that it and those that run will write: none is preempted",
    )
    sized_tokens: int | None = fact(None, "tokens of the iteration by which memory for activations was sized")
    fp8_cache: bool = fact(False, "with 8-bit weights keys and values are kept in fp8, too")
    experts_speed: float = fact(1.0, "speed of fp8 experts' matmuls by that of the profile's points")
    defaults: Defaults = fact(Defaults(), "what keys are where a scenario leaves them out")  # noqa: RUF009  a tuple

    def host_on(self, architecture: str) -> HostTimes:
        """Host seconds beside GPUs of an architecture; of one not known, those of the last that is."""
        if not self.host:
            return HostTimes()
        return self.host.get(architecture) or list(self.host.values())[-1]


_TO_256 = (1, 2, 4, *range(8, 257, 8))  # vLLM 0.6: worker/model_runner.py, _BATCH_SIZES_TO_CAPTURE up to max_num_seqs
_TO_512 = (1, 2, 4, *range(8, 513, 8))  # vLLM V1: config.py, cudagraph_capture_sizes
_TO_160 = (1, 2, 4, *range(8, 161, 8))  # SGLang 0.4: model_executor/cuda_graph_runner.py

_RECORDS = (
    Engine("bundled", "bundled", (), "2026-11", "this project's: one kernel after another, a host of no time"),
    Engine(
        "vllm-0.2",
        "vLLM",
        (0, 1),
        "2023-11",
        "host: fitted to splitwise_llama2_70b; no graphs before 0.2.7; csrc/attention/attention_kernels.cu has a block "
        "for each query head; max_num_batched_tokens 2,560 (engine/arg_utils.py)",
        host={
            "ampere": HostTimes(
                iteration_s=0.205e-3,
                rank_s=0.628e-3,
                sequence_s=0.345e-3,
                prompt_s=14.1e-3,
                oversize_s=16.6e-6,
                launch_s=44.4e-6,
            ),
            "hopper": HostTimes(
                iteration_s=6.42e-3,
                rank_s=0.984e-3,
                sequence_s=0.226e-3,
                prompt_s=10.1e-3,
                oversize_s=6.38e-6,
                launch_s=17.4e-6,
            ),
        },
        decode_attention="per_head",
        sized_tokens=2560,
        defaults=Defaults(max_batch_tokens=2560),
    ),
    Engine(
        "vllm-0.5",
        "vLLM",
        (0, 3),
        "2024-07",
        "host: 5 to 13 ms without a kernel between two iterations (vllm-project/vllm issue 6854, July 2024), read as"
        " one sequence and 256; launches as vllm-0.2",
        host={"hopper": HostTimes(iteration_s=5e-3, sequence_s=31e-6, launch_s=17.4e-6)},
        graph_sizes=_TO_256,
        defaults=Defaults(max_batch_tokens=4096),
    ),
    Engine(
        "vllm-0.6",
        "vLLM",
        (0, 6),
        "2024-09",
        "host: a half of vllm-0.5's, whose time a token at 32 requests a second fell to a fifth on an 8B and to a half"
        " on a 70B (blog.vllm.ai, 5 September 2024: asynchronous output, several steps to a schedule); launches as"
        " vllm-0.2",
        host={"hopper": HostTimes(iteration_s=2.5e-3, sequence_s=15.6e-6, launch_s=17.4e-6)},
        graph_sizes=_TO_256,
        defaults=Defaults(max_batch_tokens=4096),
    ),
    Engine(
        "vllm-v1",
        "vLLM",
        (0, 8),
        "2025-03",
        "host: 5 to 6 ms between iterations of 256 sequences without asynchronous scheduling (vllm-project/vllm pull "
        "request 11133, December 2024), a millisecond of it taken for one sequence; launches as vllm-0.2",
        host={"hopper": HostTimes(iteration_s=1e-3, sequence_s=17.6e-6, launch_s=17.4e-6)},
        graph_sizes=_TO_512,
    ),
    Engine(
        "sglang",
        "SGLang",
        (0, 4),
        "2024-12",
        "host: as vllm-v1's, beside the GPU (lmsys.org/blog/2024-12-04-sglang-v0-4: no idle time between decoding "
        "batches); launches as vllm-0.2",
        host={"hopper": HostTimes(iteration_s=1e-3, sequence_s=17.6e-6, launch_s=17.4e-6)},
        overlaps=True,
        graph_sizes=_TO_160,
        defaults=Defaults(max_running_requests=4096, block_tokens=1, memory_fraction=0.88),
    ),
    Engine(
        "trtllm-0.6",
        "TensorRT-LLM",
        (0, 5),
        "2023-12",
        "launches: fitted to trtllm_static_h100; no kernel reads a KV head once for a group before 0.8 (XQA blog); "
        "the capacity scheduler's default policy is GUARANTEED_NO_EVICT (useful-runtime-flags.md)",
        host={"hopper": HostTimes(launch_s=19.5e-6)},
        decode_attention="per_head",
        reserves_output=True,
        fp8_cache=True,
        defaults=Defaults(block_tokens=64),
    ),
    Engine(
        "trtllm-triton",
        "TensorRT-LLM Triton",
        (0, 8),
        "2024-11",
        "host: fitted to trtllm_014_online; all-reduces, experts and policy: as trtllm; 2,048 requests: release notes "
        "of 0.14.0 (default max_batch_size of trtllm-build)",
        host={
            "ampere": HostTimes(collective_s=69e-6),
            "hopper": HostTimes(
                iteration_s=0.71e-3, sequence_s=22.1e-6, prompt_s=0.464e-3, collective_s=22e-6, request_s=6.63e-3
            ),
        },
        reserves_output=True,
        fp8_cache=True,
        experts_speed=0.767,
        defaults=Defaults(max_running_requests=2048, block_tokens=64),
    ),
    Engine(
        "trtllm",
        "TensorRT-LLM",
        (0, 8),
        "2025-01",
        "fitted to trtllm_017_throughput; launches and policy as trtllm-0.6",
        host={
            "ampere": HostTimes(collective_s=69e-6),
            "hopper": HostTimes(sequence_s=2.6e-6, collective_s=22e-6, launch_s=19.5e-6),
        },
        reserves_output=True,
        fp8_cache=True,
        experts_speed=0.767,
        defaults=Defaults(max_running_requests=2048, block_tokens=64),
    ),
)
ENGINES: dict[str, Engine] = {record.name: record for record in _RECORDS}


def engine_named(texts: tuple[str, ...]) -> Engine | None:
    """The record of a product and version as tables of measurements name them; None where no product is known.

    All words of its `product` stand in the texts, and those of no other with more words. Of its records the newest that
    is no newer than the first version (0.17) or else year (2023) in the texts, in their order; without either the
    newest.

    >>> [e.name if e else None for e in map(engine_named, [("vLLM 2023",), ("TensorRT-LLM 0.17",), ("TGI 1.4",)])]
    ['vllm-0.2', 'trtllm', None]
    """
    words = {word.lower() for text in texts for word in re.findall(r"[\w-]+", text)}
    known = [e for e in ENGINES.values() if set(e.product.lower().split()) <= words]
    if not known:
        return None
    most = max(len(e.product.split()) for e in known)
    records = [e for e in known if len(e.product.split()) == most]
    version = next((found for text in texts if (found := re.search(r"\bv?(\d+)\.(\d+)", text))), None)
    year = next((found[0] for text in texts if (found := re.search(r"\b20\d\d\b", text))), "9999")
    if version is not None:
        older = [e for e in records if e.since <= (int(version[1]), int(version[2]))]
    else:
        older = [e for e in records if e.date[:4] <= year]
    return (older or records[:1])[-1]


def engine_table() -> str:
    """The records as a Markdown table: an engine a row; host seconds beside Hopper."""
    head = ["`engine`", "since", "between iterations", "a launch", "graphs to", "decode", "before the engine"]
    rows = [head, ["---"] * len(head)]
    for e in ENGINES.values():
        t = e.host_on("hopper")
        parts = (
            (t.iteration_s, ""),
            (t.rank_s, " a further rank"),
            (t.sequence_s, " a sequence"),
            (t.prompt_s, " with prompts"),
        )
        between = " + ".join(f"{s * 1e3:.3g} ms{what}" for s, what in parts if s) + ", beside the GPU" * e.overlaps
        launch = f"{t.launch_s * 1e6:.3g} µs" if t.launch_s else ""
        graphs = str(e.graph_sizes[-1]) if e.graph_sizes else ""
        before = f"{t.request_s * 1e3:.3g} ms" if t.request_s else ""
        rows.append([f"`{e.name}`", e.date, between, launch, graphs, e.decode_attention, before])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
