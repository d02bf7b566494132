"""Facts of a serving engine's kernels that have several numbers: fields of `sim.variants.engines.record.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

LARGEST_BYTES = 160 * 2.0**30  # of memory: engines' own limit for the largest GPUs
ULTRA_BYTES = 240 * 2.0**30  # of memory: GPUs of compute capability 10.3 have 270 GiB, of 10.0 at most 180


def is_datacenter_blackwell(architecture: str, memory_bytes: float) -> bool:
    """Whether a GPU is of compute capability 10.x; memory tells it from 12.x.

    >>> is_datacenter_blackwell("blackwell", 180 * 2**30), is_datacenter_blackwell("blackwell", 96 * 2**30)
    (True, False)
    """
    return architecture == "blackwell" and memory_bytes >= LARGEST_BYTES


def is_blackwell_ultra(architecture: str, memory_bytes: float) -> bool:
    """Whether a GPU is of compute capability 10.3; memory tells it from 10.0."""
    return architecture == "blackwell" and memory_bytes >= ULTRA_BYTES


class TwoBatches(NamedTuple):
    """Two-batch overlap, and the fewest tokens of an iteration that has it: of single tokens (`decode_tokens`), and
    with prompts among them (`prompt_tokens`).
    `attention_apart`: single tokens' attention is cut into two parts (`sim.serve.prices.two_batches`)."""

    decode_tokens: int = 2
    prompt_tokens: int = 2
    attention_apart: bool = False


class SummedNorms(NamedTuple):
    """All-reduces that also add and norm, as one kernel over NVLink: the most bytes by the number of ranks, on Hopper
    and on compute capability 10.x, and the most tokens (0: any); `ultra`: on 10.3, None: as on 10.0; `alone`: only of a
    server of one replica without pipeline stages; `codes`: only of models with this code (`model.code`; empty: of all);
    `experts`: those of experts norm, too; `states`: also of models with layers that keep a state, whose norms add 1 to
    their weights (Qwen3-Next); `selected`: also of models whose attention selects keys (DeepSeek V3.2); `but`: not on
    these GPUs; `compiled`: torch.compile puts them there, so that there are none without it; `llama_above`: also of
    models of Llama's code that are wider, whose sums write the few bits of `llama_writes`, then to `llama_below` bytes.
    """

    hopper: Mapping[int, float]
    blackwell: Mapping[int, float]
    tokens: int = 0
    alone: bool = False
    codes: tuple[str, ...] = ()
    experts: bool = False
    states: bool = False
    selected: bool = True
    but: tuple[str, ...] = ()
    compiled: bool = False
    llama_above: int | None = None
    llama_writes: tuple[str, ...] = ()
    llama_below: Mapping[int, float] | None = None
    ultra: Mapping[int, float] | None = None

    def most_bytes(self, architecture: str, memory_bytes: float, ranks: int, token_bytes: float) -> float:
        """Bytes of the largest one on such GPUs, or 0; memory tells 10.3, 10.0 and 12.x apart, as in `Case`s."""
        if architecture == "hopper":
            most = self.hopper.get(ranks, 0.0)
        else:
            newest = self.ultra if is_blackwell_ultra(architecture, memory_bytes) else None
            own = self.blackwell if newest is None else newest
            most = own.get(ranks, 0.0) if is_datacenter_blackwell(architecture, memory_bytes) else 0.0
        return min(most, self.tokens * token_bytes) if self.tokens else most


class SharedExperts(NamedTuple):
    """Shared experts beside routed ones.

    `tokens`: up to so many of an iteration, a second stream computes shared experts beside the routed ones.
    `graphed`: only in CUDA graphs. `sent`: also where tokens travel to experts, but not in two batches.
    `fused`: of models with DeepSeek V3's code, one shared expert and so many routed ones, which `ep` does not split,
    the shared one is one more routed expert, so that no kernel adds its result; not on compute capability 10.x.
    """

    tokens: int = 0
    graphed: bool = False
    sent: bool = False
    fused: tuple[int, ...] = ()


