"""The `inference` section of a scenario: requests, the engine and its limits, the cache, pools of replicas."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sim.core.dtypes import Precision, TransportDtype
from sim.core.json_values import is_number
from sim.core.quantization import Quantization
from sim.inputs.input_source import OneOf, UserInput, as_tuple
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.serving_keys import (
    HASHED_TOKENS,
    Autoscaling,
    BatchWaiting,
    Eplb,
    ExpertGpus,
    PromptBalance,
    Sampling,
    ServedLora,
    Tiers,
    WeightOffload,
)
from sim.variants.engines import ENGINE_FILES, ENGINES
from sim.variants.engines.admission import CapacityPolicy, RouterName
from sim.variants.engines.defaults import Defaults, Drafts
from sim.variants.engines.record import DecodeAttention

MAX_TOKENS = 100_000_000
MAX_REQUESTS = 10_000_000


Concurrency = Annotated[
    int | None, Field(ge=1, le=MAX_REQUESTS, description="the most requests under way at once; null: any")
]


def _one_length(value: Any) -> Any:
    """A number of tokens; a distribution or a list, as `rl.prompt_len` and benchmarks take it, is told what to write.

    Raises:
        ValueError: for a mapping or a list.
    """
    if not isinstance(value, dict | list):
        return value
    mean = value.get("mean") if isinstance(value, dict) else None
    such = f", such as {mean:g}," if is_number(mean) else ""
    raise ValueError(
        f"must be one number of tokens{such} of which inference.requests.range_ratio makes uniform lengths (0.5: "
        "half as long to half as long again); for other lengths write requests: {trace: FILE.csv} with columns "
        "arrival_s, prompt_tokens, output_tokens"
    )


Length = Annotated[int, Field(ge=1, le=MAX_TOKENS), BeforeValidator(_one_length)]


class RequestPattern(UserInput):
    """`count` requests, all at once or `rate_per_s` with random gaps, equal or within `range_ratio` of the stated
    lengths. Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process."""

    prompt_len: Length
    output_len: Length
    range_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="lengths are uniform in length·(1 − range_ratio) to length·(1 + range_ratio)",
    )
    count: int = Field(default=1, ge=1, le=MAX_REQUESTS)
    rate_per_s: float | None = Field(default=None, ge=1e-6, le=1e9)
    burstiness: float = Field(
        default=1.0,
        ge=1e-3,
        le=1e9,
        description="below 1 requests come in bursts, above 1 more evenly; 1e9: equal gaps",
    )
    exact_rate: bool = Field(
        default=False, description="gaps are scaled so that the last request comes at count ÷ rate_per_s"
    )
    max_concurrency: Concurrency = None
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the shortest and the longest of lengths around `length`, in tokens."""
        return max(1, math.floor(length * (1 - self.range_ratio))), math.ceil(length * (1 + self.range_ratio))


HASHED_SUFFIX = ".jsonl"


class RequestTrace(UserInput):
    """Requests from a CSV file with columns arrival_s, prompt_tokens, output_tokens, prefix_id, or from Mooncake's
    lines of JSON (.jsonl) with hashes of the prompts' blocks."""

    trace: str = Field(min_length=1, max_length=4096)
    max_concurrency: Concurrency = None

    @property
    def hashed(self) -> bool:
        """Tell whether each prompt comes with hashes of its blocks, as the file's name says."""
        return self.trace.endswith(HASHED_SUFFIX)


def _requests_form(value: Any) -> str:
    traced = isinstance(value, RequestTrace) or (isinstance(value, dict) and "trace" in value)
    return "<trace>" if traced else "<pattern>"


