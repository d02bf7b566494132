"""What a serving engine does its own way: its host's time, its CUDA graphs, its kernels, its limits.

`inference.engine` names one of `ENGINES`. Adding an engine is one more record there: the key's allowed values and the
JSON Schema follow from the dict, and nothing else in the simulator asks for an engine's name.

Seconds called "fitted" are printed by `python tools/fit_engines.py`: least squares on every second row of one table in
`scenarios/published`; docs/accuracy_causes.md has the errors on the other rows, and those of the table left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from sim.serve.own_all_reduce import CUSTOM, CUSTOM_LESS, MIN_LATENCY, OwnAllReduce

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
    uncertainty: float = 0.05  # of these seconds, as of a price: on rows that they were not fitted to

    def slower(self, times: float) -> HostTimes:
        """Those of a processor that takes so many times as long; what GPUs wait for each other stays."""
        kept = self.collective_s, self.uncertainty
        return HostTimes(*[times * s for s in self])._replace(collective_s=kept[0], uncertainty=kept[1])


class Defaults(NamedTuple):
    """What an engine sets by itself where nobody does: keys of `inference`, and the largest batch of single tokens for
    which it keeps a CUDA graph (0: no graphs)."""

    max_running_requests: int = 256
    max_batch_tokens: int = 8192
    block_tokens: int = 16
    memory_fraction: float = 0.9
    prefix_cache: str = "none"
    chunked_prefill: bool = True
    graphs_to: int = 0

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batches of single tokens that CUDA graphs are kept for (vLLM 0.6: worker/model_runner.py,
        _BATCH_SIZES_TO_CAPTURE; vLLM V1: config.py, cudagraph_capture_sizes; SGLang: cuda_graph_runner.py).

        >>> Defaults(graphs_to=24).graph_sizes
        (1, 2, 4, 8, 16, 24)
        """
        return tuple([size for size in (1, 2, 4, *range(8, self.graphs_to + 1, 8)) if size <= self.graphs_to])


class Case(NamedTuple):
    """Other defaults where all of it holds: GPUs of at least so many bytes of memory and of no architecture in
    `but`, at least so many tensor-parallel ranks, models of at least so many positions."""

    changes: Mapping[str, Any]
    memory_bytes: float = 0.0
    but: tuple[str, ...] = ()
    tp: int = 1
    positions: int = 0


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
    prompt_graphs: bool = fact(False, "graphs of all but attention serve iterations with prompts as well, to that size")
    decode_attention: DecodeAttention = fact(  # noqa: RUF009  a Literal
        "grouped", "single tokens' attention reads a KV head once, or once for each of its query heads"
    )
    reserved_output: float = fact(
        0.0,
        "a request enters once the cache has room for all that it will write, and this share of what those that run "
        "will: none is preempted at 1; 0: room for its prompt is enough",
    )
    sized_tokens: int | None = fact(None, "tokens of the iteration by which memory for activations was sized")
    own_all_reduces: Mapping[str, OwnAllReduce] = field(
        default_factory=dict,
        metadata={"meaning": "all-reduces over NVLink in kernels of its own, by GPU architecture; elsewhere NCCL's"},
    )
    fp8_cache: bool = fact(False, "with 8-bit weights keys and values are kept in fp8, too")
    experts_speed: float = fact(1.0, "speed of fp8 experts' matmuls by that of the profile's points")
    called: str = fact("", "what tables call it where they name no version")
    fraction: Callable[[float, int, Defaults], float] | None = fact(  # noqa: RUF009
        None, "memory_fraction on GPUs of so many bytes, for so many tensor-parallel ranks and the other defaults"
    )
    whole_prompt_tokens: int | None = fact(
        None, "without chunks max_batch_tokens are the model's positions, where known, and at least so many"
    )
    defaults: Defaults = fact(Defaults(), "what keys are where a scenario leaves them out")  # noqa: RUF009  a tuple
    cases: tuple[Case, ...] = fact((), "where they are others; of those that hold the last decides")

    def host_on(self, architecture: str) -> HostTimes:
        """Host seconds beside GPUs of an architecture; of one not known, those of the last that is."""
        if not self.host:
            return HostTimes()
        return self.host.get(architecture) or list(self.host.values())[-1]

    @property
    def asks_positions(self) -> bool:
        """Whether any default depends on how many positions the model was made for."""
        return self.whole_prompt_tokens is not None or any(case.positions for case in self.cases)

    def defaults_on(self, architecture: str, memory_bytes: float, tp: int, positions: int) -> Defaults:
        """What the engine sets by itself on such GPUs for a model of so many positions (0: unknown), split over `tp`
        ranks."""
        d = self.defaults
        for case in self.cases:
            fits = memory_bytes >= case.memory_bytes and architecture not in case.but
            if fits and tp >= case.tp and positions >= case.positions:
                d = d._replace(**case.changes)
        if self.whole_prompt_tokens is not None and positions and not d.chunked_prefill:
            d = d._replace(max_batch_tokens=max(positions, self.whole_prompt_tokens))
        return d if self.fraction is None else d._replace(memory_fraction=self.fraction(memory_bytes, tp, d))