class RopeKernels(NamedTuple):
    """Kernels between the projection to queries, keys and values and their attention, in layers with rope.

    `rope`: of rope; `normed`: of rope and norms of heads together; `writes`: the norms' kernels write their results,
    else only sums; `eager`: where torch.compile makes no kernels, None: the same. What writes the cache is part of
    attention's points, as rope is where `rope` is 0: AIConfigurator times TensorRT-LLM's attention with both
    (collector/trtllm/collect_attn.py: `attn.forward` of queries, keys and values in one tensor).
    """

    rope: int = 1
    normed: int = 1
    writes: bool = False
    eager: RopeKernels | None = None


class LatentBlocks(NamedTuple):
    """Tokens of a block of latent attention's cache, by the GPU's kernel; 0: as of other attention. `narrow`: with a
    cache of 8 bits on Hopper; `blackwell`: on compute capability 10.x; `selected`: attention over selected keys."""

    hopper: int = 0
    narrow: int = 0
    blackwell: int = 0
    selected: int = 0

    def on(self, architecture: str, memory_bytes: float, narrow: bool, selected: bool) -> int:
        """Tokens of a block, or 0, on such GPUs, with such a cache; memory tells 10.x from 12.x, as in `Case`s."""
        if architecture == "hopper":
            own = self.narrow if narrow else self.hopper
        else:
            own = self.blackwell if is_datacenter_blackwell(architecture, memory_bytes) else 0
        return self.selected or own if selected else own


class LatentKernels(NamedTuple):
    """Kernels of latent attention.

    `merged_down`: one matmul gives both latents.
    `joins_queries`: GPU architectures on which decode's kernel takes a query's two parts as one tensor.
    `merges_context`: attention to what is cached before a chunk has a kernel of its own.
    `absorbed_graphs`: a prompt's iterations in CUDA graphs, which leave attention out, attend in the latent's width, as
    decode does.
    `absorbed_context`: by GPU architecture, the number of cached tokens below which a chunk behind at least one of them
    attends in the latent's width, too.
    `joins_latents`: a kernel joins each token's latent and rope key before they are cached.
    `narrow_absorbed`: GPU architectures on which a checkpoint's blocks in fp8 stay in fp8 where decode absorbs the
    up-projections. `widened_absorbed`: those on which they stay so in memory, and two kernels make 16 bits of them
    before each product.
    `merged_index`: one matmul in 16 bits gives an indexer's key and its heads' weights.
    `cache_apart`: a kernel ropes, and another writes the cache.

    Over selected keys `absorbed_graphs` and `absorbed_context` do not hold.
    """

    merged_down: bool = True
    joins_queries: tuple[str, ...] = ()
    merges_context: bool = False
    absorbed_graphs: bool = False
    absorbed_context: Mapping[str, float] = {}
    joins_latents: bool = False
    narrow_absorbed: tuple[str, ...] = ()
    widened_absorbed: tuple[str, ...] = ()
    merged_index: bool = False
    cache_apart: bool = False


class PromptGraphs(NamedTuple):
    """Iterations with prompts that have CUDA graphs of all but attention, of sizes of their own.

    `sizes`: their tokens, of max_batch_tokens and whether attention is latent. The others say beside which options and
    of which models there are any: `drafts`; `adapters`; pipeline `stages`; `replicas` that share experts and gather
    tokens; servers of `pools` for prompts or for tokens; `offload` of weights or prefixes to host memory, and experts
    placed by popularity; `latent` attention, also (`latent_blackwell`) of DeepSeek V3's code on compute capability
    10.x; latent attention over `selected` keys; Qwen3-Next's `states`; Qwen3's experts on 10.x (`experts_blackwell`).
    """

    sizes: Callable[[int, bool], tuple[int, ...]]
    drafts: bool = False
    adapters: bool = False
    stages: bool = False
    replicas: bool = False
    pools: bool = False
    offload: bool = False
    latent: bool = True
    latent_blackwell: bool = False
    selected: bool = False
    states: bool = False
    experts_blackwell: bool = False