class KvCache(UserInput):
    """Where keys and values of running requests live. `dtype` null: 16 bits, or what the engine keeps beside fp8
    weights."""

    layout: Literal["paged", "contiguous"] = "paged"
    block_tokens: int = Field(default=16, ge=1, le=1_000_000)
    dtype: TransportDtype | None = None
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    free_fraction: float = Field(
        default=1.0, gt=0, le=1, description="the cache's part of what weights and activations leave"
    )
    memory_bytes: float | None = Field(
        default=None,
        gt=0,
        le=1e15,
        description="bytes of the cache on each GPU, in place of both fractions; null: these",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="the most tokens of a replica's cache; null: all that there is room for",
    )
    tiers: Tiers | None = Field(default=None, description="where prefixes go that the GPU's cache evicts")


class Speculative(UserInput):
    """A draft model on the same GPUs proposes `tokens` tokens, each of which is accepted with probability
    `acceptance`, drawn from `seed`."""

    draft: ModelConfig | None = Field(default=None, description="null: the model's own prediction layer (mtp_layers)")
    hidden_states: int = Field(
        default=0, ge=0, le=16, description="layers of the model whose states the draft reads: EAGLE 1, EAGLE-3 3"
    )
    tokens: int = Field(default=4, ge=1, le=1000)
    branches: int = Field(
        default=1,
        ge=1,
        le=64,
        description="tokens drafted in each step of a tree of `tokens` steps (SGLang); 1: a chain",
    )
    tree_tokens: int | None = Field(
        default=None, ge=1, le=1000, description="a tree's drafted tokens that are checked; null: tokens"
    )
    lookup: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="no model drafts: `tokens` that followed the same ones earlier in the text (n-grams, prompt "
        "lookup), which are found with this probability",
    )
    acceptance: float = Field(default=0.7, ge=0, le=1)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @property
    def checked(self) -> int:
        """Drafted tokens of a sequence that the model checks in an iteration."""
        return self.tokens if self.tree_tokens is None else self.tree_tokens