GIB = 2.0**30
A100_BY_H100 = 1.53  # of vllm-0.2's seconds a sequence: hosts of A100 are older

# Host seconds that no table here judges, from what authors wrote; the spread of what they wrote is the uncertainty.
_V5 = HostTimes(5e-3, sequence_s=31e-6, launch_s=17.4e-6, request_s=5.8e-3, uncertainty=0.4)
_V6 = HostTimes(2.5e-3, sequence_s=15.6e-6, launch_s=17.4e-6, request_s=5.8e-3, uncertainty=0.4)
_V1 = HostTimes(1.5e-3, sequence_s=8e-6, launch_s=17.4e-6, request_s=5.8e-3, uncertainty=0.4)


def _hosts(hopper: HostTimes) -> dict[str, HostTimes]:
    return {"ampere": hopper.slower(A100_BY_H100), "hopper": hopper}


# Large GPUs but A100: vLLM 0.8 to 0.14, engine/arg_utils.py (the API server's; offline 16,384 and 8,192 tokens).
_LARGE = Case({"max_running_requests": 1024, "max_batch_tokens": 8192}, memory_bytes=70 * GIB, but=("ampere",))
_VLLM_V1 = Defaults(max_batch_tokens=2048, prefix_cache="gpu", graphs_to=512)
# Prompts first; with more than 32,768 positions chunked prefill (engine/arg_utils.py of 0.5.4 to 0.7), by 512 tokens
# to 0.6.4; else as many as the model has positions, at least 2,048 (config.py, SchedulerConfig).
_VLLM_V0 = Defaults(chunked_prefill=False, graphs_to=256)
_LONG = Case({"chunked_prefill": True, "max_batch_tokens": 512}, positions=32769)
_SGLANG = Defaults(4096, 8192, 1, 0.88, "gpu", chunked_prefill=False, graphs_to=160)


def _sglang_fraction(memory_bytes: float, tp: int, d: Defaults) -> float:
    """What is left of a GPU's MiB less 1.5 a token of a chunk, 2 for each sequence of the largest graph, 128 for each
    rank, 512; of more than 60 GiB at least 10 are left out (SGLang 0.5, srt/server_args.py,
    _handle_gpu_memory_settings).

    >>> _sglang_fraction(80 * GIB, 1, Defaults(max_batch_tokens=8192, graphs_to=256))
    0.836
    """
    mib = memory_bytes / 2**20
    reserved = 512 + 1.5 * max(d.max_batch_tokens, 2048) + 2 * d.graphs_to + 128 * tp
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(0.001, round((mib - reserved) / mib, 3))  # less than nothing: SGLang does not start


