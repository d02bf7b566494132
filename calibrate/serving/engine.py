"""Real continuous batching: the simulator's own scheduler decides, and torch computes.

Both the engine and the simulator run `sim.serve.scheduling.scheduler`. So they can differ in times, but not in the
batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice

from calibrate.serving.cache import HostPrefixes, HostSequences, PagedCache, make_cache
from calibrate.serving.drafting import Drafts
from calibrate.serving.forward import Clock, Model, SequenceChunk, forward
from sim.serve.cache.kv_cache import HostCache, KvCache
from sim.serve.requests import Request
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Batch, Limits, Piece, Sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request with its real tokens. Prompts of one `prefix_id` share their first `prefix_tokens` tokens."""

    tokens: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0
    prefix_id: str = ""
    prefix_tokens: int = 0

    @property
    def request(self) -> Request:
        return Request(self.arrival_s, len(self.tokens), self.output_tokens, self.prefix_id, self.prefix_tokens)


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers of a scenario's section `inference`."""

    blocks: int
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 8192
    host_tokens: int = 0  # most tokens of prefixes in host memory; 0 keeps none
    swap_tokens: int = 0  # most tokens of preempted sequences in host memory; 0 recomputes them
    max_concurrency: int | None = None  # most requests under way


@dataclass(slots=True)
class Served:
    """The outcome: each prompt's output tokens, the scheduler with its sequences, times and counts, the iterations."""

    outputs: list[list[int]]
    sequences: list[Sequence]
    scheduler: Scheduler
    cache: PagedCache
    host: HostPrefixes
    drafts: Drafts | None = None
    swapped: HostSequences = field(default_factory=HostSequences)
    seconds: float = 0.0
    forward_s: float = 0.0  # seconds of the last forward, and of the draft's before it
    iterations: list[tuple[float, float, int]] = field(default_factory=list)  # start, end, tokens
    gaps: list[float] = field(default_factory=list)  # seconds of an iteration outside its forward


def serve(
    model: Model,
    prompts: Items[Prompt],
    settings: Settings,
    clock: Clock = time.perf_counter,
    agree: Callable[[float], float] = float,
    drafts: Drafts | None = None,
) -> Served:
    """Serve all prompts with greedy decoding. Times are seconds of `clock` since the start.

    `agree`: the time that all ranks of the model schedule with, of each rank's own. `drafts`: what drafts tokens.

    Raises:
        ValueError: if a prompt can never fit, or if prompts of one prefix do not share its tokens.
    """
    check(prompts, settings)
    served = begin_serving(model, [Sequence(p.request, i) for i, p in enumerate(prompts)], settings, drafts)
    scheduler = served.scheduler
    pending = sorted(served.sequences, key=lambda s: s.request.arrival_s)
    begin, left = clock(), len(pending)
    places, place_since_s = settings.max_concurrency or left, 0.0
    while left:
        now = agree(clock() - begin)
        while pending and places and pending[0].request.arrival_s <= now:
            sequence = pending.pop(0)
            sequence.arrival_s = max(sequence.request.arrival_s, place_since_s)
            scheduler.waiting.append(sequence)
            places -= 1
        batch = scheduler.schedule(now)
        if not batch.pieces:
            time.sleep(max(0.0, pending[0].request.arrival_s - now))
            continue
        iterate(model, prompts, served, batch, clock)
        end = agree(clock() - begin)
        done = finish(prompts, served, batch, end)
        if done and not places:
            place_since_s = end
        places += done
        left -= done
        served.iterations.append((now, end, sum(p.tokens for p in batch.pieces)))
        served.gaps.append(clock() - begin - now - served.forward_s)
    served.seconds = clock() - begin
    return served


def begin_serving(model: Model, sequences: list[Sequence], settings: Settings, drafts: Drafts | None = None) -> Served:
    """An engine with an empty cache, whose scheduler knows none of the sequences yet."""
    host = HostCache(settings.host_tokens) if settings.host_tokens else None
    limits = Limits(settings.max_running, settings.max_batch_tokens, settings.max_running)
    scheduler = Scheduler(
        KvCache(settings.blocks, settings.block_tokens), limits, host=host, swap_tokens=settings.swap_tokens
    )
    if drafts is not None:
        scheduler.drafted, scheduler.acceptance = drafts.tokens, drafts
    cache = make_cache(model.config, settings.blocks, settings.block_tokens, model.dtype, model.device)
    return Served([[] for _ in sequences], sequences, scheduler, cache, HostPrefixes(), drafts)


