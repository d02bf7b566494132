"""What the record of a serving engine says: `Engine`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from sim.core.quantization import Quantizing
from sim.core.sampler import Sampler
from sim.variants.engines.admission import Admission, CapacityPolicy, Routers
from sim.variants.engines.defaults import Case, Defaults, Drafts, Server
from sim.variants.engines.drafting import DraftGraphs, TextDrafts
from sim.variants.engines.graph_sizes import AskedGraphs, vllm_05_sizes
from sim.variants.engines.handing_over import HandingOver
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.kernel_facts import (
    LatentBlocks,
    LatentKernels,
    PromptGraphs,
    RopeKernels,
    SharedExperts,
    SummedNorms,
    TwoBatches,
)
from sim.variants.engines.outside_memory import OutsideMemory
from sim.variants.engines.own_all_reduce import OwnAllReduce

DecodeAttention = Literal["grouped", "per_head"]
PaddedExperts = Literal["own", "alike", "none"]
PadsReplicas = Literal["never", "always", "graphed"]
RoomFor = Literal["requests", "tokens", "limits"]
Masks = Literal["before", "beside"]
NOTHING_LEFT = 0.001  # a share of memory with which no engine starts
THREADED_FROM = 128  # sequences; vLLM, v1/structured_output/__init__.py: fill_bitmask_parallel_threshold

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
    overlaps: bool = fact(
        False,
        "the host puts an iteration together and prepares it while the GPU computes the one before, so that who has "
        "come or ended meanwhile counts one iteration later",
    )
    may_overlap: bool = fact(False, "told to, it does so although it does not by itself")
    token_more: bool = fact(
        False,
        "the host learns one iteration late who has ended, and that iteration computes one token too many for them; "
        "without `overlaps` only with CUDA graphs and without pipeline stages; not with drafted tokens",
    )
    overlaps_stages: bool = fact(True, "where it overlaps, also with pipeline stages")
    overlaps_drafting: tuple[bool, bool] = fact(
        (True, True), "where it overlaps, also with tokens drafted by the model's own layer, by a model of their own"
    )
    overlaps_states: bool = fact(
        True, "where it overlaps, also with layers that keep a state, unless somebody switches prefix_cache off"
    )
    may_overlap_drafting: bool = fact(False, "with async_scheduling true it overlaps with a draft model, too")
    shares_stages: bool = fact(True, "of pipeline stages, each iteration has at most its part of max_running_requests")
    runs_by_stage: bool = fact(False, "max_running_requests are of an iteration, and as many run for each stage")
    stages_drafting: bool = fact(True, "drafts beside pipeline stages; the draft is on the last stage's GPUs")
    adapters_drafting: bool = fact(True, "LoRA adapters beside drafted tokens; the draft has none")
    looks_ahead: bool = fact(False, "who runs has blocks for as many tokens more as a draft writes before the check")
    drafts_on_prompts: bool = fact(False, "who computes a prompt drafts all tokens in that iteration, too")
    text: TextDrafts | None = fact(TextDrafts(), "how drafts come from the text; None: not read")  # noqa: RUF009
    trees: bool = fact(False, "drafts trees")
    overlaps_trees: bool = fact(False, "where it overlaps, also with trees")
    slots_of_all: bool = fact(False, "of max_batch_tokens a draft model keeps one for each of max_running_requests")
    handing_over: HandingOver = fact(HandingOver(), "how pools hand computed prompts over")  # noqa: RUF009  a tuple
    graph_sizes: Callable[[int, int], tuple[int, ...]] = fact(  # noqa: RUF009
        vllm_05_sizes, "batches with a CUDA graph, of graphs_to and max_running_requests"
    )
    drafting_tokens: Callable[[int, int, int], tuple[int, ...]] | None = fact(  # noqa: RUF009
        None,
        "with drafted tokens, the tokens of batches with a graph, by graphs_to, max_running_requests and the tokens of "
        "each sequence; None: as without drafts",
    )
    draft_graphs: tuple[DraftGraphs, DraftGraphs] = fact((DraftGraphs(), DraftGraphs()), "of its own layer, of a model")
    asked_graphs: AskedGraphs | None = fact(  # noqa: RUF009  a tuple
        None, "what it makes of batches with a graph that somebody asks for; None: nobody can"
    )
    prompt_graphs: bool = fact(False, "graphs of all but attention serve iterations with prompts as well, to that size")
    own_prompt_graphs: PromptGraphs | None = fact(  # noqa: RUF009  a tuple
        None, "without `prompt_graphs`, iterations with prompts that have graphs of all but attention; None: none"
    )
    whole_graphs: bool = fact(
        True, "an iteration of single tokens is one graph; else its graphs have all but attention, too"
    )
    whole_to_running: bool = fact(
        False,
        "whole graphs have at most the tokens of max_running_requests; a batch that is padded to more has graphs of "
        "all but attention",
    )
    padded_experts: tuple[PaddedExperts, PaddedExperts] = fact(
        ("own", "own"),
        "experts that tokens which pad a batch to a graph's size choose, where ranks hold all experts and where these "
        "are split (ep): each its own, all the same ones, or none",
    )
    padded_grouped: PaddedExperts | None = fact(  # noqa: RUF009  a Literal
        None, "experts that they choose where a token's group is chosen first; None: the same"
    )
    pads_replicas: PadsReplicas = fact(  # noqa: RUF009  a Literal
        "never",
        "replicas that share experts are padded to as many tokens as the one with most has: always, where it keeps "
        "graphs; or only while the iterations of all of them have one",
    )
    decode_attention: DecodeAttention = fact(  # noqa: RUF009  a Literal
        "grouped", "single tokens' attention reads a KV head once, or once for each of its query heads"
    )
    group_reads: float = fact(
        1.0, "of a KV head's reads for its further query heads, the part that comes from memory, not from the L2 cache"
    )
    any_group: bool = fact(
        True, "grouped decode reads a KV head once for any number of query heads; else for up to 32, as was measured"
    )
    tiled_heads: tuple[str, ...] = fact(
        (),
        "GPU architectures (of Blackwell compute capability 12.x; datacenter_blackwell: 10.x) on which single tokens "
        "beside prompts, and drafted ones, attend in a tile for each query head (`sim.serve.prices.tiled_attention`)",
    )
    room_for: RoomFor = fact(  # noqa: RUF009  a Literal
        "requests",
        "the iteration whose tensors have room beside the cache: the largest that the requests need, one of as many "
        "tokens as the limits allow, or also of as many sequences, which draw a token each",
    )
    sampler: Sampler = fact(Sampler(), "how tokens are chosen out of logits")  # noqa: RUF009  a tuple
    sent_together: int = fact(128, "how many outputs the server handles before it sends the pieces made of them")
    joins_pieces: bool = fact(True, "a server that is behind sends tokens of several iterations in one piece")
    masks: Masks | None = fact(  # noqa: RUF009  a string
        None,
        "tokens that a grammar forbids are masked, and marked by the host before the GPU computes the iteration, or "
        "while it does, before it samples; None: this was not read",
    )
    mask_threads: int = fact(1, f"which mark them where more than {THREADED_FROM} sequences have grammars")
    reserved_output: float = fact(
        0.0,
        "a request enters once the cache has room for all that it will write, and this share of what those that run "
        "will: none is preempted at 1; 0: room for its prompt is enough",
    )
    reserved_at_first: float | None = fact(
        None, "the share with which it begins and from which it falls; None: the same"
    )
    prompts_lead: bool = fact(
        False,
        "an iteration begins with prompts, also where tokens are computed beside them; who enters and who is put out "
        "follows the rules of `sim.serve.scheduling.sglang_scheduler`",
    )
    retract_room_tokens: int = fact(
        1, "by these rules, sequences are put out until so many tokens are free for each that runs on"
    )
    merges_prefixes: bool = fact(
        False,
        "a prefix that several compute at once is kept once, and gives way as far as nobody reads it, not in part",
    )
    whole_prompts: bool = fact(False, "without chunked_prefill a prompt is computed in one iteration, or waits")
    whole_prompts_fit: bool = fact(
        False, "a request enters once the cache has room for all chunks of its prompt, not only for the first"
    )
    watermark: float | None = fact(
        None,
        "a request enters with the blocks of its whole prompt if this share of all blocks stays free, with chunks also "
        "while others are preempted; a sequence goes on only while a block is free, needed or not; None: none of this",
    )
    admission: Admission = fact(Admission(), "what a request needs, and takes, when it enters")  # noqa: RUF009  a tuple
    routers: Routers = fact(Routers(), "which of its replicas a request goes to")  # noqa: RUF009  a tuple
    paddings: int | None = fact(
        None, "prompts computed first and alone are padded to the longest of them, with at most so many tokens"
    )
    prompt_limit: Literal["none", "all", "others"] = fact(
        "none", "max_prompt_tokens may limit what an iteration computes of a prompt; others: only beside other requests"
    )
    swaps: bool = fact(True, "told to, copies a preempted sequence's cache to host memory and back")
    copies_blocks: bool = fact(
        False,
        "the cache goes to host memory and back block by block, keys and values of each layer in a copy of their own; "
        "else in one copy",
    )
    shares_at_once: bool = fact(
        False, "a prefix in the GPU's cache is found from when it is put into an iteration, not from that one's end"
    )
    defers_shared: bool = fact(
        False,
        "a request waits while another computes the block of a shared beginning that it would compute first; others "
        "pass it",
    )
    drops_last_hit: bool = fact(
        False,
        "beside tokens drafted by the model's own layer, the last block that a prompt finds in the GPU's cache is "
        "computed again",
    )
    hashes_ahead: bool = fact(
        False, "instead, without pools and tiers below the cache, a block is found if the token behind it is shared"
    )
    sparse_windows: bool = fact(False, "layers with windows find a prefix where a prompt ended or prompts had parted")
    prompts_beside: bool = fact(False, "without chunked_prefill prompts are computed beside tokens, not before them")
    sized_tokens: int | None = fact(None, "tokens of the iteration by which memory for activations was sized")
    own_all_reduces: Mapping[str, OwnAllReduce] = field(
        default_factory=dict,
        metadata={"meaning": "all-reduces over NVLink in kernels of its own, by GPU architecture; elsewhere NCCL's"},
    )
    summed_norms: SummedNorms | None = fact(  # noqa: RUF009  a tuple
        None, "which all-reduces over tp also add and norm; None: none"
    )
    own_selected: bool = fact(
        False,
        "models whose attention selects keys have code of their own, which torch.compile does not make: all-reduces "
        "add and norm also behind experts, and no kernel quantizes for the next",
    )
    quantizing: Mapping[str, tuple[Quantizing, ...]] = field(
        default_factory=dict,
        metadata={
            "meaning": "by a matmul's dtype, which kernels of dense layers write its input in that dtype; after others "
            "a kernel of its own does"
        },
    )
    quantizing_blocks: tuple[Quantizing, ...] = fact(
        (), "likewise beside a checkpoint's blocks in fp8, on Hopper (others keep their scales in another order)"
    )
    quantizing_compiled: bool = fact(
        True, "torch.compile puts this there, so not with cuda_graphs false; else it is so in all but LoRA's iterations"
    )
    fp8_cache: bool = fact(
        False,
        "the cache is in fp8 if linear layers have 8 or 4 bits; with a checkpoint published in fp8, only if the "
        "checkpoint says so",
    )
    checkpoint_cache: bool = fact(False, "the cache is in fp8 where the checkpoint of the weights says so")
    fp8_selected: bool = fact(False, "on Blackwell, a cache of latents of which an indexer selects is in fp8")
    unseen_share: float = fact(
        0.0,
        "if only some layers have windows: the part of a sequence's tokens for which these layers reserve cache; "
        "0: only the tokens that the window sees",
    )
    fp32_states: bool = fact(False, "keeps states of layers in fp32, unless the model says otherwise")
    latent_blocks: LatentBlocks = fact(  # noqa: RUF009  a tuple
        LatentBlocks(), "tokens of a block of latent attention's cache, where nobody says"
    )
    latents: LatentKernels = fact(LatentKernels(), "kernels of latent attention")  # noqa: RUF009  a tuple
    rope_kernels: RopeKernels = fact(  # noqa: RUF009  a tuple
        RopeKernels(), "kernels of rope and of norms on queries and keys"
    )
    shared_experts: SharedExperts = fact(  # noqa: RUF009  a tuple
        SharedExperts(), "what computes shared experts beside routed ones"
    )
    layer_groups: bool = fact(
        False,
        "blocks are as large for every kind of layers, which are divided into groups of equally many; layers with a "
        "state take a block of each sequence",
    )
    two_batches: TwoBatches | None = fact(  # noqa: RUF009  a tuple
        None, "how it overlaps two halves of a batch; None: it cannot"
    )
    eplb: bool = fact(False, "places experts by popularity (`inference.eplb`)")
    all2all: tuple[str, ...] = fact(
        ("all_to_all", "deepep", "allgather_reducescatter", "naive"),
        "backends of experts' messages over several replicas (`sim.variants.all2all`), its own choice first",
    )
    sums_prompts: tuple[bool, bool] = fact(
        (False, False),
        "where a replica computes prompts, ranks gather all tokens by an all-reduce, of zeros but for their own, and "
        "all-reduce the results; the latter also where each replica is one rank with experts of its own",
    )
    gathers_narrow: bool = fact(False, "a backend that gathers tokens does so in 8 bits beside fp8 weights")
    reads_checkpoint: bool = fact(
        False, "weights are kept as the model's checkpoint stores them (`quantization` of its config.json)"
    )
    splits_experts: bool = fact(False, "the ranks of tp split every expert")
    vocab_multiple: int | None = fact(
        None,
        "entries of the vocabulary are padded to a multiple of this and of the ranks of tp; None: of 128 for each "
        "rank, as Megatron-LM pads them",
    )
    experts_speed: float = fact(1.0, "speed of fp8 experts' matmuls by that of the profile's points")
    called: str = fact("", "what tables call it where they name no version")
    dp_attention: bool = fact(
        False,
        "replicas that share experts are one server, whose tp counts the ranks of all: they share its chunks' tokens, "
        "and keep 0.3 of the share of output free; where they split each expert, they split shared experts, too",
    )
    fraction: Callable[[Server, Defaults], float] | None = fact(  # noqa: RUF009
        None, "memory_fraction of a server, by its other defaults"
    )
    outside: OutsideMemory = fact(  # noqa: RUF009  a tuple
        OutsideMemory(), "memory beside PyTorch's tensors, which the cache cannot have"
    )
    activations_outside: bool = fact(
        False, "memory_fraction is of weights and cache alone; an iteration's tensors are in the rest of the memory"
    )
    drafts_inside: bool = fact(
        False, "with `activations_outside`, a draft's weights and cache are part of memory_fraction; else in the rest"
    )
    caps_chunks: bool = fact(True, "SGLang: a prompt beyond max_prefill_tokens waits, though a chunk of it had room")
    interval_skips_text: bool = fact(False, "with a stream_interval the server gets no tokens between pieces")
    mxfp8_inputs: bool = fact(False, "experts in mxfp4 get inputs in mxfp8 where the GPU multiplies these")
    drafts_as_told: bool = fact(False, "told a format of weights, it keeps a draft's in it, too; else as published")
    whole_prompt_tokens: int | None = fact(
        None,
        "without chunks max_batch_tokens are as many as a request may have, where that is known, and at least so many, "
        "or (0) as many as with chunks",
    )
    budget_for_all: bool = fact(
        False,
        "it does not start unless max_batch_tokens are at least as many as max_running_requests, and where it computes "
        "prompts whole as many as a request may have",
    )
    fewer_in_budget: bool = fact(False, "left out, max_running_requests are at most max_batch_tokens")
    room_for_longest: bool = fact(
        False, "it does not start unless its cache has room for one request as long as it may be"
    )
    request_margin_tokens: int = fact(0, "a request has to be shorter than the limit by so many tokens")
    defaults: Defaults = fact(Defaults(), "what keys are where a scenario leaves them out")  # noqa: RUF009  a tuple
    cases: tuple[Case, ...] = fact((), "where they are others; of those that hold the last decides")

    def never_preempts(self, policy: CapacityPolicy | None = None) -> bool:
        """Whether there is room for all that running requests will write when another enters."""
        return self.reserved_output >= 1.0 and policy != "max_utilization"

    def overlaps_with(self, told: bool | None, drafts: Drafts, pp: int, trees: bool = False) -> bool:
        """Whether the host works beside the GPU, told so or not (None), with who drafts (trees?) and so many stages."""
        without = (trees and not self.overlaps_trees) or (pp > 1 and not self.overlaps_stages)
        if without or not (self.overlaps if told is None else told):
            return False
        if told and drafts == "model" and self.may_overlap_drafting:
            return True
        text = self.text is not None and self.text.overlaps
        return drafts == "none" or (text if drafts == "text" else self.overlaps_drafting[drafts == "model"])

    def mixes(self, chunked: bool, drafts: bool, pp: int) -> bool:
        """Whether iterations have prompts and tokens, with `chunked_prefill` and drafted tokens as said and so many
        pipeline stages (SGLang, srt/server_args.py: enable_mixed_chunk is switched off with drafts, refused with
        stages)."""
        return self.prompts_beside or (chunked and not (self.prompts_lead and (drafts or pp > 1)))

    def padding_of_vocab(self, tp: int) -> int:
        """The number of which the vocabulary's entries are padded to a multiple, split over `tp` ranks."""
        return 128 * tp if self.vocab_multiple is None else math.lcm(self.vocab_multiple, tp)

    def host_on(self, architecture: str) -> HostTimes:
        """Host seconds beside GPUs of an architecture; of one not known, those of the last that is."""
        if not self.host:
            return HostTimes()
        return self.host.get(architecture) or list(self.host.values())[-1]

    def within_budget(self, own: Defaults, budget: int | None) -> Defaults:
        """The defaults beside a stated max_batch_tokens (None: left out, too)."""
        if not self.fewer_in_budget:
            return own
        return own._replace(max_running_requests=min(own.max_running_requests, budget or own.max_batch_tokens))

    def by_positions(self, chunked: bool) -> frozenset[str]:
        """Keys whose defaults depend on how long a request may be, with or without chunks of prompts."""
        depends = self.whole_prompt_tokens is not None and not (chunked and self.defaults.chunked_prefill)
        whole = {"max_batch_tokens"} if depends else set()
        return frozenset(whole.union(*[case.changes for case in self.cases if case.positions]))

    def defaults_on(self, architecture: str, server: Server, positions: int, whole: bool = False) -> Defaults:
        """What the engine sets by itself on such GPUs for requests of up to so many positions (0: unknown); `whole`: it
        is told to compute prompts whole."""
        d, replicas = self.defaults, server.replicas if self.dp_attention else 1
        server = server._replace(tp=server.tp * replicas, replicas=replicas)  # SGLang counts all of them as tp
        drafting = server.drafts != "none"
        for case in self.cases:
            fits = server.memory_bytes >= case.memory_bytes and architecture not in case.but
            fits = fits and case.code in (None, server.code)
            if fits and server.tp >= case.tp and positions >= case.positions and drafting >= case.drafting:
                d = d._replace(**case.changes)
        if server.graphs_to is not None and self.asked_graphs is not None:
            most = server.graphs_to if self.asked_graphs.extends else min(server.graphs_to, d.graphs_to)
            d = d._replace(graphs_to=most)
        if self.whole_prompt_tokens is not None and positions and (whole or not d.chunked_prefill):
            d = d._replace(max_batch_tokens=max(positions, self.whole_prompt_tokens or d.max_batch_tokens))
        if self.fraction is not None:
            sized = d if server.tokens is None else d._replace(max_batch_tokens=server.tokens)
            share = self.fraction(server, sized)
            if share <= NOTHING_LEFT:  # it starts only if told its share: what its own limits leave stands for it
                share = self.fraction(server._replace(running=None), d)
                d = d._replace(takes_all=share > NOTHING_LEFT)
            d = d._replace(memory_fraction=share)
        return d._replace(max_batch_tokens=max(1, d.max_batch_tokens // replicas))
