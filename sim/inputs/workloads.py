"""What a scenario's `inference`, `distillation` and `faults` sections may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from sim.dtypes import Precision, TransportDtype
from sim.inputs.input_source import Written, as_tuple
from sim.inputs.model_config import ModelConfig


class RequestPattern(Written):
    """`count` equal requests, all at once or as a Poisson process of `rate_per_s`."""

    prompt_len: int = Field(ge=1, le=100_000_000)
    output_len: int = Field(ge=1, le=100_000_000)
    count: int = Field(default=1, ge=1, le=10_000_000)
    rate_per_s: float | None = Field(default=None, gt=0, le=1e9)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


class RequestTrace(Written):
    """Requests from a CSV file with columns arrival_s, prompt_tokens, output_tokens, prefix_id."""

    trace: str = Field(min_length=1, max_length=4096)


def _requests_form(value: Any) -> str:
    traced = isinstance(value, RequestTrace) or (isinstance(value, dict) and "trace" in value)
    return "<trace>" if traced else "<pattern>"


class KvCache(Written):
    """Where keys and values of running requests live. `dtype` null: the inference precision."""

    layout: Literal["paged", "contiguous"] = "paged"
    block_tokens: int = Field(default=16, ge=1, le=1_000_000)
    dtype: TransportDtype | None = None
    memory_fraction: float = Field(default=0.9, gt=0, le=1)


class Inference(Written):
    """A serving workload."""

    batching: Literal["continuous", "static"] = "continuous"
    precision: Precision = "bf16"
    requests: Annotated[
        Annotated[RequestPattern, Tag("<pattern>")] | Annotated[RequestTrace, Tag("<trace>")],
        Discriminator(_requests_form),
    ]
    max_running_requests: int = Field(default=256, ge=1, le=10_000_000)
    max_batch_tokens: int = Field(default=8192, ge=1, le=1_000_000_000)
    preemption: Literal["recompute", "swap"] = Field(
        default="recompute", description="what becomes of a preempted sequence's cache: dropped, or kept in host memory"
    )
    kv_cache: KvCache = KvCache()
    prefix_cache: Literal["none", "gpu", "cpu"] = "none"
    quantization: Literal["none", "int8_weight_only", "llm_int8", "fp8", "int4_weight_only"] = "none"


class TeacherParallelism(Written):
    """How the teacher is split over the student's ranks."""

    tp: int = Field(default=1, ge=1, le=10_000_000)


class Distillation(Written):
    """A teacher beside the student that `training` describes.

    `placement`: on the student's GPUs, or on `teacher_parallelism.tp` GPUs of its own, one step ahead.
    `prompt_len` (mode sequence): tokens that the teacher is given; it writes the rest. Null: half of seq_len.
    """

    teacher: ModelConfig
    mode: Literal["logits", "sequence"] = "logits"
    teacher_parallelism: TeacherParallelism = TeacherParallelism()
    placement: Literal["same", "other"] = "same"
    prompt_len: int | None = Field(default=None, ge=1, le=100_000_000)


class Straggler(Written):
    """One rank whose computations take `compute_scale` times as long."""

    rank: int = Field(ge=0, le=10_000_000)
    compute_scale: float = Field(default=1.3, gt=0, le=1e6)


class LinkFault(Written):
    """The links between `node0` and `node1`, or (one name twice) within a node, slowed down; 0: cut."""

    between: Annotated[
        tuple[
            Annotated[str, Field(min_length=1, max_length=100)],
            Annotated[str, Field(min_length=1, max_length=100)],
        ],
        BeforeValidator(as_tuple),
    ]
    bandwidth_scale: float = Field(default=0.5, ge=0, le=1e6)


class JitterFault(Written):
    """Computations vary at random: factors drawn from a log-normal distribution of mean 1, for each rank and action, or
    from `factors`, which come from a measured run where that is named."""

    sigma: float = Field(default=0.05, ge=0, le=2)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    measured: str | None = Field(default=None, min_length=1, max_length=4096)
    factors: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e3)], ...], BeforeValidator(as_tuple), Field(max_length=100_000)
    ] = ()


class FailureKind(Written):
    """Failures of one sort, at a rate of their own. `restart_s` null: as all; `takes_node`: a spare takes its place."""

    name: str = Field(min_length=1, max_length=100)
    mtbf_s_per_gpu: float = Field(gt=0, le=1e15)
    restart_s: float | None = Field(default=None, ge=0, le=1e9)
    takes_node: bool = True


class Published(Written):
    """What was published of a job, shown beside what is simulated."""

    effective_training_time: float | None = Field(default=None, gt=0, le=1)
    failures: float | None = Field(default=None, ge=0, le=1e9)


class Failures(Written):
    """Random failures and checkpoints, in seconds. With `kinds` these have their own rates, and `mtbf_s_per_gpu` is not
    used; `spare_nodes` null: there is always one."""

    mtbf_s_per_gpu: float = Field(default=1.8e8, gt=0, le=1e15)
    checkpoint_interval_s: float = Field(default=1800.0, gt=0, le=1e9)
    checkpoint_s: float = Field(default=60.0, ge=0, le=1e9)
    restart_s: float = Field(default=600.0, ge=0, le=1e9)
    kinds: Annotated[tuple[FailureKind, ...], BeforeValidator(as_tuple), Field(max_length=1000)] = ()
    spare_nodes: int | None = Field(default=None, ge=0, le=10_000_000)
    repair_s: float = Field(default=86400.0, ge=0, le=1e9)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    published: Published | None = None


class Faults(Written):
    """What goes wrong during the workload."""

    stragglers: Annotated[tuple[Straggler, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    links: Annotated[tuple[LinkFault, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    jitter: JitterFault | None = None
    failures: Failures | None = None