def iterate(model: Model, prompts: Items[Prompt], served: Served, batch: Batch, clock: Clock) -> None:
    """Run one iteration: allocate and free blocks as the scheduler counted, load prefixes, run the forward, decode."""
    cache = served.cache
    for s in [served.sequences[index] for index in cache.tables]:
        if not s.running:  # finished or preempted
            if s.swapped:
                served.swapped.swap_out(cache, s.index, s.swapped)
            cache.release(s.index)
            if served.drafts is not None:
                served.drafts.release(s.index)
    for s, tokens, *_ in batch.pieces:
        fresh = s.index not in cache.tables
        cache.grow(s.index, s.computed + tokens)
        if s.index in served.swapped.kept:
            served.swapped.swap_in(cache, s.index)
        elif fresh and s.computed:
            served.host.load(cache, s.index, prompts[s.index].tokens, s.computed)
    begin = clock()
    drafted = _drafted(prompts, served, batch)
    parts = [
        SequenceChunk(s.index, _tokens(prompts, served, p) + drafted.get(s.index, ()), s.computed, 1 + p.drafted)
        for p in batch.pieces
        for s in (p.sequence,)
    ]
    chosen = iter(forward(model, cache, parts).argmax(-1).tolist())
    served.forward_s = clock() - begin
    for piece in batch.pieces:
        s, found = piece.sequence, tuple(islice(chosen, 1 + piece.drafted))
        if piece.samples and piece.drafted:
            assert served.drafts is not None
            left = s.request.output_tokens - s.generated
            found = served.drafts.check(s.index, drafted[s.index], found, s.computed + 1, left)
        if piece.samples:
            served.outputs[s.index] += found


def _drafted(prompts: Items[Prompt], served: Served, batch: Batch) -> dict[int, tuple[int, ...]]:
    """Return the drafted tokens of each sequence that has any in this iteration; the draft computes prompts, too."""
    if served.drafts is None:
        return {}
    known = {p.sequence.index: _all_tokens(prompts, served, p) for p in batch.pieces}
    counts = {p.sequence.index: p.drafted for p in batch.pieces if p.drafted}
    served.drafts.feed({s: tokens for s, tokens in known.items() if s not in counts})
    return served.drafts.draft({s: known[s] for s in counts}, counts)


def _all_tokens(prompts: Items[Prompt], served: Served, piece: Piece) -> tuple[int, ...]:
    """Return a sequence's tokens to the end of what a piece computes of those that are known."""
    s = piece.sequence
    return (prompts[s.index].tokens + tuple(served.outputs[s.index]))[: s.computed + piece.tokens]


def _tokens(prompts: Items[Prompt], served: Served, piece: Piece) -> tuple[int, ...]:
    """Return the tokens that a piece computes: of the prompt, and of the output before a preemption."""
    s, prompt = piece.sequence, prompts[piece.sequence.index].tokens
    end = s.computed + piece.tokens
    if s.computed >= len(prompt):
        return tuple(served.outputs[s.index][s.computed - len(prompt) : end - len(prompt)])
    return (prompt + tuple(served.outputs[s.index]))[s.computed : end]


def finish(prompts: Items[Prompt], served: Served, batch: Batch, end_s: float) -> int:
    """End the iteration in the scheduler and store the prefixes that it keeps; return how many sequences ended."""
    scheduler = served.scheduler
    first = [p.sequence for p in batch.pieces if p.sequence.generated == 0]
    done = scheduler.finish(batch, end_s)
    block = served.cache.block_tokens
    if scheduler.host is not None:
        for s in first:
            kept = scheduler.host.kept.get(s.request.prefix_id, 0)
            count = min(kept, s.request.prefix_tokens, s.computed) // block * block
            if count:
                served.host.store(served.cache, s.index, prompts[s.index].tokens, count)
    for s in done:
        served.cache.release(s.index)
        if served.drafts is not None:
            served.drafts.release(s.index)
    return len(done)


def check(prompts: Items[Prompt], settings: Settings) -> None:
    """Refuse prompts that never fit (`ValueError`), or that do not share the tokens of their prefix."""
    beginnings: dict[str, tuple[int, ...]] = {}
    for i, p in enumerate(prompts):
        longest = len(p.tokens) + p.output_tokens - 1
        if longest > settings.blocks * settings.block_tokens:
            raise ValueError(f"prompt {i}: {longest} tokens; the cache holds {settings.blocks * settings.block_tokens}")
        if p.prefix_id:
            mine = p.tokens[: p.prefix_tokens]
            known = beginnings.get(p.prefix_id, ())
            common = min(len(mine), len(known))
            if mine[:common] != known[:common]:
                raise ValueError(f"prompt {i}: its first {common} tokens are not those of prefix {p.prefix_id!r}")
            beginnings[p.prefix_id] = max(mine, known, key=len)