def _sized(gib: int, tokens: int, graphs_to: int, tp: int = 1) -> Case:
    """Chunks and graphs from so much memory on."""
    return Case({"max_batch_tokens": tokens, "graphs_to": graphs_to}, memory_bytes=gib * GIB, tp=tp)


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
                iteration_s=0.206e-3,
                rank_s=0.628e-3,
                sequence_s=0.345e-3,
                prompt_s=14.1e-3,
                oversize_s=16.6e-6,
                launch_s=44.4e-6,
            ),
            "hopper": HostTimes(
                iteration_s=6.42e-3,
                rank_s=0.983e-3,
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
        " one sequence and 256, others 20 at 200 (issue 6801); launches as vllm-0.2, HTTP: trtllm_014_online"
        " below saturation; prompts"
        " first: core/scheduler.py; max_num_batched_tokens: the model's length (engine/arg_utils.py)",
        host=_hosts(_V5),
        whole_prompt_tokens=2048,
        own_all_reduces=CUSTOM,
        defaults=_VLLM_V0,
        cases=(_LONG,),
    ),
    Engine(
        "vllm-0.6",
        "vLLM",
        (0, 6),
        "2024-09",
        "host: a half of vllm-0.5's, whose time a token at 32 requests a second fell to a fifth on an 8B and to a half"
        " on a 70B (blog.vllm.ai, 5 September 2024: asynchronous output, several steps to a schedule); 5 to 6 ms at"
        " 256 (vllm-project/vllm issue 10634, November 2024); the rest as vllm-0.5",
        host=_hosts(_V6),
        whole_prompt_tokens=2048,
        own_all_reduces=CUSTOM,
        defaults=_VLLM_V0,
        cases=(_LONG,),
    ),
    Engine(
        "vllm-v1",
        "vLLM",
        (0, 8),
        "2025-03",
        "host: a 1B takes 2.7 ms a token alone, a millisecond of it the GPU's (vllm-project/vllm pull request 17866,"
        " May 2025); at 256 2 to 3 ms once the API server is a process of its own (issue 10634), as it is since 0.7,"
        " 5 to 6 before (pull request 11133); launches as vllm-0.2, HTTP: trtllm_014_online"
        " below saturation; limits: engine/arg_utils.py"
        " (_set_default_args_v1); piecewise graphs: config.py",
        host=_hosts(_V1),
        prompt_graphs=True,
        called="vLLM V1",
        own_all_reduces=CUSTOM,
        defaults=_VLLM_V1,
        cases=(_LARGE,),
    ),
    Engine(
        "vllm-0.14",
        "vLLM",
        (0, 14),
        "2026-01",
        "as vllm-v1, with asynchronous scheduling, on by default since (vllm-project/vllm pull requests 19970, 27614,"
        " 31998; config/scheduler.py)",
        host=_hosts(_V1),
        overlaps=True,
        prompt_graphs=True,
        own_all_reduces=CUSTOM_LESS,
        defaults=_VLLM_V1,
        cases=(_LARGE,),
    ),
    Engine(
        "sglang",
        "SGLang",
        (0, 4),
        "2024-12",
        "host: as vllm-v1's, beside the GPU (lmsys.org/blog/2024-12-04-sglang-v0-4: no idle time between decoding "
        "batches); launches as vllm-0.2, HTTP: trtllm_014_online "
        "below saturation; limits: srt/server_args.py; prompts first, in chunks: "
        "srt/managers/scheduler.py (enable_mixed_chunk is off); entry: SGLANG_INIT_NEW_TOKEN_RATIO 0.7 · "
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR 0.14, to which it falls in 600 steps",
        host=_hosts(_V1),
        overlaps=True,
        reserved_output=0.098,
        own_all_reduces=CUSTOM,
        defaults=_SGLANG,
        cases=(
            Case({"memory_fraction": 0.87}, tp=2),
            Case({"memory_fraction": 0.85}, tp=4),
            Case({"memory_fraction": 0.81}, tp=8),
            Case({"memory_fraction": 0.79}, tp=16),
        ),
    ),
    Engine(
        "sglang-0.5",
        "SGLang",
        (0, 5),
        "2025-08",
        "as sglang; chunks, graphs and memory by the GPU's memory (srt/server_args.py of 0.5)",
        host=_hosts(_V1),
        overlaps=True,
        reserved_output=0.098,
        fraction=_sglang_fraction,
        own_all_reduces=CUSTOM,
        defaults=_SGLANG._replace(max_batch_tokens=2048, graphs_to=8),
        cases=(
            _sized(20, 2048, 24),
            _sized(20, 2048, 80, tp=4),
            _sized(35, 4096, 32),
            _sized(35, 4096, 160, tp=4),
            _sized(60, 8192, 256),
            _sized(60, 8192, 512, tp=4),
            _sized(160, 16384, 512),
        ),
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
        reserved_output=1.0,
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
            "ampere": HostTimes(collective_s=68.3e-6),
            "hopper": HostTimes(
                iteration_s=0.359e-3, sequence_s=16.3e-6, prompt_s=5.82e-3, collective_s=20.4e-6, request_s=1.11e-3
            ),
        },
        reserved_output=1.0,
        fp8_cache=True,
        experts_speed=0.758,
        defaults=Defaults(max_running_requests=2048, block_tokens=64),
    ),
    Engine(
        "trtllm",
        "TensorRT-LLM",
        (0, 8),
        "2025-01",
        "fitted to trtllm_017_throughput; launches and policy as trtllm-0.6",
        host={
            "ampere": HostTimes(collective_s=68.3e-6),
            "hopper": HostTimes(sequence_s=2.37e-6, collective_s=20.4e-6, launch_s=19.5e-6),
        },
        reserved_output=1.0,
        fp8_cache=True,
        experts_speed=0.758,
        defaults=Defaults(max_running_requests=2048, block_tokens=64),
    ),
    Engine(
        "trtllm-1.0",
        "TensorRT-LLM",
        (1, 0),
        "2025-09",
        "the PyTorch backend, default since 1.0, with overlap scheduler and CUDA graphs (llmapi/llm_args.py: "
        "disable_overlap_scheduler false; CudaGraphConfig, to 128 single tokens); host and launches as vllm-v1's, HTTP "
        "as vllm-v1",
        host={"hopper": _V1},
        overlaps=True,
        reserved_output=1.0,
        fp8_cache=True,
        own_all_reduces=MIN_LATENCY,
        defaults=Defaults(max_running_requests=2048, block_tokens=32, prefix_cache="gpu", graphs_to=128),
    ),
)
ENGINES: dict[str, Engine] = {record.name: record for record in _RECORDS}


