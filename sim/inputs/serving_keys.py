"""Keys of `inference` with keys of their own: the cache's tiers, autoscaling, adapters, sampling, offloaded weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sim.inputs.input_source import UserInput
from sim.inputs.training_config import ALL_TARGETS, LoraTargets

HASHED_TOKENS = 512  # tokens that a hash of a trace's request stands for, as in Mooncake's traces
NVME_BYTES_PER_S = 7e9  # a direction: what PCIe 4.0 x4 carries, and data-centre SSDs read (7 GB/s; writing is slower)
NVME_LATENCY_S = 100e-6  # of a read; their data sheets say 80 to 100 microseconds


class HostTier(UserInput):
    """Host memory for evicted prefixes. Bytes are for each GPU; what is left out, its link to the host has."""

    capacity_bytes: float = Field(default=0.0, ge=0, le=1e18)
    bandwidth_bytes_per_s: float | None = Field(
        default=None, gt=0, le=1e18, description="a direction; null: the GPU's link to the host"
    )
    latency_s: float | None = Field(default=None, ge=0, le=1e6, description="of each copy; null: a kernel's launch")


class DiskTier(UserInput):
    """A disk below host memory. Bytes are for each GPU."""

    capacity_bytes: float = Field(ge=0, le=1e18)
    bandwidth_bytes_per_s: float = Field(default=NVME_BYTES_PER_S, gt=0, le=1e18, description="a direction")
    latency_s: float = Field(default=NVME_LATENCY_S, ge=0, le=1e6, description="of each copy")


class Tiers(UserInput):
    """Tiers below the GPU's cache of prefixes. `write_policy`: a prefix is copied to the next tier when it is evicted
    (write_back), or to host memory as soon as it is computed (write_through)."""

    host: HostTier = HostTier.model_construct()
    disk: DiskTier | None = None
    write_policy: Literal["write_back", "write_through"] = "write_back"


class Autoscaling(UserInput):
    """Replicas that start and stop, at most `parallelism.dp` or a pool's `replicas` of them; names and most defaults
    are Ray Serve's."""

    min_replicas: int = Field(default=1, ge=1, le=10_000_000)
    metric: Literal["ongoing", "waiting"] = Field(
        default="ongoing", description="requests that are counted: those that wait or run, or that wait"
    )
    target: float = Field(default=2.0, gt=0, le=1e9, description="of them for each replica")
    interval_s: float = Field(default=10.0, ge=1e-3, le=1e9, description="between two looks")
    upscale_delay_s: float = Field(default=30.0, ge=0, le=1e9)
    downscale_delay_s: float = Field(default=600.0, ge=0, le=1e9)
    startup_s: float = Field(default=60.0, ge=0, le=1e9, description="from a start to the first request")


class Eplb(UserInput):
    """Experts are placed on ranks by their popularity, and the most popular ones copied."""

    redundant_experts: int = Field(
        default=0, ge=0, le=1_000_000, description="copies on all ranks together, beyond one of each expert"
    )


class BatchWaiting(UserInput):
    """Prompts wait beside sequences that add tokens, until an iteration has `tokens_ratio` of `max_batch_tokens`, or
    for `iterations`."""

    iterations: int = Field(default=0, ge=0, le=1_000_000)
    tokens_ratio: float = Field(default=0.0, ge=0, le=1)


class PromptBalance(UserInput):
    """Replicas that share experts let their prompts wait until each of them has one, at most `timeout_iterations`, and
    then, while all add tokens, `wait_iterations` more."""

    timeout_iterations: int = Field(default=50, ge=0, le=1_000_000)
    wait_iterations: int = Field(default=10, ge=0, le=1_000_000)


class ExpertGpus(UserInput):
    """Routed experts on GPUs of their own; those of `parallelism` compute everything else. An iteration is cut into
    `micro_batches`, of which some compute attention and others experts, while messages travel."""

    expert_gpus: int = Field(ge=2, le=1_000_000, description="each has an equal part of every layer's experts")
    micro_batches: int = Field(default=3, ge=1, le=1000)


class ServedLora(UserInput):
    """Adapters on one base model, all of one rank. Requests whose trace names no adapter draw one from `seed`, with
    popularity 1 / k^zipf."""

    adapters: int = Field(default=1, ge=1, le=1_000_000, description="or as many as the trace names, where more")
    rank: int = Field(default=16, ge=1, le=100_000)
    targets: LoraTargets = ALL_TARGETS
    max_loras: int | None = Field(default=None, ge=1, le=1_000_000, description="on a GPU at once; null: all")
    zipf: float = Field(default=0.0, ge=0, le=100)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @property
    def places(self) -> int:
        """Adapters on a GPU at once."""
        return self.adapters if self.max_loras is None else min(self.max_loras, self.adapters)


class Sampling(UserInput):
    """How a token is chosen out of the logits; names are those of engines' requests. Presence and frequency penalties
    take what `repetition_penalty` takes."""

    temperature: float = Field(default=1.0, ge=0, le=1e6, description="0: the largest logit")
    top_k: int | None = Field(default=None, ge=1, le=1_000_000_000, description="null: all tokens")
    top_p: float = Field(default=1.0, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=1e6)
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="each token comes with its log probability and that many others"
    )
    structured_outputs: bool = Field(default=False, description="answers follow a grammar, such as a JSON schema's")


class WeightOffload(UserInput):
    """`cpu_bytes` of each GPU's weights lie in host memory, at most those of its layers. `prefetch`: they come while
    others compute, or as they are used."""

    cpu_bytes: float = Field(ge=0, le=1e18)
    prefetch: bool = True