class PoolSize(UserInput):
    """Equal replicas of the model, each on `tp` GPUs; `ep`·`expert_tp` GPUs of the pool share the experts."""

    replicas: int = Field(default=1, ge=1, le=100_000)
    tp: int = Field(default=1, ge=1, le=100_000)
    ep: int = Field(default=1, ge=1, le=100_000, description="GPUs that have experts of their own")
    expert_tp: int | None = Field(
        default=None, ge=1, le=100_000, description="GPUs that split every expert; null: with ep 1 those of tp, else 1"
    )
    memory_fraction: float | None = Field(default=None, gt=0, le=1, description="null: kv_cache's, or the engine's")

    @property
    def ranks(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.tp

    @property
    def sharing_replicas(self) -> int:
        """Replicas that share one set of experts; 1 where each has all experts (as `Parallelism.sharing_replicas`)."""
        return max(1, self.ep * (self.expert_tp or 1) // self.tp)

    def degrees(self, model: ModelConfig) -> dict[str, Any]:
        """The pool's layout by the keys of `parallelism`. Engines split experts over tp unless told otherwise."""
        expert_tp = self.expert_tp or (self.tp if model.moe is not None and self.ep == 1 else 1)
        return {"tp": self.tp, "dp": self.replicas, "ep": self.ep, "expert_tp": expert_tp}


class Disaggregated(UserInput):
    """Prompts are computed by replicas of their own, which send keys and values to those that add tokens."""

    prefill: PoolSize = PoolSize.model_construct()
    decode: PoolSize = PoolSize.model_construct()

    @property
    def ranks(self) -> int:
        """GPUs of both pools."""
        return self.prefill.ranks + self.decode.ranks


def _record_of(name: str) -> str:
    """The record of the version that a text names, such as vllm-0.10: the newest that is no newer."""
    from sim.variants.engines.names import engine_named

    found = engine_named((name,))
    return "" if found is None else found.name


def _without_record(name: str) -> str:
    """What the message says of an engine that exists and has no record."""
    from sim.variants.engines.names import OWN_ENGINE, product_without_record

    found = product_without_record(name)
    return f"; {found} has no record here: {OWN_ENGINE}" if found else ""


GraphSize = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
EngineName = Annotated[str, OneOf(ENGINES, ENGINE_FILES, _record_of, _without_record)]


class Inference(UserInput):
    """A serving workload. Limits and the cache that are left out are those of `engine` (`sim.variants.engines`)."""

    engine: EngineName = "bundled"
    batching: Literal["continuous", "static"] = "continuous"
    precision: Precision = "bf16"
    requests: Annotated[
        Annotated[RequestPattern, Tag("<pattern>")] | Annotated[RequestTrace, Tag("<trace>")],
        Discriminator(_requests_form),
    ]
    max_running_requests: int = Field(default=256, ge=1, le=10_000_000)
    max_batch_tokens: int = Field(default=8192, ge=1, le=1_000_000_000)
    max_request_tokens: int | None = Field(
        default=None,
        ge=2,
        le=2 * MAX_TOKENS,
        description="the most tokens of a request, prompt and answer; longer ones are refused; null: engines take the "
        "model's positions, and longer requests are served all the same",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="the most tokens of one prompt in an iteration (vLLM's --long-prefill-token-threshold); null: any",
    )
    attention: Literal["fused", "unfused"] = "fused"
    decode_attention: DecodeAttention | None = Field(
        default=None, description="single tokens' kernel reads a KV head once, or for each query head; null: engine's"
    )
    preemption: Literal["recompute", "swap"] = Field(
        default="recompute", description="what becomes of a preempted sequence's cache: dropped, or kept in host memory"
    )
    capacity_policy: CapacityPolicy | None = Field(
        default=None, description="TensorRT-LLM: which requests enter (capacity_scheduler_policy); null: the engine's"
    )
    schedule_conservativeness: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="SGLang: the share of running requests' output that is kept free is as many times its own; null: 1",
    )
    batch_wait: BatchWaiting | None = Field(
        default=None, description="TensorRT-LLM: prompts wait until more of them are there (batch_wait_…); null: none"
    )
    balanced_prompts: PromptBalance | None = Field(
        default=None, description="TensorRT-LLM: prompts of all replicas that share experts at once; null: none waits"
    )
    kv_cache: KvCache = KvCache.model_construct()
    prefix_cache: Literal["none", "gpu", "cpu"] = "none"
    chunked_prefill: bool = Field(
        default=True, description="prompts in chunks, beside tokens of running requests; false: as the engine without"
    )
    cuda_graphs: bool = Field(default=True, description="false: the engine launches all kernels one by one")
    cuda_graph_max_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS,
        description="the largest batch with a CUDA graph, in tokens (vLLM) or sequences (others); null: engine's",
    )
    cuda_graph_sizes: Annotated[tuple[GraphSize, ...], Field(min_length=1), BeforeValidator(as_tuple)] | None = Field(
        default=None, description="all batches with a CUDA graph, in the same numbers; null: engine's"
    )
    async_scheduling: bool | None = Field(
        default=None, description="the host prepares an iteration while the GPU computes the one before; null: engine's"
    )
    quantization: Quantization = "none"
    all2all_backend: Literal["all_to_all", "deepep", "allgather_reducescatter", "naive"] | None = Field(
        default=None, description="how tokens get to experts on other replicas, and back; null: the engine's default"
    )
    dense_over_replicas: bool | None = Field(
        default=None,
        description="the ranks of all replicas that share experts split dense MLPs, too; null: as the engine does",
    )
    head_over_replicas: bool | None = Field(
        default=None, description="likewise the output matrix; null: as the engine does"
    )
    stream_interval: int = Field(
        default=1, ge=1, le=1_000_000, description="tokens of an answer in a streamed piece, but its first and last"
    )
    two_batch_overlap: bool = Field(
        default=False, description="a half of the batch computes while experts' messages of the other half travel"
    )
    eplb: Eplb | None = Field(
        default=None, description="experts placed by popularity, with copies; null: in order, one of each"
    )
    router: RouterName | None = Field(
        default=None,
        description="which of the dp replicas, or of a pool's, gets a request; null: as the engine does",
    )
    autoscaling: Autoscaling | None = Field(
        default=None, description="how many of the dp replicas, or of each pool's, are on"
    )
    sampling: Sampling | None = Field(default=None, description="how tokens are chosen; null: the largest logit's")
    lora: ServedLora | None = Field(default=None, description="adapters of which each request uses one")
    weight_offload: WeightOffload | None = Field(default=None, description="weights in host memory, copied as needed")
    speculative: Speculative | None = Field(default=None, description="a draft, whose tokens are checked")
    afd: ExpertGpus | None = Field(default=None, description="attention and experts on GPUs of their own")
    disaggregated: Disaggregated | None = Field(
        default=None, description="pools of replicas for prompts and for the tokens after them, in place of parallelism"
    )

    def ranks(self, parallelism: Parallelism) -> int:
        """GPUs of all replicas, of both pools, and of experts that have their own."""
        if self.disaggregated is not None:
            return self.disaggregated.ranks
        return parallelism.ranks + (0 if self.afd is None else self.afd.expert_gpus)

    def longest(self, model: ModelConfig) -> int:
        """Tokens of the longest request that the engine is made ready for; 0 where nobody says."""
        return self.max_request_tokens or model.longest

    def layouts(self, parallelism: Parallelism) -> tuple[Parallelism | PoolSize, ...]:
        """Return the layouts of its replicas: those of both pools, else `parallelism`."""
        pools = self.disaggregated
        return (parallelism,) if pools is None else (pools.prefill, pools.decode)

    @property
    def graphs_to(self) -> int | None:
        """The largest batch with a CUDA graph that is asked for; None where nobody does."""
        return self.cuda_graph_max_size if self.cuda_graph_sizes is None else max(self.cuda_graph_sizes)

    @property
    def drafts(self) -> Drafts:
        """Who drafts tokens; engines treat one that reads the model's hidden states as the model's own layer."""
        if self.speculative is None:
            return "none"
        if self.speculative.lookup is not None:
            return "text"
        return "layer" if self.speculative.draft is None or self.speculative.hidden_states else "model"

    @property
    def of_trees(self) -> bool:
        """Tell whether trees are drafted."""
        return self.speculative is not None and self.speculative.branches > 1

    @property
    def fills_hashes(self) -> bool:
        """Tell whether whole blocks of the cache hold what each hash of the trace stands for; so without hashes,
        too."""
        hashed = isinstance(self.requests, RequestTrace) and self.requests.hashed
        return not hashed or HASHED_TOKENS % self.kv_cache.block_tokens == 0

    def with_defaults(self, d: Defaults, prefixes: bool, cache_dtype: str) -> Inference:
        """The section with what an engine sets by itself where a key was left out; `prefixes`: the cache can keep
        them; `cache_dtype`: what it is kept in."""
        keys = ["max_running_requests", "max_batch_tokens", "chunked_prefill", *["prefix_cache"] * prefixes]
        own = {key: getattr(d, key) for key in keys}
        kept = {"block_tokens": d.block_tokens, "memory_fraction": d.memory_fraction, "free_fraction": d.free_fraction}
        given = self.kv_cache.model_fields_set
        if {"memory_fraction", "memory_bytes"} & given:  # it says all of what the cache gets
            del kept["free_fraction"]
        if "memory_bytes" in given:
            del kept["memory_fraction"]
        missing: dict[str, object] = {k: v for k, v in kept.items() if k not in given}
        if self.kv_cache.dtype is None:
            missing["dtype"] = cache_dtype
        changes = {key: value for key, value in own.items() if key not in self.model_fields_set}
        return self.model_copy(update=changes | {"kv_cache": self.kv_cache.model_copy(update=missing)})