def engine_named(texts: tuple[str, ...]) -> Engine | None:
    """The record of a product and version as tables of measurements name them; None where no product is known.

    All words of its `product` stand in the texts, and those of no other with more words. Of its records the newest that
    is no newer than the first version (0.17) or else year (2023) in the texts, in their order; without either one that
    is `called` so (vLLM V1), or else the newest.

    >>> [e.name if e else None for e in map(engine_named, [("vLLM 2023",), ("SGLang",), ("vLLM V1",), ("TGI 1.4",)])]
    ['vllm-0.2', 'sglang-0.5', 'vllm-v1', None]
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
        if year == "9999":
            older = [e for e in records if e.called and set(e.called.lower().split()) <= words] or older
    return (older or records[:1])[-1]


def engine_table() -> str:
    """The records as a Markdown table: an engine a row; host seconds beside Hopper."""
    head = ["`engine`", "since", "prompts", "between iterations", "a launch", "graphs to", "decode", "HTTP"]
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
        most = sorted({e.defaults.graphs_to, *[case.changes.get("graphs_to", 0) for case in e.cases]} - {0})
        graphs = " or ".join([str(n) for n in most]) if len(most) < 3 else f"{most[0]} to {most[-1]}"
        before = f"{t.request_s * 1e3:.3g} ms" if t.request_s else ""
        prompts = "in chunks beside tokens" if e.defaults.chunked_prefill else "first, alone"
        rows.append([f"`{e.name}`", e.date, prompts, between, launch, graphs, e.decode_attention, before])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
